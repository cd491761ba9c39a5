"""What a team does: deploy, extract over two workers, lose some of them, extract again when the data has changed.

One site for the module, whose tests build on each other in the order of this file: each starts from what the ones
before have stored, as a team's weeks do.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from extract_core.errors import StoreError
from extract_core.store.commits import all_records, read_commits
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import latest_version, list_versions, read_manifest
from tests.e2e.prefect_site.browser import browser, chromium
from tests.e2e.prefect_site.site import AUTH, Site, postgres_tools
from tests.faults import servers

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(1500)]
CHATS, CHANGED = 200, 10
SECRET = "planted-0123456789-secret"


@pytest.fixture(scope="module")
def store() -> Iterator[servers.Server]:
    """An S3 server."""
    server = servers.start("moto")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, store: servers.Server) -> Iterator[Site]:
    """The server, one worker for parents and two for engines."""
    if postgres_tools() is None:
        if os.environ.get("REQUIRE_SYSTEM"):
            pytest.fail("Postgres is not installed")
        print("Postgres is not installed: SQLite instead")
    if chromium() is None:
        if os.environ.get("REQUIRE_SYSTEM"):
            pytest.fail("Chromium is not installed")
        pytest.skip("Chromium is not installed, in which the UI is looked at")
    keys = {**servers.CREDENTIALS, "AWS_SECRET_ACCESS_KEY": SECRET}
    found = Site(tmp_path_factory.mktemp("site"), keys)
    try:
        found.start()
        found.run("flows.bootstrap", "--gpu-slots", "2", "--stall-minutes", "30")
        found.start_worker("parent", "coresample-cpu")
        for name in ("first", "second"):
            found.start_worker(name, "coresample-gpu")
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def job(site: Site, store: servers.Server, demo_model: Path, sharegpt, tmp_path_factory) -> dict[str, Any]:
    """The small real model and real chats, into a bucket."""
    folder = tmp_path_factory.mktemp("data")
    chats = folder / "chats.jsonl"
    chats.write_bytes(sharegpt(CHATS).read_bytes())
    return {
        "root": f"s3://{servers.BUCKET}/team/chats",
        "model": {"path": str(demo_model), "dtype": "float32"},
        "data": {"path": str(chats)},
        "chat": {"max_length": 256},
        "layers": [2, 15, 30],
        "engine": {"kv_cache_bytes": "512MiB", "max_num_batched_tokens": 512, "max_num_seqs": 8},
        "store": {"shard_bytes": "4MiB", "dtype": "bfloat16", "storage_options": {"endpoint_url": store.endpoint}},
        "completeness": 0.5,
    }


@pytest.fixture(scope="module")
def root(site: Site, job: dict[str, Any]) -> Root:
    """The dataset, for looking at."""
    for name, value in site.environment.items():
        os.environ[name] = value
    return Root.open(job["root"], job["store"]["storage_options"])


def committed(root: Root) -> dict[str, str]:
    """Digest of every commit record by its path, over all plans."""
    try:
        plans = root.list("plans")
    except StoreError:
        return {}
    return {
        f"{plan}/{record.shard}.{record.round}": record.attempt
        for plan in plans
        for record in all_records(read_commits(root, plan))
    }


def engines(process: psutil.Process) -> list[psutil.Process]:
    """Guards of the engines under a process: leaders of their groups."""
    return [child for child in process.children(recursive=True) if "guard.py" in " ".join(child.cmdline())]


def worker_with_engine(site: Site) -> dict[str, psutil.Process]:
    """The guard of the engine under each worker that has one."""
    found = {}
    for name in site.workers:
        for guard in engines(psutil.Process(site.workers[name].pid)):
            found[name] = guard
    return found


def test_everything_deploys_as_committed(site: Site) -> None:
    found = {
        f"{site.ask('GET', '/flows/' + item['flow_id'])['name']}/{item['name']}": item
        for item in site.ask("POST", "/deployments/filter", {"limit": 50})
    }
    workers = [f"extract-worker/{name}" for name in ("cpu", "gpu-1", "gpu-4", "gpu-8")]
    assert set(found) == {"extract/extract", *workers, "re-extract/re-extract", "verify/verify", "gc/gc"}
    for name, deployment in found.items():
        assert deployment["pull_steps"], name
        assert deployment["status"] == "READY" or deployment["work_pool_name"], name
        schema = deployment["parameter_openapi_schema"]
        assert all(item.get("description") for item in schema["properties"].values()), f"{name} explains its parameters"
    for name in ("re-extract/re-extract", "verify/verify", "gc/gc"):
        [schedule] = found[name]["schedules"]
        assert schedule["schedule"]["timezone"] == "Etc/UTC"
        assert not schedule["active"]
        assert schedule["slug"]
    directories = {
        step["prefect.deployments.steps.set_working_directory"]["directory"]
        for deployment in found.values()
        for step in deployment["pull_steps"]
    }
    assert directories == {"{{ $CORESAMPLE_HOME }}"}, "every worker has a folder of its own"
    limited = [name for name, item in found.items() if item["concurrency_options"]]
    assert sorted(limited) == ["extract/extract", "gc/gc", "re-extract/re-extract", "verify/verify"]
    again = site.run("flows.bootstrap")
    assert "work pool coresample-gpu is there" in again
    names = [item["name"] for item in site.ask("POST", "/automations/filter", {"limit": 50})]
    assert len(names) == len(set(names)) == 5


def test_a_cancelled_run_ends_its_engines_and_keeps_what_is_committed(site: Site, job, root: Root) -> None:
    run = site.start_run("extract/extract", job=job, workers=1)
    site.wait_until("a shard was committed", lambda: committed(root), 300)
    guards = worker_with_engine(site)
    assert len(guards) == 1
    [child] = [item["id"] for item in site.flow_runs("extract-worker/cpu") if item["state"]["type"] == "RUNNING"]
    site.cancel(child)
    asked = time.monotonic()
    [guard] = guards.values()
    group = os.getpgid(guard.pid)
    site.wait_until("the engine is gone", lambda: not _members(group), 15, 0.1)
    took = time.monotonic() - asked
    state = site.wait_ended(child, 60)
    assert state["name"] == "Cancelled"
    print(f"engine gone {took:.1f} s after the worker run was cancelled")
    kept = committed(root)
    site.cancel(run)
    asked = time.monotonic()
    assert site.wait_ended(run, 90)["name"] == "Cancelled"
    print(f"parent gone {time.monotonic() - asked:.1f} s after it was cancelled")
    site.wait_until("no engine is left", lambda: not worker_with_engine(site), 30)
    for item in site.flow_runs("extract-worker/cpu"):
        assert site.wait_ended(item["id"], 60)["name"] == "Cancelled"
    assert kept.items() <= committed(root).items()
    assert list_versions(root) == []


def _members(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_a_job_survives_deaths_of_parent_worker_engine_and_server(site: Site, job, root: Root) -> None:
    """Two workers; their parent dies, then one with all under it, the other's engine in mid-shard, and the server."""
    kept = committed(root)
    assert kept, "the cancelled run committed something"
    first = site.start_run("extract/extract", job=job)
    guards = site.wait_until("two engines run", lambda: _two(worker_with_engine(site)), 300)
    before = len(committed(root))
    site.wait_until("both are at work", lambda: len(committed(root)) >= before + 2, 300)
    for process in site.flow_processes("parent"):
        process.kill()
    assert site.wait_ended(first, 60)["name"] == "Crashed"
    run = site.start_run("extract/extract", job=job)
    site.wait_until("the next parent found them", lambda: "at work already" in "".join(site.logs(run)), 120)
    look_while_it_runs(site, run)
    site.kill_worker("first")
    os.kill(engines(psutil.Process(site.workers["second"].pid))[0].pid, signal.SIGKILL)
    assert set(guards) == {"first", "second"}
    time.sleep(3)
    site.stop_server()
    time.sleep(8)
    site.start_server()
    state = site.wait_ended(run, 900)
    assert state["name"] == "Completed", (state, site.logs(run))
    assert latest_version(root) == 1
    report = verify(root)
    assert report.problems == []
    manifest = read_manifest(root, 1)
    assert manifest.accounting.total == manifest.accounting.input == CHATS
    records = committed(root)
    assert len(records) == len(manifest.shards)
    assert kept.items() <= records.items(), "no committed shard was done again"
    children = site.flow_runs("extract-worker/cpu")
    states = Counter(item["state"]["name"] for item in children)
    print(f"worker runs: {dict(states)}")
    assert states["Crashed"] == 1, "the run on the dead machine, and no healthy one"
    assert site.flow_run(first)["state"]["name"] == "Crashed"
    assert states["Failed"] == 0
    assert set(states) <= {"Completed", "Cancelled", "Crashed"}
    assert manifest.model_dump()["provenance"]["engines"], "which engines made it"


def look_while_it_runs(site: Site, run: str) -> None:
    """The page of the run and the table of its shards, in a browser."""
    with browser(site.url, site.folder) as ui:
        text = ui.look(f"/runs/flow-run/{run}", "v1", "Running", "work-", tab="Artifacts", picture="prefect-run")
        assert "chats SmolLM2-135M-Instruct v1" in text
        table = next(item for item in site.artifacts("table") if item["flow_run_id"] == run)
        text = ui.look(f"/artifacts/artifact/{table['id']}", "given out", picture="prefect-shards")
        assert "committed" in text
        ui.look("/runs", "v1 w1")


def _two(found: dict[str, Any]) -> dict[str, Any] | None:
    return found if len(found) == 2 else None


def test_the_run_reads_well_in_the_ui(site: Site, job, root: Root) -> None:
    [run] = [item for item in site.flow_runs("extract/extract") if item["state"]["type"] == "COMPLETED"]
    assert run["name"] == "chats SmolLM2-135M-Instruct v1"
    names = [item["name"] for item in site.flow_runs("extract-worker/cpu")]
    assert all(name.startswith("chats SmolLM2-135M-Instruct v1 w") for name in names)
    table = next(item for item in site.artifacts("table") if item["key"].startswith("work-"))
    rows = json.loads(table["data"])
    assert rows
    assert {row["state"] for row in rows} == {"committed"}
    tables = [item for item in site.artifacts("table") if item["flow_run_id"] == run["id"]]
    assert len([item for item in tables if item["key"].startswith("work-")]) == 1, "updated in place"
    bar = next(item for item in site.artifacts("progress") if item["flow_run_id"] == run["id"])
    assert float(bar["data"]) == 100.0
    assert "tokens/s" in bar["description"]
    assert "shards" in bar["description"]
    assert any(item["key"].startswith("summary-") for item in site.artifacts("markdown"))
    with browser(site.url, site.folder) as ui:
        text = ui.look(
            f"/runs/flow-run/{run['id']}", "Completed", "summary-", tab="Artifacts", picture="prefect-run-done"
        )
        assert run["name"] in text
        text = ui.look(f"/artifacts/artifact/{table['id']}", "committed", picture="prefect-shards-done")
        assert "given out" not in text
        summary = next(item for item in site.artifacts("markdown") if item["key"].startswith("summary-"))
        text = ui.look(f"/artifacts/artifact/{summary['id']}", "version 1")
        assert f"{CHATS} input = " in text
    site.wait_said(run["id"], "ended Crashed: no heartbeat for 150 s")


def test_only_what_changed_is_extracted_again(site: Site, job, root: Root) -> None:
    site.start_worker("first", "coresample-gpu")
    path = Path(job["data"]["path"])
    rows = path.read_text(encoding="utf-8").rstrip("\n").split("\n")  # chats hold other line separators
    for number in range(CHANGED):
        row = json.loads(rows[7 + 11 * number])
        turns = row.get("conversations") or row["messages"]
        text = "value" if "value" in turns[-1] else "content"
        turns[0][text] = f"Changed {number}. " + turns[0][text]
        rows[7 + 11 * number] = json.dumps(row)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    before = read_manifest(root, 1)
    run = site.start_run("re-extract/re-extract", job=job)
    assert site.wait_ended(run, 600)["name"] == "Completed", site.logs(run)
    after = read_manifest(root, 2)
    assert verify(root, 2).problems == []
    assert after.provenance["extracted"]["samples"] <= CHANGED
    assert after.provenance["extracted"]["samples"] >= 1
    assert after.provenance["reused"]["samples"] == after.totals.samples - after.provenance["extracted"]["samples"]
    own = {shard.sha256 for shard in after.shards} - {shard.sha256 for shard in before.shards}
    rows = sum(shard.rows for shard in after.shards if shard.sha256 in own)
    assert 0 < rows <= after.provenance["extracted"]["tokens"], "all chats begin with one system prompt, stored once"
    print(f"extracted {after.provenance['extracted']}, reused {after.provenance['reused']}")


def test_when_nothing_changed_nothing_runs_and_the_run_says_so(site: Site, job, root: Root) -> None:
    workers = len(site.flow_runs("extract-worker/cpu"))
    run = site.start_run("re-extract/re-extract", job=job)
    assert site.wait_ended(run, 300)["name"] == "Completed"
    assert site.flow_run(run)["name"].endswith("v2: nothing to do")
    site.wait_said(run, "nothing changed: version 2")
    assert len(site.flow_runs("extract-worker/cpu")) == workers, "no engine was started"
    assert list_versions(root) == [1, 2]


def test_schedules_that_overlap_queue(site: Site, job, root: Root) -> None:
    started = [site.start_run("re-extract/re-extract", job=job) for _ in range(2)]
    assert [site.wait_ended(run, 400)["name"] for run in started] == ["Completed", "Completed"]
    first, second = sorted((site.flow_run(run) for run in started), key=lambda item: item["start_time"])
    assert second["start_time"] >= first["end_time"], "one after the other"
    assert list_versions(root) == [1, 2]


def test_the_latest_version_is_verified_and_collected_by_deployments(site: Site, job, root: Root) -> None:
    options = job["store"]["storage_options"]
    engine = {"kv_cache_bytes": "512MiB"}
    run = site.start_run("verify/verify", root=job["root"], samples=3, engine=engine, storage_options=options)
    assert site.wait_ended(run, 400)["name"] == "Completed", site.logs(run)
    site.wait_said(run, "is whole")
    run = site.start_run("gc/gc", root=job["root"], keep=1, grace_hours=0, storage_options=options)
    assert site.wait_ended(run, 200)["name"] == "Completed", site.logs(run)
    assert list_versions(root) == [1, 2], "it only lists unless it is told to delete"
    site.wait_said(run, "could be removed (delete is off)")


def test_a_worker_failure_fails_the_parent_with_its_cause(site: Site, job) -> None:
    wrong = {**job, "root": job["root"] + "-wrong", "engine": {**job["engine"], "kv_cache_bytes": "900GiB"}}
    run = site.start_run("extract/extract", job=wrong)
    state = site.wait_ended(run, 500)
    assert state["name"] == "Failed"
    assert "MemoryPlanError" in state["message"], state["message"]
    assert "kv_cache" in state["message"], state["message"]


def test_nothing_secret_is_stored_anywhere(site: Site, job, root: Root) -> None:
    """Keys and the auth string were in the environment of everything that ran above."""
    secrets = [SECRET, AUTH, AUTH.partition(":")[2]]
    if site.database is not None:
        text = site.database.dump()
        assert "extract-worker" in text
    else:
        text = "\n".join(path.read_bytes().decode("latin-1") for path in (site.folder / "server").rglob("*.db*"))
    for secret in secrets:
        assert secret not in text, "Prefect's database"
    for entry in root.entries(""):
        data = root.read_bytes(entry.path)
        assert not any(secret.encode() in data for secret in secrets), entry.path
    for path in site.folder.rglob("*.log"):
        assert not any(secret.encode() in path.read_bytes() for secret in secrets), path
