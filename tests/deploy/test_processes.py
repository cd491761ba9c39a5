"""The very commands, health checks and environments of docker/compose.yaml, run as plain processes.

PostgreSQL, Redis, Prefect's server and its services apart, and a worker; what a container engine would add is not here.
"""

from __future__ import annotations

import base64
import json
import shutil
import signal
import time
import urllib.error
import urllib.request

import psutil
import pytest

from tests.deploy import kit
from tests.deploy.site import SECRETS, Site, missing

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def site():
    """PostgreSQL, Redis, the server and the services, all healthy by their own checks."""
    if lacks := missing():
        pytest.skip(f"not installed: {', '.join(lacks)}")
    made = Site()
    try:
        made.start_postgres()
        made.start("redis")
        made.wait("redis", 30)
        made.start("server")
        made.wait("server", 240)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def pools(site):
    """What the bootstrap service makes."""
    done = site.run("bootstrap")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return site


def ask(site, path, body=None, auth=SECRETS["PREFECT_AUTH_STRING"]):
    """Status and answer of the server's API."""
    request = urllib.request.Request(f"http://127.0.0.1:{site.port['server']}/api{path}")
    if auth:
        request.add_header("Authorization", f"Basic {base64.b64encode(auth.encode()).decode()}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, None


def redis_keys(site, pattern):
    """Keys in the server's Redis."""
    command = ["redis-cli", "-p", str(site.port["redis"]), "--scan", "--pattern", pattern]
    done = site.client(*command, service="redis")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_server_asks_for_the_auth_string_everywhere_but_at_its_health(site):
    assert ask(site, "/health", auth=None) == (200, True)
    assert ask(site, "/ready", auth=None)[0] == 200
    assert ask(site, "/work_pools/filter", {}, auth=None)[0] == 401
    assert ask(site, "/work_pools/filter", {}, auth="team:wrong")[0] == 401
    assert ask(site, "/work_pools/filter", {})[0] == 200


def test_the_server_shows_its_ui_from_a_folder_that_its_user_may_write(site):
    with urllib.request.urlopen(f"http://127.0.0.1:{site.port['server']}/", timeout=30) as response:
        assert b"<html" in response.read().lower()
    assert any((site.folder / "server" / "ui").rglob("index.html"))


def test_the_services_beat_and_are_unhealthy_before_they_start_and_when_they_hang(site):
    done = site.health("services")
    assert (done.returncode, "no heartbeat of services" in done.stderr) == (1, True)
    process = site.start("services")
    site.wait("services", 120)
    children = site.client("pgrep", "-P", str(process.pid)).stdout.split()
    assert len(children) == 1
    site.client("kill", "-STOP", children[0])
    try:
        until = time.monotonic() + 90
        while site.health("services").returncode == 0 and time.monotonic() < until:
            time.sleep(3)
        assert site.health("services").returncode == 1
    finally:
        site.client("kill", "-CONT", children[0])
    site.wait("services", 60)


def take_lease(site, name):
    """A limit of one, whose slot is held for ten minutes."""
    assert ask(site, "/v2/concurrency_limits/", {"name": name, "limit": 1, "active": True})[0] == 201
    body = {"names": [name], "slots": 1, "mode": "concurrency", "lease_duration": 600}
    assert ask(site, "/v2/concurrency_limits/increment-with-lease", body)[0] == 200


def test_leases_are_kept_in_redis(site):
    before = redis_keys(site, "prefect:concurrency:lease:*")
    take_lease(site, "lease-test")
    assert len(redis_keys(site, "prefect:concurrency:lease:*")) == len(before) + 1


@pytest.mark.parametrize("pool", sorted(kit.POOLS))
def test_the_server_takes_the_kubernetes_templates(site, pool):
    template = kit.BASE / "work-pools" / f"{pool}.json"
    flags = ["--type", "kubernetes", "--base-job-template", str(template)]
    done = site.client("prefect", "work-pool", "create", f"{pool}-k8s", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    status, pool_read = ask(site, f"/work_pools/{pool}-k8s")
    assert (status, pool_read["base_job_template"]) == (200, kit.POOLS[pool])


def test_a_worker_without_its_pool_names_it_and_makes_none(site):
    """Prefect 3.7.7 hangs then, with the thread of its health server, and does not even end when it is told to."""
    site.services["early"] = site.services["worker-cpu"] | {
        "command": ["nowhere" if word == "coresample-gpu" else word for word in site.services["worker-cpu"]["command"]]
    }
    process, log, deadline = site.start("early"), site.folder / "early.log", time.monotonic() + 120
    while "nowhere" not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(1)
    assert ask(site, "/work_pools/nowhere")[0] == 404
    site.running.pop("early")
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.wait(30)


def test_bootstrap_makes_the_pools_and_deployments_and_may_run_again(pools):
    for _ in range(2):
        status, found = ask(pools, "/deployments/filter", {})
        assert status == 200
        names = {item["name"] for item in found}
        assert {"extract", "gpu-1", "gpu-4", "gpu-8", "cpu", "re-extract", "verify", "gc"} <= names
        assert {item["work_pool_name"] for item in found} <= kit.POOLS.keys()
        assert len(found) == len({(item["flow_id"], item["name"]) for item in found})
        done = pools.run("bootstrap")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("service", ["worker-flows", "worker-cpu"])
def test_a_worker_is_healthy_and_ends_when_told_to(pools, service):
    assert pools.health(service).returncode == 1
    pools.start(service)
    pools.wait(service, 120)
    assert pools.stop(service) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    assert pools.health(service).returncode == 1


def test_the_server_goes_on_after_a_restart(site):
    take_lease(site, "over-a-restart")
    assert site.stop("server") in (0, 128 + signal.SIGTERM)
    assert site.health("server").returncode == 1
    site.start("server")
    site.wait("server", 240)
    assert ask(site, "/v2/concurrency_limits/over-a-restart")[1]["active_slots"] == 1
    assert shutil.which("redis-cli") and redis_keys(site, "prefect:concurrency:lease:*")
