"""A flow killed with SIGKILL in mid-way, then run again: finished shards stay, nothing is lost, the result verifies.

The plain loop is killed by tests/faults/test_kills.py, at worse moments.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from extract_core.reader import HiddenStatesDataset
from tests import tiny

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

CHATS = 120


def coresample(*words: str, env: dict[str, str] | None = None) -> list[str]:
    return [sys.executable, "-m", "extract_core.cli", *words]


def started(tmp_path: Path, *words: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect")}
    with (tmp_path / "output").open("ab") as output:
        return subprocess.Popen(coresample(*words), stdout=output, stderr=output, env=env)


def commits(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.glob("plans/*/commits/*.json")}


def test_killed_and_run_again(tiny_model: Path, tmp_path: Path) -> None:
    chats = tiny.write_chats(tmp_path / "chats.jsonl", CHATS)
    root = tmp_path / "root"
    job = tiny.write_job(tmp_path / "job.yaml", model=tiny_model, chats=chats, root=root, store={"shard_bytes": "1MiB"})
    process = started(tmp_path, "run", str(job))
    deadline = time.monotonic() + 240
    while len(commits(root)) < 2:
        assert process.poll() is None, (tmp_path / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("extract_core.engine" in _cmdline(child) for child in family)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = commits(root)
    assert not list(root.glob("versions/*"))
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive, f"processes outlive the run: {alive}"

    again = started(tmp_path, "run", str(job))
    assert again.wait() == 0, (tmp_path / "output").read_text()
    after = commits(root)
    total = len(json.loads(next(root.glob("plans/*/plan.json")).read_text())["shards"])
    assert len(before) < total == len(after)
    assert {name: after[name] for name in before} == before, "a committed shard was done again"
    assert not list((root / ".spool").glob("*/*.tmp"))

    verified = subprocess.run(coresample("verify", str(root), "--json"), capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    dataset = HiddenStatesDataset(root)
    assert len(dataset) == CHATS
    assert len({dataset[n]["sample_id"] for n in range(CHATS)}) == CHATS

    third = subprocess.run(coresample("run", str(job), "--no-prefect", "--json"), capture_output=True, text=True)
    assert third.returncode == 0
    assert len(list(root.glob("versions/*.json"))) == 1, "nothing changed, so nothing is published again"


def _cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
