"""Real runs on the tiny model: samples that fail in one run are rescued by the next; two runs at once; repair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from extract_core.store.records import Manifest
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import list_versions, read_manifest
from tests import tiny
from tests.integration.engine import saboteur

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = 40


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "extract_core.cli", *words]


def run(job: Path, *flags: str, **environment: str) -> tuple[dict[str, Any], str]:
    env = {**os.environ, "PREFECT_HOME": str(job.parent / "prefect"), **environment}
    done = subprocess.run(command("run", str(job), "--json", *flags), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def sound(root: Path) -> Manifest:
    report = verify(Root.open(str(root)))
    assert report.ok, [str(problem) for problem in report.problems]
    return read_manifest(Root.open(str(root)))


def make_job(folder: Path, model: Path, **sections: Any) -> Path:
    rows = [[n, *range(20, 120)] for n in range(ROWS)]
    rows[30][0], rows[33][0] = saboteur.DIE_WHILE_ILL, saboteur.NAN_WHILE_ILL
    data = folder / "rows.jsonl"
    data.write_text("".join(f'{{"input_ids": {ids}}}\n' for ids in rows))
    return tiny.write_job(
        folder / "job.yaml",
        model=model,
        chats=data,
        root=folder / "root",
        store={"shard_bytes": "1MiB"},
        completeness=0.5,
        engine={
            "kv_cache_bytes": "256MiB",
            "max_num_batched_tokens": 256,
            "extra": {"worker_cls": "tests.integration.engine.saboteur.Saboteur"},
        },
        **sections,
    )


def test_ill_samples_are_rescued_then_damage_is_repaired(tiny_model: Path, tmp_path: Path) -> None:
    job, root = make_job(tmp_path, tiny_model), tmp_path / "root"
    first, _ = run(job, "--no-prefect", **{saboteur.ILL: "1"})
    assert first["accounting"]["quarantined"] == {"kills_engine": 1, "not_finite": 1}
    assert len(list(root.glob("plans/*/quarantine/*.json"))) == 2
    second, _ = run(job, "--no-prefect")
    assert second["version"] == 2 and second["new"] and second["accounting"]["published"] == ROWS
    assert second["shards_extracted"] == len(list(root.glob("plans/*/commits/*.r1.json")))
    assert not list(root.glob("plans/*/quarantine/*.json"))
    manifest = sound(root)
    assert manifest.provenance["rounds"] >= 1 and len(manifest.provenance["engine_starts"]) == 1
    assert {"planning_s", "preflight_s", "extraction_s", "checks_s", "index_s"} <= set(manifest.provenance["stages"])
    shown = subprocess.run(command("inspect", str(root)), capture_output=True, text=True)
    assert "engine starts: " in shown.stdout and "environment " in shown.stdout, shown.stdout + shown.stderr

    shards = [root / shard.path for shard in manifest.shards]
    shards[0].unlink()
    data = bytearray(shards[1].read_bytes())
    data[-100] ^= 1
    shards[1].chmod(0o644)
    shards[1].write_bytes(data)
    third, notes = run(job, "--repair")  # through Prefect
    assert third["shards_extracted"] == 2 and third["accounting"] == second["accounting"]
    assert "is missing; made again" in notes and "has sha256" in notes
    sound(root)
    fourth, notes = run(job, "--no-prefect", "--repair")
    assert not fourth["new"] and fourth["shards_extracted"] == 0 and "there is nothing to repair" in notes


def test_two_runs_at_once_end_with_one_version(tiny_model: Path, tmp_path: Path) -> None:
    """Same job, same root, two processes: both succeed with the same version, and nothing is there twice."""
    job, root = make_job(tmp_path, tiny_model), tmp_path / "root"
    both = []
    for n in range(2):
        with (tmp_path / f"out{n}").open("wb") as out, (tmp_path / f"err{n}").open("wb") as err:
            both.append(subprocess.Popen(command("run", str(job), "--json", "--no-prefect"), stdout=out, stderr=err))
    codes = [process.wait(timeout=600) for process in both]
    assert codes == [0, 0], [(tmp_path / f"err{n}").read_text() for n in range(2)]
    results = [json.loads((tmp_path / f"out{n}").read_text()) for n in range(2)]
    assert [result["version"] for result in results] == [1, 1]
    assert list_versions(Root.open(str(root))) == [1]
    manifest = sound(root)
    assert manifest.accounting.published == ROWS
    assert {path.name for path in root.glob("shards/*")} == {shard.path.split("/")[1] for shard in manifest.shards}
    third, _ = run(job, "--no-prefect")
    assert not third["new"] and third["shards_extracted"] == 0
