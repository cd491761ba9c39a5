"""From positions of a sample to rows of its shard."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Span:
    """``rows`` consecutive rows: from ``source`` in the step's batch to ``target`` in the shard."""

    source: int
    target: int
    rows: int


class Place:
    """Where the rows of one sample go.

    Args:
        segments: (first row, rows) of the shard, in the order of positions.
    """

    __slots__ = ("_edges", "_firsts", "rows")

    def __init__(self, segments: Sequence[tuple[int, int]]):
        self._firsts = [first for first, _ in segments]
        self._edges = [*accumulate((rows for _, rows in segments), initial=0)]
        self.rows = self._edges[-1]
        """Rows of the sample."""

    def spans(self, source: int, position: int, count: int) -> list[Span]:
        """Where ``count`` rows of a step go that begin at a position; output tokens beyond the prompt have no place.

        Args:
            source: of the first row in the step's batch.
            position: of the first row in the sample.
            count: rows.
        """
        stop = min(position + count, self.rows)
        made = []
        at = bisect_right(self._edges, position) - 1
        while position < stop:
            start, end = self._edges[at], min(self._edges[at + 1], stop)
            made.append(Span(source, self._firsts[at] + position - start, end - position))
            source += end - position
            position, at = end, at + 1
        return made

    def _runs(self) -> Iterator[tuple[int, int]]:
        for first, (start, stop) in zip(self._firsts, pairwise(self._edges), strict=True):
            yield first, first + stop - start

    def mark(self, rows: Flags) -> None:
        """Set the flags of all its rows."""
        for first, stop in self._runs():
            rows[first:stop] = True

    def filled(self, rows: Flags) -> bool:
        """Whether the flags of all its rows are set."""
        return all(bool(rows[first:stop].all()) for first, stop in self._runs())


def runs_of(flags: Flags) -> list[tuple[int, int]]:
    """Runs of set flags: first and number."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return [(start, stop - start) for start, stop in edges.reshape(-1, 2).tolist()]
