"""Manifests under kubernetes/: valid for the oldest and newest version we name, complete, without privileges."""

import re
import shutil
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from tests.deploy import kit

MANIFESTS = kit.manifests()
IDS = [f"{name}-{item['kind']}-{item['metadata']['name']}" for name, item in MANIFESTS]
PODS = [(name, item) for name, item in MANIFESTS if kit.pod_spec(item)]
VERSIONS = ["1.30", kubernetes_validate.latest_version()]
SECRETS = {
    "coresample-prefect": "secret.env.example",
    "coresample-object-store": "object-store.env.example",
}
every_pod = pytest.mark.parametrize(
    "item", [item for _, item in PODS], ids=[item["metadata"]["name"] for _, item in PODS]
)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("item", [item for _, item in MANIFESTS], ids=IDS)
def test_the_schema_accepts_it(item, version):
    kubernetes_validate.validate(item, version, strict=True)


def test_the_schema_is_strict():
    broken = yaml.safe_load((kit.BASE / "volumes.yaml").read_text())
    broken["spec"]["accessMode"] = "ReadWriteMany"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("folder", [kit.BASE, kit.OVERLAY], ids=["base", "overlay"])
def test_the_kustomization_names_every_file_and_no_other(folder):
    tree = yaml.safe_load((folder / "kustomization.yaml").read_text())
    here = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert {name for name in tree["resources"] if name.endswith(".yaml")} == here
    generated = [file for item in tree.get("configMapGenerator", []) for file in item["files"]]
    assert {kit.Path(file).name for file in generated} == (
        {f"{name}.json" for name in kit.POOLS} if folder == kit.BASE else set()
    )


@every_pod
def test_it_runs_without_privileges(item):
    pod = kit.pod_spec(item)
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] >= 999
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod.get("serviceAccountName") == "prefect-worker" or pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}


@every_pod
def test_it_has_limits_probes_and_only_declared_volumes(item):
    pod = kit.pod_spec(item)
    claims = {claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", [])}
    volumes = {volume["name"] for volume in pod.get("volumes", [])} | claims
    for container in pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        assert "livenessProbe" in container or item["kind"] == "Job"


@every_pod
def test_what_it_refers_to_exists(item):
    names = {(other["kind"], other["metadata"]["name"]) for _, other in MANIFESTS}
    for container in kit.pod_spec(item)["containers"]:
        for source in container.get("envFrom", []):
            assert ("ConfigMap", source["configMapRef"]["name"]) in names
        for variable in container.get("env", []):
            if "valueFrom" in variable:
                secret = variable["valueFrom"]["secretKeyRef"]
                example = (kit.OVERLAY / SECRETS[secret["name"]]).read_text()
                assert re.search(rf"^{secret['key']}=", example, re.MULTILINE)


def test_services_and_ingress_reach_pods():
    labels = [item["spec"]["template"]["metadata"]["labels"] for _, item in PODS]
    ports = {item["metadata"]["name"]: item["spec"] for _, item in MANIFESTS if item["kind"] == "Service"}
    for service in ports.values():
        assert any(service["selector"].items() <= of_pod.items() for of_pod in labels)
    (ingress,) = [item for _, item in MANIFESTS if item["kind"] == "Ingress"]
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend["port"]["name"] in {port["name"] for port in ports[backend["name"]]["ports"]}
    assert ingress["spec"]["tls"][0]["hosts"] == [ingress["spec"]["rules"][0]["host"]]
    client = next(item for _, item in MANIFESTS if item["metadata"]["name"] == "coresample-client")
    assert re.search(r"//prefect-server\.coresample\.svc:4200/", client["data"]["PREFECT_API_URL"])


def test_workers_may_do_what_prefect_kubernetes_does_and_no_more():
    rules = next(item for _, item in MANIFESTS if item["kind"] == "Role")["rules"]
    allowed = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert {("jobs", "create"), ("jobs", "delete"), ("pods", "watch"), ("pods/log", "get"), ("jobs", "list")} <= allowed
    assert {resource for resource, verb in allowed if verb in ("create", "update", "patch", "delete")} == {"jobs"}


def test_one_worker_per_pool_and_none_asks_for_a_gpu():
    workers = {name: item for name, item in ((i["metadata"]["name"], i) for _, i in PODS) if "worker" in name}
    pools = set()
    for item in workers.values():
        (container,) = kit.pod_spec(item)["containers"]
        pools.add(container["args"][container["args"].index("--pool") + 1])
        assert "nvidia" not in str(container["resources"]) and "--no-create-pool-if-not-found" in container["args"]
    assert pools == kit.POOLS.keys()


def test_examples_of_secrets_hold_none_and_the_real_ones_stay_out_of_git():
    ignored = (kit.OVERLAY / ".gitignore").read_text().split()
    for example in SECRETS.values():
        assert f"/{example.removesuffix('.example')}" in ignored
        for line in (kit.OVERLAY / example).read_text().splitlines():
            assert line.startswith("#") or re.search(r"PASSWORD|KEY|SECRET|us-east-1", line.partition("=")[2])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_example(tmp_path):
    shutil.copytree(kit.ROOT / "kubernetes", tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "overlays" / "example"
    for example in SECRETS.values():
        shutil.copy(overlay / example, overlay / example.removesuffix(".example"))
    done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    for item in built:
        kubernetes_validate.validate(item, VERSIONS[-1], strict=True)
    assert SECRETS.keys() <= {item["metadata"]["name"] for item in built if item["kind"] == "Secret"}
    images = {c["image"] for item in built for c in (kit.pod_spec(item) or {"containers": []})["containers"]}
    assert images == {"coresample-server:0.1.0", "coresample-gpu:0.1.0", "postgres:17", "redis:7.4"}
    assert {item["metadata"].get("namespace") for item in built} == {"coresample", None}


def test_the_bootstrap_command_has_flags_that_it_knows():
    pods = [kit.pod_spec(item) for _, item in PODS if item["metadata"]["name"] == "coresample-bootstrap"]
    command = pods[0]["containers"][0]["args"]
    assert command[:3] == ["python", "-m", "flows.bootstrap"]
    done = subprocess.run(
        [sys.executable, *command[1:3], "--help"], cwd=kit.ROOT, capture_output=True, text=True, check=True
    )
    assert {word for word in command if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", done.stdout))
    (folder,) = [word for word in command if "/" in word]
    assert {path.stem for path in (kit.ROOT / folder).glob("*.json")} == kit.POOLS.keys()
    mounts = {mount["mountPath"] for mount in pods[0]["containers"][0]["volumeMounts"]}
    assert f"/app/{folder}" in mounts
