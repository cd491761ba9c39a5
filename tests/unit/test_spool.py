"""Spool folders of runs: what dead runs left goes, what living ones write stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from extract_core import spool

KILLED = """
import os, sys
from pathlib import Path
from extract_core.spool import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.shard(3, "b" * 32).write_bytes(b"x" * 1000)
if sys.argv[2] == "logs":
    folder.logs.mkdir()
    (folder.logs / "engine-001.log").write_text("it died")
print(folder.path, flush=True)
os.kill(os.getpid(), 9)
"""


def killed_run(folder: Path, logs: str = "") -> Path:
    run = subprocess.run([sys.executable, "-c", KILLED, str(folder), logs], capture_output=True, text=True)
    return Path(run.stdout.strip())


def test_dead_runs_are_swept_and_living_ones_are_not(tmp_path: Path) -> None:
    dead = killed_run(tmp_path)
    assert list(dead.glob("*.tmp"))
    with spool.RunFolder(tmp_path) as living:
        living.shard(0, "a" * 32).touch()
        assert spool.clean(tmp_path) == [dead]
        assert not dead.exists()
        assert living.shard(0, "a" * 32).exists()
    assert not living.path.exists()


def test_logs_of_a_failed_run_are_kept_for_days(tmp_path: Path) -> None:
    dead = killed_run(tmp_path, "logs")
    log = dead / "logs" / "engine-001.log"
    spool.clean(tmp_path)
    assert log.read_text() == "it died"
    assert not list(dead.glob("*.tmp"))
    os.utime(log, (0, 0))
    spool.clean(tmp_path)
    assert not dead.exists()
