"""Real runs on the tiny model: the data changes, and only what is new goes through the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from extract_core.reader import HiddenStatesDataset
from extract_core.store.commits import all_records, read_commits
from extract_core.store.records import CommitRecord
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import list_versions
from tests import tiny

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

CHATS = 60


def run(job: Path, *flags: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "extract_core.cli", "run", str(job), "--json", *flags]
    env = {**os.environ, "PREFECT_HOME": str(job.parent / "prefect")}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def records(root: Path, fingerprint: str) -> list[CommitRecord]:
    return list(all_records(read_commits(Root.open(str(root)), fingerprint)))


def computed(root: Path, fingerprint: str) -> float:
    """Tokens that engines computed for a plan, by their own count."""
    return sum(record.timings.get("tokens", 0.0) for record in records(root, fingerprint))


def samples(root: Path, version: int | None = None) -> dict[str, dict[str, Any]]:
    return {item["sample_id"]: item for item in HiddenStatesDataset(str(root), version=version)}


def test_only_the_changed_rows_go_through_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    chats, root = tiny.write_chats(tmp_path / "chats.jsonl", CHATS, seed=1), tmp_path / "root"

    def make_job(name: str = "job", **sections: Any) -> Path:
        where = sections.pop("root", root)
        sections = {"store": {"shard_bytes": "512KiB"}, **sections}
        return tiny.write_job(tmp_path / f"{name}.yaml", model=tiny_model, chats=chats, root=where, **sections)

    first = run(make_job(), "--no-prefect")
    assert first["shards"] > 3 and computed(root, first["fingerprint"]) == first["tokens"]

    lines = chats.read_text(encoding="utf-8").splitlines()
    others = tiny.write_chats(tmp_path / "others.jsonl", 5, seed=2).read_text(encoding="utf-8").splitlines()
    lines[7], lines[23], lines[58] = others[:3]  # 5 % changed
    del lines[40:42]  # two removed
    lines[30:30] = others[3:]  # two added
    chats.write_text("\n".join(lines) + "\n", encoding="utf-8")
    second = run(make_job())  # through Prefect
    assert second["version"] == 2 and second["new"] and second["samples"] == CHATS
    assert (second["extracted"]["samples"], second["reused"]["samples"]) == (5, CHATS - 5)
    assert second["extracted"]["tokens"] + second["reused"]["tokens"] == second["tokens"]
    assert computed(root, second["fingerprint"]) == second["extracted"]["tokens"], "the engine computed nothing else"
    assert second["shards_extracted"] == second["extracted"]["shards"]
    report = verify(Root.open(str(root)), 2)
    assert report.ok, [str(problem) for problem in report.problems]

    before, now = samples(root, 1), samples(root, 2)
    assert len(now.keys() & before.keys()) == CHATS - 5
    for name in now.keys() & before.keys():
        assert torch.equal(now[name]["hidden_states"], before[name]["hidden_states"]), "the very bytes"
    run(make_job("fresh", root=tmp_path / "fresh"), "--no-prefect")
    fresh = samples(tmp_path / "fresh")
    assert fresh.keys() == now.keys()
    for name, item in now.items():
        assert torch.equal(item["input_ids"], fresh[name]["input_ids"])
        assert torch.equal(item["loss_mask"], fresh[name]["loss_mask"])
        # Another batch may sum in another order.
        torch.testing.assert_close(item["hidden_states"], fresh[name]["hidden_states"], rtol=1e-4, atol=1e-4)

    third = run(make_job(), "--no-prefect")
    assert not third["new"] and third["version"] == 2 and third["shards_extracted"] == 0

    other = run(make_job(layers=[1, 3, 4], allow_change=True), "--no-prefect")
    assert other["version"] == 3 and other["reused"]["samples"] == 0 and other["extracted"]["samples"] == CHATS
    assert computed(root, other["fingerprint"]) == other["tokens"] == second["tokens"]
    assert list_versions(Root.open(str(root))) == [1, 2, 3]
