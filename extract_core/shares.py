"""Who extracts what: the shards of a plan shared out over several workers, and shared out anew when one dies or lags.

Decisions only, from what the commit records say; how a worker is started and watched is the caller's.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from extract_core.errors import SettingsError

HELP_S = 120.0
"""An idle slot takes over part of another worker's share when at least so much time of work is left in it; about what
the start of an engine costs."""

_NAME = re.compile(r"(\d+)(?:-(\d+))?(\.r\d+)?")


def balance(rows: Mapping[str, int], workers: int) -> list[list[str]]:
    """Shares of about equal rows: the longest first, each to whoever has least (LPT); every share in the given order.

    Args:
        rows: token positions by task name, in the order to do them.
        workers: most shares.

    Returns:
        As many shares as there are workers, or tasks if those are fewer; none is empty.
    """
    order = {name: place for place, name in enumerate(rows)}
    heap: list[tuple[int, int, list[str]]] = [(0, n, []) for n in range(min(workers, len(rows)))]
    for name in sorted(rows, key=lambda name: (-rows[name], order[name])):
        total, n, share = heapq.heappop(heap)
        share.append(name)
        heapq.heappush(heap, (total + rows[name], n, share))
    return [sorted(share, key=order.__getitem__) for _, _, share in sorted(heap, key=lambda item: item[1])]


def as_ranges(names: Iterable[str]) -> str:
    """Task names as a short text: ``00000 00001 00002 00007.r1`` is ``0-2,7.r1``; ranges may go down."""
    parts: list[str] = []
    run: list[int] = []

    def close() -> None:
        if run:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run.clear()

    for name in names:
        number, dot, rest = name.partition(".")
        if dot:
            close()
            parts.append(f"{int(number)}.{rest}")
            continue
        at = int(number)
        if run and at - run[-1] != (1 if len(run) == 1 and at > run[-1] else -1 if len(run) == 1 else run[1] - run[0]):
            close()
        run.append(at)
    close()
    return ",".join(parts)


def from_ranges(text: str) -> list[str]:
    """The task names of ``as_ranges``, in its order.

    Raises:
        SettingsError: the text is none.
    """
    names: list[str] = []
    for part in filter(None, text.replace(" ", "").split(",")):
        match = _NAME.fullmatch(part)
        if match is None or (match[2] and match[3]):
            raise SettingsError(f"{part!r} in {text!r} is no shard; write numbers and ranges, such as 0-11,40,12.r1")
        first, last = int(match[1]), int(match[2] or match[1])
        step = 1 if last >= first else -1
        names += [f"{number:05d}{match[3] or ''}" for number in range(first, last + step, step)]
    return names


@dataclass
class Share:
    """What one worker was given, in the order in which it does it."""

    names: tuple[str, ...]
    started: float
    moved: float
    """When it last committed something, or began."""
    done: set[str] = field(default_factory=set)


class Board:
    """Which worker has which shards, and what to start next.

    Args:
        rows: token positions of every open task by name, in the order to do them.
        stall_s: a worker that commits nothing for so long has stalled.
        help_s: see ``HELP_S``.
    """

    def __init__(self, rows: Mapping[str, int], *, stall_s: float, help_s: float = HELP_S):
        self.rows, self.stall_s, self.help_s = dict(rows), stall_s, help_s
        self.done: set[str] = set()
        self.live: dict[Hashable, Share] = {}
        self._suspected: Counter[str] = Counter()
        self._left_alone: set[str] = set()

    @property
    def open(self) -> list[str]:
        """Tasks without a commit record, in order."""
        return [name for name in self.rows if name not in self.done]

    @property
    def hopeful(self) -> bool:
        """Whether a further worker may get something done."""
        return any(name not in self._left_alone for name in self.open)

    @property
    def rows_done(self) -> int:
        """Token positions of the tasks that are committed."""
        return sum(self.rows[name] for name in self.done)

    def began(self, worker: Hashable, names: Sequence[str], now: float) -> None:
        """A worker runs this share from now on."""
        self.live[worker] = Share(tuple(names), now, now)

    def runs(self, worker: Hashable, now: float) -> None:
        """A worker has got its machine: from now on it can be slow, or stall."""
        share = self.live[worker]
        share.started = share.moved = now

    def forgive(self, now: float) -> None:
        """What was committed could not be seen for a while: nobody has stalled."""
        for share in self.live.values():
            share.moved = now

    def suspect(self, name: str, most: int) -> None:
        """A worker failed at this task: it goes last, and to nobody any more after ``most`` times."""
        if name not in self.rows:
            return
        self.rows[name] = self.rows.pop(name)
        self._suspected[name] += 1
        if self._suspected[name] >= most:
            self._left_alone.add(name)

    def ended(self, worker: Hashable) -> list[str]:
        """A worker is gone; returns what it leaves undone that no other has."""
        share = self.live.pop(worker, None)
        if share is None:
            return []
        held = self._held()
        return [name for name in share.names if name in self.rows and name not in self.done and name not in held]

    def committed(self, names: Collection[str], now: float) -> int:
        """These tasks have commit records; returns how many are new."""
        new = {name for name in names if name in self.rows} - self.done
        self.done |= new
        for share in self.live.values():
            own = new.intersection(share.names)
            share.done |= own
            if own:
                share.moved = now
        return len(new)

    def stalled(self, now: float) -> list[Hashable]:
        """Workers that should have committed something by now."""
        return [worker for worker, share in self.live.items() if self._left(share) and now - share.moved > self.stall_s]

    def _held(self) -> set[str]:
        return {name for share in self.live.values() for name in share.names}

    def _left(self, share: Share) -> list[str]:
        return [name for name in share.names if name in self.rows and name not in self.done]

    def next_shares(self, slots: int, now: float) -> list[list[str]]:
        """Shares to start now, at most one for each free slot.

        What nobody has is shared out by rows. When everything is given out, a free slot gets the second half of the
        largest rest, in reverse: the two workers meet in the middle, each passing over what the other has committed.

        Args:
            slots: workers that may be alive at once.
            now: the time, on the clock of the other calls.
        """
        free = slots - len(self.live)
        if free <= 0:
            return []
        held = self._held()
        unclaimed = {name: self.rows[name] for name in self.open if name not in held and name not in self._left_alone}
        if unclaimed:
            return balance(unclaimed, free)
        help_for = self._slowest(now)
        return [help_for] if help_for else []

    def _slowest(self, now: float) -> list[str]:
        best: tuple[float, list[str]] = (self.help_s, [])
        helped = [frozenset(share.names) for share in self.live.values()]
        for share in self.live.values():
            left = self._left(share)
            second = left[(len(left) + 1) // 2 :]
            if not second or any(set(second) & other for other in helped if other != frozenset(share.names)):
                continue  # the last one is being worked on, or another helps already
            rows_done = sum(self.rows[name] for name in share.done)
            if not rows_done:
                continue  # nothing tells how fast it is; if it does not move, it stalls
            seconds = sum(self.rows[name] for name in second) * (share.moved - share.started) / rows_done
            if seconds >= best[0]:
                best = (seconds, second[::-1])
        return best[1]
