"""Where the bytes of a throughput benchmark go: a limited sink, and consumers that make room behind the writers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from extract_core.job import Job

POLL_S = 0.1


class TokenBucket:
    """Lets through so many bytes a second, over all threads, without a burst.

    Args:
        bytes_per_s: the rate.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._free_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    def take(self, nbytes: int) -> None:
        """Wait until these bytes, behind all that were asked for before, have had their time."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


def limit_roots(bytes_per_s: float) -> None:
    """Make every dataset root of this process a slow one: a shard takes its time before it is stored.

    The spool, where the engine writes first, is memory or a disk of this machine and stays as fast as it is.
    """
    from extract_core.store.root import Root

    bucket, put_file = TokenBucket(bytes_per_s), Root.put_file

    def limited(self: Root, local: Path, rel: str, **options: Any) -> None:
        bucket.take(Path(local).stat().st_size)
        put_file(self, local, rel, **options)

    Root.put_file = limited  # type: ignore[method-assign]


class Consumer(threading.Thread):
    """Looks for what is complete, counts it, and deletes it if asked to. To be used as a context."""

    def __init__(self, *, delete: bool) -> None:
        super().__init__(daemon=True)
        self.delete = delete
        self.count = self.nbytes = 0
        self.error: BaseException | None = None
        self._ended = threading.Event()

    def look(self) -> None:
        """Count (and delete) what has become complete since the last look."""
        raise NotImplementedError

    def run(self) -> None:
        """Look now and then, until the end of the context."""
        try:
            while not self._ended.wait(POLL_S):
                self.look()
        except BaseException as error:  # noqa: BLE001 - raised where the context ends
            self.error = error

    def stop(self) -> None:
        """End the thread; raises what ended it before."""
        self._ended.set()
        if self.is_alive():
            self.join()
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ShardConsumer(Consumer):
    """Deletes a shard's object once its commit record is there; the bytes are those that the record names."""

    def __init__(self, job: Job, *, delete: bool) -> None:
        super().__init__(delete=delete)
        from extract_core.store import layout

        self._root, self._folder = job.root, layout.commits_dir(job.plan.fingerprint)
        self._seen: set[str] = set()

    def look(self) -> None:
        """See ``Consumer``."""
        for name in self._root.list(self._folder):
            if name in self._seen:
                continue
            record = json.loads(self._root.read_bytes(f"{self._folder}/{name}"))
            self._seen.add(name)
            self.count += 1
            self.nbytes += record["nbytes"]
            if self.delete and record["object"]:
                self._root.delete(record["object"])


class FileConsumer(Consumer):
    """Files of vLLM's connector: complete once its lock is released.

    Args:
        folder: where the connector writes.
        expected: files that will come.
        delete: remove them with their locks.
    """

    def __init__(self, folder: Path, expected: int, *, delete: bool) -> None:
        super().__init__(delete=delete)
        self._folder, self._expected = folder, expected
        self._seen: set[str] = set()

    def look(self) -> None:
        """See ``Consumer``."""
        with os.scandir(self._folder) as entries:
            locks = [entry.path for entry in entries if entry.name.endswith(".lock") and entry.path not in self._seen]
        for lock in locks:
            data = Path(lock.removesuffix(".lock"))
            if not _released(lock) or not data.exists():
                continue
            self._seen.add(lock)
            self.count += 1
            self.nbytes += data.stat().st_size
            if self.delete:
                data.unlink()
                Path(lock).unlink()

    def finish(self, timeout_s: float) -> None:
        """Wait until every file is complete, looking more often than while the engine computes; ends the thread.

        Raises:
            TimeoutError: they did not come.
        """
        self.stop()
        until = time.monotonic() + timeout_s
        while self.count < self._expected:
            if time.monotonic() > until:
                raise TimeoutError(f"{self.count} of {self._expected} files are complete after {timeout_s} s")
            self.look()
            time.sleep(0.002)


def _released(lock: str) -> bool:
    with contextlib.suppress(FileNotFoundError), Path(lock).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    return False
