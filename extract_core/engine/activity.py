"""Is the engine's process group at work, idle or stopped? Asked while it loads, when no message can tell.

Loading a checkpoint takes seconds or an hour, so a limit on time says nothing: a group that uses no processor time and
reads nothing is what hangs.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.02
"""Share of one core, above what idle background threads use."""
BUSY_BYTES_PER_S = 64 * 1024
SAMPLE_S = 1.0
"""Longest time between two looks."""
BUSY_LIMITS = 10
"""A group that is busy without end (it spins) is given up after this many times its idle limit."""

_TICKS_PER_S = 100
"""USER_HZ: the unit of times in ``/proc/PID/stat``, the same on every Linux that Python knows."""


@dataclass(frozen=True)
class Sample:
    """One process: its state letter, processor seconds, bytes read and pages that had to come from a disk."""

    state: str
    cpu_s: float
    read: int
    faults: int


def members(group: int) -> dict[int, Sample]:
    """Processes of a group that have not ended, by id; a zombie holds no memory and does not count.

    From ``/proc`` itself: one file has group, state, times and page faults, and weights mapped from a network or FUSE
    file system show nowhere but in the last.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if int(stat[2]) != group or stat[0] in (b"Z", b"X"):
                continue
            cpu_s = (int(stat[11]) + int(stat[12])) / _TICKS_PER_S
            found[int(entry.name)] = Sample(stat[0].decode(), cpu_s, _bytes_read(entry), int(stat[9]))
    return found


def stopped(samples: dict[int, Sample]) -> list[int]:
    """Processes that a signal (SIGSTOP, SIGTSTP) or a debugger has stopped."""
    return sorted(pid for pid, sample in samples.items() if sample.state in "Tt")


def busy(before: dict[int, Sample], now: dict[int, Sample], seconds: float) -> bool:
    """Whether the group did anything worth the name between two samples."""
    if now.keys() - before.keys():
        return True  # it started a process
    pairs = [(before[pid], now[pid]) for pid in now]
    return (
        sum(new.cpu_s - old.cpu_s for old, new in pairs) >= BUSY_SHARE * seconds
        or sum(new.read - old.read for old, new in pairs) >= BUSY_BYTES_PER_S * seconds
        or any(new.faults > old.faults for old, new in pairs)
    )


def _bytes_read(entry: Path) -> int:
    try:
        counts = dict(line.split(b": ") for line in (entry / "io").read_bytes().splitlines())
    except (OSError, ValueError):  # another user's process, or a sandbox without accounting
        return 0
    # What read() gave, and what came from a disk through a mapping; a byte counted twice does no harm here.
    return int(counts.get(b"rchar", 0)) + int(counts.get(b"read_bytes", 0))


class Patience:
    """How long the host has waited for the group, and whether that is too long.

    Time in which this process itself did not run (Ctrl-Z, a suspended laptop) does not count.

    Args:
        group: process-group id.
        limit_s: seconds without a sign of life.
        activity: a busy group is a sign of life (while it loads); otherwise only messages are.
    """

    def __init__(self, group: int, limit_s: float, *, activity: bool):
        self._group, self.limit_s, self._activity = group, limit_s, activity
        self.slice_s = min(SAMPLE_S, limit_s / 4)
        self._idle_s = self._total_s = 0.0
        self._seen: dict[int, Sample] | None = None
        self._last = time.monotonic()
        self.stopped: list[int] = []
        """Stopped processes at the last look."""

    def heard(self) -> None:
        """A message came."""
        self._idle_s, self._seen, self._last, self.stopped = 0.0, None, time.monotonic(), []

    def look(self) -> None:
        """Another ``slice_s`` went by without a message."""
        now = time.monotonic()
        passed = min(now - self._last, 2 * self.slice_s)
        self._last = now
        self._idle_s += passed
        self._total_s += passed
        samples = members(self._group)
        self.stopped = stopped(samples)
        if self._activity and self._seen is not None and not self.stopped and busy(self._seen, samples, passed):
            self._idle_s = 0.0
        self._seen = samples

    @property
    def idle(self) -> bool:
        """No sign of life for longer than the limit."""
        return self._idle_s >= self.limit_s

    @property
    def endless(self) -> bool:
        """Busy, but for so long that it will not come to an end."""
        return self._activity and self._total_s >= BUSY_LIMITS * self.limit_s
