"""The flow as Prefect sees it: names, retries, artifacts, and what the store holds afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import flows  # noqa: F401 - sets Prefect's settings before Prefect is imported
from tests import tiny
from tests.integration.engine import saboteur

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def prefect_server() -> Iterator[None]:
    """A real Prefect server with a database of its own."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=240):
        yield


def runs() -> list[tuple[str, str, int]]:
    """(name, state, runs) of every task run."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return [(run.name, run.state_name, run.run_count) for run in client.read_task_runs(limit=200)]


def artifacts() -> list[tuple[str, str]]:
    """(type, key) of every artifact."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = client.request("POST", "/artifacts/filter", json={"limit": 200}).json()
    return [(item["type"], item["key"]) for item in found]


def test_a_run_reads_well_and_survives_its_engine(tiny_model, tmp_path, monkeypatch) -> None:
    """One engine death in mid-run: the engine is replaced, every task runs once, the dataset is whole."""
    from extract_core.settings import load_job
    from extract_core.store.root import Root
    from extract_core.store.verify import verify
    from flows.extract import run_flow

    monkeypatch.setenv("SABOTEUR_MARK", str(tmp_path / "died"))
    rows = [[n, *range(20, 120)] for n in range(40)]
    rows[25][0] = saboteur.DIE_ONCE
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"input_ids": {ids}}}\n' for ids in rows))
    job = tiny.write_job(
        tmp_path / "job.yaml",
        model=tiny_model,
        chats=data,
        root=tmp_path / "root",
        store={"shard_bytes": "1MiB"},
        engine={
            "kv_cache_bytes": "256MiB",
            "max_num_batched_tokens": 256,
            "extra": {"worker_cls": "tests.integration.engine.saboteur.Saboteur"},
        },
    )
    result = run_flow(load_job(job))
    assert result.new
    assert result.manifest.accounting.published == 40
    assert (tmp_path / "died").exists()

    seen = {name: (state, count) for name, state, count in runs()}
    shards = len(result.manifest.shards)
    assert shards > 2
    names = [f"{step}-shard-{n:05d}" for step in ("capture", "commit") for n in range(shards)]
    assert set(seen) == {"plan", "look", "preflight", "validate", "publish", *names}
    assert {state for state, _ in seen.values()} == {"Completed"}
    assert {count for _, count in seen.values()} == {1}, "the engine is replaced inside its shard"
    kinds = {kind for kind, _ in artifacts()}
    assert {"progress", "table", "markdown"} <= kinds
    fingerprint = result.manifest.fingerprint[:12]
    assert {f"progress-{fingerprint}", f"shards-{fingerprint}", f"summary-{fingerprint}"} <= {k for _, k in artifacts()}
    assert verify(Root.open(str(tmp_path / "root"))).problems == []

    again = run_flow(load_job(job))
    assert not again.new
    assert again.manifest == result.manifest


def test_a_mistake_is_not_retried(tiny_model, tmp_path) -> None:
    from extract_core.errors import InputDataError
    from extract_core.settings import load_job
    from flows.extract import run_flow

    bad = tmp_path / "bad.jsonl"
    bad.write_text("not json\n" * 3)
    job = tiny.write_job(tmp_path / "job.yaml", model=tiny_model, chats=bad, root=tmp_path / "root")
    before = len(runs())
    with pytest.raises(InputDataError, match="not_json"):
        run_flow(load_job(job))
    new = runs()[: len(runs()) - before] if before else runs()
    assert [count for name, state, count in new if state == "Failed"] == [1]
