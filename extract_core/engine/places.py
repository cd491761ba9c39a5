"""From positions of a sample to rows of its shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    __slots__ = ("_edges", "_firsts")

    def __init__(self, segments: Sequence[tuple[int, int]]):
        self._firsts = np.array([first for first, _ in segments], dtype=np.int64)
        self._edges = np.concatenate(([0], np.cumsum([rows for _, rows in segments]))).astype(np.int64)

    @property
    def rows(self) -> int:
        """Rows of the sample."""
        return int(self._edges[-1])

    def spans(self, source: int, position: int, count: int) -> list[Span]:
        """Where ``count`` rows of a step go that begin at a position; output tokens beyond the prompt have no place.

        Args:
            source: of the first row in the step's batch.
            position: of the first row in the sample.
            count: rows.
        """
        stop = min(position + count, self.rows)
        if position >= stop:
            return []
        first = int(np.searchsorted(self._edges, position, "right")) - 1
        last = int(np.searchsorted(self._edges, stop))
        starts = np.maximum(self._edges[first:last], position)
        stops = np.minimum(self._edges[first + 1 : last + 1], stop)
        targets = self._firsts[first:last] + starts - self._edges[first:last]
        columns = (starts - position + source, targets, stops - starts)
        return [Span(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def mark(self, rows: Flags) -> None:
        """Set the flags of all its rows."""
        for first, count in zip(self._firsts.tolist(), np.diff(self._edges).tolist(), strict=True):
            rows[first : first + count] = True

    def filled(self, rows: Flags) -> bool:
        """Whether the flags of all its rows are set."""
        runs = zip(self._firsts.tolist(), np.diff(self._edges).tolist(), strict=True)
        return all(bool(rows[first : first + count].all()) for first, count in runs)


def runs_of(flags: Flags) -> list[tuple[int, int]]:
    """Runs of set flags: first and number."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return [(start, stop - start) for start, stop in edges.reshape(-1, 2).tolist()]
