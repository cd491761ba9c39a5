"""Full, read-only and vanished disks, on small tmpfs mounts: a clear message, nothing corrupt, and the run goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.faults import kit

FAMILY = "disks"
WHAT = "tmpfs mounts that are full, read-only or deleted"
JOB = "tests.faults.storejob"
CHATS = 24
pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str, int], Path]]:
    """``mount("name", kib)``: a tmpfs of that size."""
    made: list[Path] = []

    def make(name: str, kib: int) -> Path:
        path = tmp_path / name
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path)], capture_output=True, text=True
        )
        if done.returncode:
            if os.environ.get("REQUIRE_SYSTEM"):
                pytest.fail(f"no tmpfs can be mounted: {done.stderr}")
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        made.append(path)
        return path

    yield make
    for path in made:
        subprocess.run(["umount", "-l", str(path)], check=False)


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)


def make_read_only(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Under a stopped process; Linux refuses while a file is open for writing, so it goes on for a moment then."""
    for _ in range(100):
        kit.wait_stopped(process)
        made = subprocess.run(["mount", "-o", "remount,ro", str(path)], capture_output=True, text=True)
        if made.returncode == 0:
            return
        process.send_signal(signal.SIGCONT)
        time.sleep(0.005)
        process.send_signal(signal.SIGSTOP)
    raise AssertionError(f"{path} stayed writable: {made.stderr}")


@pytest.fixture
def job(case, model) -> Callable[..., Path]:
    def make(root: Path, **store: object) -> Path:
        return tiny.write_job(
            case.folder / "job.yaml",
            model=model,
            chats=tiny.write_chats(case.folder / "chats.jsonl", CHATS, seed=2),
            root=root,
            store={"shard_bytes": "512KiB", "commit_threads": 1, **store},
        )

    return make


def refused(case: kit.Case, outcome: kit.Outcome, *words: str) -> None:
    """It failed with one of these words in its message."""
    case.injected += 1
    assert outcome.code != 0, outcome.text
    assert any(word in outcome.text for word in words), outcome.text[-3000:]


def done(case: kit.Case, path: Path, root: Path) -> None:
    """Run to the end."""
    outcome = case.job(path, root)
    assert outcome.code == 0, outcome.text[-3000:]


def commits(root: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in root.glob("plans/*/commits/*.json")}


def test_spool_full(case, job, mount) -> None:
    spool, root = mount("spool", 1400), case.folder / "root"
    path = job(root, spool=str(spool))
    filler = spool / "filler"
    filler.write_bytes(bytes(1300 * 1024))
    refused(case, case.job(path, root), "NoSpaceError")
    filler.unlink()
    done(case, path, root)
    case.settled(str(root), rows=CHATS, spools=(spool,))


def test_root_full(case, job, mount) -> None:
    """Half of the shards fit; what was committed stays as it is."""
    root, spool = mount("root", 5000), case.folder / "spool"
    path = job(root, spool=str(spool))
    refused(case, case.job(path, root), "NoSpaceError")
    before = commits(root)
    assert before, "no shard was committed before the disk was full"
    remount(root, "size=40m")
    done(case, path, root)
    after = commits(root)
    assert len(after) > len(before)
    assert {name: after[name] for name in before} == before, "a committed shard was done again"
    case.settled(str(root), rows=CHATS, spools=(spool,))


def test_root_and_spool_full(case, job, mount) -> None:
    """The default spool lies in the root."""
    root = mount("root", 4000)
    path = job(root)
    refused(case, case.job(path, root), "NoSpaceError")
    remount(root, "size=40m")
    done(case, path, root)
    case.settled(str(root), rows=CHATS, spools=(root / ".spool",))


@pytest.mark.parametrize("free_kib", [4, 60, 200] if kit.full() else [4])
def test_full_when_publishing(case, job, mount, free_kib: int) -> None:
    """Every shard is committed, and the disk fills up before the index or the manifest is written."""
    root, spool = mount("root", 40_000), case.folder / "spool"
    path = job(root, spool=str(spool))
    process = case.start(str(path), str(root), "--stop-at", "12", module=JOB)
    kit.wait_stopped(process)
    (root / "filler").write_bytes(b"")
    with (root / "filler").open("wb") as file:
        status = os.statvfs(root)
        file.write(bytes(status.f_bavail * status.f_frsize - free_kib * 1024))
    process.send_signal(signal.SIGCONT)
    refused(case, case.clear(case.finish(process)), "NoSpaceError")
    (root / "filler").unlink()
    done(case, path, root)
    case.settled(str(root), rows=CHATS, spools=(spool,))


@pytest.mark.parametrize("when", ["at the start", "in mid-run"])
def test_root_read_only(case, job, mount, when: str) -> None:
    root, spool = mount("root", 40_000), case.folder / "spool"
    path = job(root, spool=str(spool))
    if when == "at the start":
        remount(root, "ro")
        outcome = case.job(path, root)
    else:
        process = case.start(str(path), str(root), "--stop-at", "3", module=JOB)
        make_read_only(root, process)
        process.send_signal(signal.SIGCONT)
        outcome = case.clear(case.finish(process))
    refused(case, outcome, "RootError", "Read-only file system")
    remount(root, "rw")
    done(case, path, root)
    case.settled(str(root), rows=CHATS, spools=(spool,))


def test_root_deleted_while_running(case, job) -> None:
    """What is gone is extracted again; nothing is published that is not there."""
    root, spool = case.folder / "root", case.folder / "spool"
    path = job(root, spool=str(spool))
    process = case.start(str(path), str(root), "--stop-at", "5", module=JOB)
    kit.wait_stopped(process)
    shutil.rmtree(root)
    process.send_signal(signal.SIGCONT)
    case.injected += 1
    outcome = case.clear(case.finish(process))
    assert outcome.code != 0, "half of the shards were deleted, so that nothing can be published"
    done(case, path, root)
    case.settled(str(root), rows=CHATS, spools=(spool,))


@pytest.mark.engine
@pytest.mark.only_full
def test_shm_full(case, model) -> None:
    """A real engine where /dev/shm has room for nothing: it works without, or says so."""
    root = case.folder / "root"
    path = tiny.write_job(
        case.folder / "job.yaml",
        model=model,
        chats=tiny.write_chats(case.folder / "chats.jsonl", CHATS, seed=2),
        root=root,
        preflight={"reference": "never"},
    )
    run = [sys.executable, "-m", "extract_core.cli", "run", str(path), "--no-prefect", "--quiet"]
    script = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && : > /dev/shm/filler && exec "$@"'
    env = {**os.environ, kit.MARKER: case.marker}
    made = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *run], env=env, capture_output=True, text=True, timeout=300
    )
    if "unshare" in made.stderr:
        pytest.skip(f"no mount namespace here: {made.stderr.strip()}")
    case.injected += 1
    outcome = case.clear(kit.Outcome(made.returncode, made.stdout + made.stderr))
    case.notes = "" if outcome.code == 0 else "without room in /dev/shm the engine does not start, and the run says why"
    if outcome.code:
        again = case.clear(case.run(*run[3:]))
        assert again.code == 0, again.text[-3000:]
    case.settled(str(root), rows=CHATS, spools=(root / ".spool",))
