"""Spool folders of runs: what dead runs left goes, what living ones write stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


SECCOMP = """
import ctypes, errno, platform, struct, sys

def refuse(ofd):
    flock, fcntl = {"x86_64": (73, 72), "aarch64": (32, 25)}[platform.machine()]
    no, yes = 0x00050000 | errno.ENOLCK, 0x7FFF0000
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, flock), (0x06, 0, 0, no)]
    if ofd:
        program += [(0x15, 0, 3, fcntl), (0x20, 0, 0, 24), (0x15, 2, 0, 37), (0x15, 1, 0, 38)]
    program += [(0x06, 0, 0, yes), (0x06, 0, 0, no)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    own = Program(len(program), ctypes.addressof(filters))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(own), 0, 0):
        sys.exit("no seccomp here")

refuse(sys.argv[2] == "all")
"""
"""The kernel answers ENOLCK to locks, as a network file system without a lock service does."""


def without_locks(which: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SECCOMP + code, str(folder), which]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "no seccomp here" in done.stderr:
        pytest.skip("this kernel has no seccomp filters")
    return done


def test_file_system_without_flock(tmp_path: Path) -> None:
    """Living runs stay, as seen from their own process and from others; dead ones go."""
    code = """
import fcntl, subprocess
from pathlib import Path
from extract_core import spool
try:
    fcntl.flock(open("/proc/self/exe"), fcntl.LOCK_SH)
except OSError as error:
    assert error.errno == errno.ENOLCK
else:
    sys.exit("the filter does not work")
here = Path(sys.argv[1])
dead = subprocess.run([sys.executable, "-c", KILLED, sys.argv[1], ""], capture_output=True, text=True).stdout.strip()
assert list(Path(dead).glob("*.tmp"))
with spool.RunFolder(here) as living:
    living.shard(0, "a" * 32).touch()
    for _ in range(2):
        other = "from extract_core import spool; from pathlib import Path; print(spool.clean(Path(%r)))" % sys.argv[1]
        print(subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True).stdout.strip())
        assert spool.clean(here) == []
    assert living.shard(0, "a" * 32).exists()
assert not living.path.exists() and not Path(dead).exists()
"""
    done = without_locks("flock", f"KILLED = {KILLED!r}\n{code}", tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("\n")[:2]
    assert first.startswith("[PosixPath(")
    assert second == "[]"


def test_file_system_without_any_lock(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from extract_core.errors import RootError
from extract_core.spool import RunFolder
try:
    RunFolder(Path(sys.argv[1]))
except RootError as error:
    print(error)
"""
    done = without_locks("all", code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no file locks (No locks available)" in done.stdout
    assert "set store.spool to a folder on a local disk" in done.stdout
    assert list(tmp_path.iterdir()) == []
