"""docker/compose.yaml: valid, and what it promises holds."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from tests.deploy import kit

SERVICES = kit.compose()["services"]
EXAMPLE = (kit.DOCKER / ".env.example").read_text()
DOCUMENTED = re.findall(r"^(\w+)=", EXAMPLE, re.MULTILINE)
FILLED = {name: "x" for name in DOCUMENTED if re.search(r"PASSWORD|AUTH|ACCESS_KEY", name)}
ONE_SHOT = {"bootstrap", "bucket"}
every_service = pytest.mark.parametrize("name", SERVICES)


@pytest.mark.parametrize("given", [{}, FILLED | {"GPU_COUNT": "4", "FLOW_RUNS": "3"}], ids=["as written", "filled"])
def test_the_compose_schema_accepts_it(given, tmp_path):
    tree = kit.compose()
    path = tmp_path / "compose.yaml"
    path.write_text(yaml.safe_dump(kit.interpolate(tree, given) if given else tree))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_variable_is_documented_and_no_other():
    used = {found["name"] for found in kit.variables(kit.COMPOSE.read_text()) if found["name"] != "VARIABLE"}
    assert used | {"COMPOSE_PROFILES"} == set(DOCUMENTED)
    assert len(DOCUMENTED) == len(set(DOCUMENTED))


def test_no_secret_has_a_default_or_stands_in_the_file():
    for found in kit.variables(kit.COMPOSE.read_text()):
        if re.search(r"PASSWORD|AUTH_STRING|ACCESS_KEY", found["name"]):
            assert found["kind"] == "?", f"{found['name']} must have no default"
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|SECRET|AUTH|ACCESS_KEY|TOKEN", key):
                assert str(value).startswith("${"), f"{name}: {key}"
    assert re.findall(r"^(?!#).+=\S+", EXAMPLE, re.MULTILINE) == ["COMPOSE_PROFILES=cpu"]


def test_a_missing_secret_is_an_error_that_names_it():
    for name in FILLED:
        with pytest.raises(ValueError, match=name):
            kit.interpolate(SERVICES, {key: value for key, value in FILLED.items() if key != name})


@every_service
def test_the_image_can_be_given_by_digest_and_has_a_tag_by_default(name):
    image = SERVICES[name]["image"]
    (variable,) = kit.variables(image)
    assert image == variable[0]
    assert re.fullmatch(r"[a-z0-9/.-]+:[\w.-]+", variable["rest"]) and not variable["rest"].endswith(":latest")


@every_service
def test_it_says_whether_it_is_healthy(name):
    check = SERVICES[name]["healthcheck"]
    assert (
        check == {"disable": True} if name in ONE_SHOT else {"test", "interval", "timeout", "retries"} <= check.keys()
    )


@every_service
def test_it_waits_for_what_can_come_true(name):
    for other, condition in SERVICES[name].get("depends_on", {}).items():
        wanted = "service_completed_successfully" if other in ONE_SHOT else "service_healthy"
        assert condition == {"condition": wanted}
        assert not SERVICES[other].get("profiles"), f"{other} may not run"


@every_service
def test_its_named_volumes_are_declared(name):
    sources = [volume.split(":")[0] for volume in SERVICES[name].get("volumes", []) if not volume.startswith("$")]
    assert set(sources) <= kit.compose()["volumes"].keys()


@every_service
def test_it_comes_back_unless_it_runs_once(name):
    assert SERVICES[name].get("restart") == (None if name in ONE_SHOT else "unless-stopped")
    assert str(SERVICES[name].get("ports", "")).count("BIND:-127.0.0.1") == len(SERVICES[name].get("ports", []))


def test_engines_are_in_a_profile_each_and_only_one_gets_gpus():
    profiles = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}
    assert profiles == {"worker-cpu": ["cpu"], "worker-gpu": ["gpu"]}
    assert [name for name, service in SERVICES.items() if "deploy" in service] == ["worker-gpu"]
    (device,) = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]


def test_every_pool_of_prefect_yaml_has_workers_that_hold_one_engine_each():
    deployments = yaml.safe_load((kit.ROOT / "prefect.yaml").read_text())["deployments"]
    pools: dict[str, set[str]] = {}
    for service in SERVICES.values():
        command = service.get("command", [])
        if "worker" in command:
            pool, limit = command[command.index("--pool") + 1], command[command.index("--limit") + 1]
            pools.setdefault(pool, set()).add(limit)
            assert int(service["stop_grace_period"].removesuffix("s")) >= 60
    assert pools.keys() == {deployment["work_pool"]["name"] for deployment in deployments}
    assert pools["coresample-gpu"] == {"1"}
    # A parent waits for its workers: in their pool it would take the slot that they need.
    (extract,) = [deployment for deployment in deployments if deployment["name"] == "extract"]
    assert extract["work_pool"]["name"] == "coresample-cpu"


def test_both_halves_of_the_server_agree():
    server, services = (SERVICES[name]["environment"] for name in ("server", "services"))
    assert {key: value for key, value in server.items() if key != "PREFECT_UI_API_URL"} == services
    assert server["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"] == "prefect_redis.lease_storage"


@pytest.mark.parametrize(("image", "name"), [("server", "server"), ("cpu", "worker-cpu"), ("gpu", "worker-gpu")])
def test_an_image_does_by_itself_what_compose_has_it_do(image, name):
    dockerfile = kit.DOCKER / f"{image}.Dockerfile"
    assert json.loads(kit.said(dockerfile, "CMD")[0]) == SERVICES[name]["command"]
    (check,) = kit.said(dockerfile, "HEALTHCHECK")
    assert ["CMD", *json.loads(check.partition("CMD ")[2])] == SERVICES[name]["healthcheck"]["test"]
