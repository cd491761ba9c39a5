"""One publisher at a time, for stores that cannot create a record exclusively.

Every run writes a claim ``publishers/<attempt>.json`` first and lists the others afterwards. Of two runs at least the
later one therefore sees the other; a run that sees a live claim of another refuses to go on. (When both write before
either lists, both refuse: nobody publishes, which is safe, and starting one of them again helps.) A claim is renewed
while its run lives and counts as dead when it is older than ``LIFETIME_S`` by the store's own clock: the times of both
claims are taken from one listing, so clocks of machines do not matter.

What this cannot prevent: a run whose process was stopped between the last look at its claim and the end of its write.
Only a store with conditional writes can.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from extract_core.errors import RootBusyError, StoreError
from extract_core.progress import reporter
from extract_core.store import layout
from extract_core.store.listing import Entry
from extract_core.store.records import utc_now
from extract_core.store.root import Root

LIFETIME_S = 120.0
"""A claim that was not renewed for so long is of a dead run."""
RENEWALS = 4
"""Times that a claim is renewed in its lifetime; it is given up when half of it passed without."""


@dataclass(frozen=True)
class Other:
    """A claim of another run."""

    entry: Entry
    age_s: float | None
    who: str


class Claim:
    """This run's claim. Use ``sole_publisher``.

    Args:
        root: a root without exclusive creation.
        attempt: id of this run (32 hex digits).
        lifetime_s: seconds after which a claim that is not renewed is dead; the same in all runs of a root.
    """

    def __init__(self, root: Root, attempt: str, *, lifetime_s: float = LIFETIME_S):
        self._root, self._path, self._lifetime = root, layout.publisher_path(attempt), lifetime_s
        self._renewed = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="publisher-claim", daemon=True)
        self._what = json.dumps(
            {"attempt": attempt, "host": platform.node(), "pid": os.getpid(), "started": utc_now()}
        ).encode()

    def take(self) -> None:
        """Claim the root.

        Raises:
            RootBusyError: another run holds it; names the run, and what to do if it is dead.
            StoreError: the store cannot be written or listed.
        """
        self._write()
        try:
            self._refuse_others()
        except BaseException:
            self.release()
            raise
        self._thread.start()

    def require(self) -> None:
        """Called before each record that is written.

        Raises:
            RootBusyError: the claim was not renewed in time, so another run may have taken over.
        """
        silent = time.monotonic() - self._renewed
        if silent > self._lifetime / 2:
            raise RootBusyError(
                f"{self._root.url}: this run could not renew its claim {self._path} for {silent:.0f} s (stopped, or "
                "cut off from the store), so another run may have begun; nothing more is written. Run the command again"
            )

    def release(self) -> None:
        """Let the next run begin at once; a claim that cannot be removed expires."""
        self._ended.set()
        with contextlib.suppress(StoreError):
            self._root.delete(self._path)

    def _write(self) -> None:
        before = time.monotonic()
        self._root.put_bytes(self._path, self._what)
        self._renewed = before

    def _renew(self) -> None:
        while not self._ended.wait(self._lifetime / RENEWALS / 2):
            if time.monotonic() - self._renewed > self._lifetime / 2:
                return  # too late: another run may hold the root by now, and must not see this claim come back
            with contextlib.suppress(StoreError):  # ``require`` sees how old the last success is
                self._write()

    def _refuse_others(self) -> None:
        dead: list[Other] = []
        live: list[Other] = []
        for other in self._others():
            (live if other.age_s is None or other.age_s <= self._lifetime else dead).append(other)
        for other in dead:
            with contextlib.suppress(StoreError):
                self._root.delete(other.entry.path)
        if not live:
            return
        other = live[0]
        if other.age_s is None:
            advice = "the store does not say how old it is; if no other run is at work, delete it and run again"
        else:
            advice = (
                f"renewed {max(0.0, other.age_s):.0f} s before this run's own; wait for that run, or, if it is dead, "
                f"start again when {self._lifetime:.0f} s have passed"
            )
        raise RootBusyError(
            f"{self._root.url} is in use by another run ({other.who}): this store has no conditional writes, so only "
            f"one run may work on it at a time. Its claim is {other.entry.path}, {advice}"
        )

    def _others(self) -> Iterator[Other]:
        entries = [e for e in self._root.entries(layout.PUBLISHERS) if layout.publisher_attempt(e.name) is not None]
        own = next((entry for entry in entries if entry.path == self._path), None)
        if own is None:
            raise StoreError(
                f"{self._root.url}: the claim {self._path} was written, but the listing does not show it; a store "
                "whose listings lag cannot hold a dataset. Use another store"
            )
        for entry in entries:
            if entry.path != self._path:
                known = own.mtime is not None and entry.mtime is not None
                age = own.mtime - entry.mtime if known else None  # type: ignore[operator]
                yield Other(entry, age, self._who(entry))

    def _who(self, entry: Entry) -> str:
        try:
            claim = json.loads(self._root.read_bytes(entry.path))
            return f"host {str(claim['host'])[:80]}, process {int(claim['pid'])}, started {str(claim['started'])[:40]}"
        except (FileNotFoundError, StoreError, ValueError, KeyError, TypeError):
            return "its claim cannot be read"


@contextlib.contextmanager
def sole_publisher(root: Root, attempt: str | None = None, *, lifetime_s: float = LIFETIME_S) -> Iterator[None]:
    """Be the only run that writes records to a root; does nothing where the store creates exclusively.

    Args:
        root: probed here if it was not before.
        attempt: id of this run (32 hex digits); made up if not given.
        lifetime_s: see ``Claim``.

    Raises:
        RootBusyError: another run is at work there.
    """
    if root.exclusive is None and not root.probe_exclusive():
        reporter().note(f"{root.url} cannot create exclusively: only one run at a time may work on it")
    if root.exclusive is not False:
        yield
        return
    claim = Claim(root, attempt or uuid.uuid4().hex, lifetime_s=lifetime_s)
    claim.take()
    root.guard = claim.require
    try:
        yield
    finally:
        root.guard = None
        claim.release()
