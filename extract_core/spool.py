"""The local folder where shards are written before they are stored: one subfolder per run, held by a file lock.

Whether a run is alive is asked of the lock, not of a process id: ids mean nothing in another container, and the lock
ends with its process whatever ends it. The lock is ``flock``; a file system that has none (some network and FUSE file
systems) gets an open file description lock of ``fcntl``, which behaves alike. NFS serves both between machines.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from extract_core.errors import RootError

RUN_PREFIX = "run-"
LOG_DAYS = 7
"""Engine logs of failed runs are kept this long."""

_LOCK = "lock"
_NO_SUCH_LOCK = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""``struct flock`` of Linux on 64 bits."""


@dataclass(frozen=True)
class SpoolLimit:
    """How much may wait in the spool: the engine does not begin a shard that has no room.

    Attributes:
        nbytes: most bytes of shards, captured or being captured; a shard that is larger has the spool to itself.
        shards: most shards that are checked, encoded and stored at once.
        row_bytes: bytes that a row takes there, with its encoded copy.
    """

    nbytes: int
    shards: int
    row_bytes: int

    def admits(self, rows: int, waiting: Sequence[int], capturing: int = 0) -> bool:
        """Whether a shard may begin.

        Args:
            rows: of the shard.
            waiting: rows of each shard that is captured and not stored yet.
            capturing: rows of the shard that is captured at the moment: it takes room, but nobody stores it yet.
        """
        if not waiting and not capturing:
            return True
        return len(waiting) <= self.shards and (rows + capturing + sum(waiting)) * self.row_bytes <= self.nbytes


def temp_spool() -> Path:
    """The spool of jobs whose root is remote, and of what needs no root at all."""
    return Path(tempfile.gettempdir()) / "coresample-spool"


MOST_COMMITS = 64
"""Most shards that any job may check, encode and store at once."""


class RunFolder:
    """This run's subfolder of a spool.

    Args:
        spool: the folder of all runs; made if absent.

    Raises:
        RootError: the spool's file system has no locks; says what to set.
        OSError: the folder cannot be made.
    """

    def __init__(self, spool: Path):
        while True:
            self.path = spool / f"{RUN_PREFIX}{uuid.uuid4().hex}"
            self.path.mkdir(parents=True)
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            try:
                _lock(self._lock, wait=True)
            except OSError as error:
                os.close(self._lock)
                shutil.rmtree(self.path, ignore_errors=True)
                raise RootError(
                    f"spool {spool}: its file system has no file locks ({error.strerror}), which tell living runs from "
                    "dead ones; set store.spool to a folder on a local disk"
                ) from error
            if (self.path / _LOCK).exists():
                return
            os.close(self._lock)  # another run's clean() came between making and locking

    @property
    def logs(self) -> Path:
        """Folder of the engine's logs."""
        return self.path / "logs"

    def shard(self, shard: int, attempt: str) -> Path:
        """Where one attempt writes one shard."""
        return self.path / f"{shard:05d}-{attempt}.tmp"

    def close(self) -> None:
        """Remove everything but the engine's logs, which are there only if it failed."""
        _sweep(self.path)
        os.close(self._lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def clean(spool: Path) -> list[Path]:
    """Remove what ended runs left in a spool; returns the folders that were swept."""
    swept = list(ended_runs(spool))
    for folder in swept:
        _sweep(folder)
    return swept


def ended_runs(spool: Path) -> Iterator[Path]:
    """Folders of runs whose lock nobody holds."""
    for folder in sorted(spool.glob(f"{RUN_PREFIX}*")):
        if folder.is_symlink():  # no run makes one; what it leads to is not ours to sweep
            continue
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            if (folder / "logs").is_dir():
                yield folder  # swept before; its logs may be old by now
            continue
        except OSError:
            continue
        try:
            _lock(lock, wait=False)
        except OSError:
            continue
        else:
            yield folder
        finally:
            os.close(lock)


def _lock(fd: int, *, wait: bool) -> None:
    """Lock a file until it is closed or its process ends.

    Never ``fcntl.lockf``: such a lock is the process's, so that looking at it from the same process would end it.

    Raises:
        OSError: somebody else holds it (only without ``wait``), or the file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_SUCH_LOCK:
            raise
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, _WHOLE_FILE)


def _sweep(folder: Path) -> None:
    for file in folder.glob("*.tmp"):
        file.unlink(missing_ok=True)
    (folder / _LOCK).unlink(missing_ok=True)
    logs = folder / "logs"
    newest = max((file.stat().st_mtime for file in logs.glob("*")), default=0.0)
    if newest < time.time() - LOG_DAYS * 86400:
        shutil.rmtree(folder, ignore_errors=True)
