"""Shared prefixes: which rows of a shard samples have in common, and where every row lies.

The rows of a shard are the nodes of a prefix trie of its samples' token ids; a node is a run of consecutive rows, and a
sample is the list of nodes from the root, its segments. A trie is cut

* where a sample ends that is a prefix of others, and
* where samples part: at the last multiple of ``MIN_SHARED`` tokens before, which is what the prefix cache of the engine
  can reuse. The few rows between there and the point where they part are computed by each, and stored for each.

So what is served from the cache is never more than what is stored once, no node is shared that is shorter than a block
of the cache, and the depth to which two samples share rows follows from their tokens (and the samples that end on their
common way) alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MIN_SHARED = 16
"""Tokens of a block of the engine's prefix cache: samples that have fewer in common share no rows."""

_WIDTH = 64  # tokens compared at a time, beyond the first MIN_SHARED
_BATCH = 2**16  # samples looked at before the pages of their tokens are released

Ints = np.ndarray[Any, np.dtype[np.int64]]
Run = tuple[int, int]
"""First row and number of rows."""


@dataclass(frozen=True)
class ShardLayout:
    """Where the samples of a shard lie: ``segments`` of each, in the order they were given, and ``rows`` of the shard.

    ``computed`` is how many tokens an engine computes for them, one after the other in the order of the trie, whose
    cache has blocks of ``MIN_SHARED`` tokens.
    """

    segments: list[list[Run]]
    rows: int
    computed: int


def lay_out(sequences: Sequence[Any], *, share: bool) -> ShardLayout:
    """Lay out one shard; equal input gives equal places, whoever asks.

    Args:
        sequences: token ids of each sample (arrays of integers, not empty), in the order of the shard.
        share: whether rows are shared; else one segment follows the other.
    """
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    if not share:
        return one_after_another(lengths)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    flat = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in sequences]) if len(sequences) else np.empty(0)
    order, common = trie_order(flat, offsets)
    made = along_trie(lengths[order].tolist(), common.tolist())
    segments: list[list[Run]] = [[] for _ in sequences]
    for at, found in zip(order.tolist(), made.segments, strict=True):
        segments[at] = found
    return ShardLayout(segments, made.rows, made.computed)


def one_after_another(lengths: Ints) -> ShardLayout:
    """The layout of samples that share nothing."""
    stops = np.cumsum(lengths)
    total = int(stops[-1]) if len(stops) else 0
    segments = [[(stop - count, count)] for stop, count in zip(stops.tolist(), lengths.tolist(), strict=True)]
    return ShardLayout(segments, total, total)


def along_trie(lengths: Iterable[int], common: Iterable[int]) -> ShardLayout:
    """The layout of samples in the order of ``trie_order``.

    Args:
        lengths: tokens of each.
        common: tokens that each has in common with the one before it; that of the first does not count.
    """
    rows = computed = 0
    path: list[tuple[int, int, int]] = []  # of the sample before: depth, first row, rows
    paths: list[list[tuple[int, int, int]]] = []
    cuts: set[int] = set()
    ends: list[int] = []
    for length, same in zip(lengths, common, strict=True):
        depth = _shared(ends, same)
        path = path.copy()
        while path and path[-1][0] >= depth:
            path.pop()
        if path and (inside := depth - path[-1][0]) < path[-1][2]:
            start, first, _ = path[-1]
            path[-1] = (start, first, inside)
            cuts.add(first + inside)
        if length > depth:
            path.append((depth, rows, length - depth))
            rows += length - depth
        computed += length - (min(same, length - 1) // MIN_SHARED * MIN_SHARED if paths else 0)
        paths.append(path)
        ends.append(length)
    at = sorted(cuts)
    return ShardLayout([_nodes(path, at) for path in paths], rows, computed)


def _shared(ends: list[int], same: int) -> int:
    """Tokens whose rows a sample shares with the one before it; ``ends`` are those of samples on its way, ascending."""
    if not ends:
        return 0
    while ends and ends[-1] > same:
        ends.pop()
    depth = max(same // MIN_SHARED * MIN_SHARED, ends[-1] if ends else 0)
    return depth if depth >= MIN_SHARED else 0


def _nodes(path: list[tuple[int, int, int]], cuts: list[int]) -> list[Run]:
    nodes = []
    for _, first, rows in path:
        inner = cuts[bisect_right(cuts, first) : bisect_left(cuts, first + rows)]
        edges = [first, *inner, first + rows]
        nodes += [(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]
    return nodes


def into_shards(
    lengths: Sequence[int], common: Sequence[int], *, most_rows: int, most_samples: int
) -> list[tuple[int, int]]:
    """Cut samples in the order of ``trie_order`` into shards: first sample and the one after the last, of each.

    A family (samples that share rows) stays in one shard where it fits into one; a larger one is cut where the samples
    have least in common, in the second half of what fits. A shard stands alone: it has its own copy of shared rows.

    Args:
        lengths: tokens of each.
        common: tokens that each has in common with the one before it.
        most_rows: target of a shard; only a single sample may be longer.
        most_samples: of a shard.
    """
    families = _families(lengths, common)
    weight = np.asarray(common, dtype=np.int64) // MIN_SHARED
    totals = np.zeros(len(lengths), dtype=np.int64)  # rows of the shard at hand up to and with each sample
    shards: list[tuple[int, int]] = []
    start = at = rows = 0
    ends: list[int] = []
    while at < len(lengths):
        own = lengths[at] - _shared(ends, common[at])
        if at > start and (rows + own > most_rows or at - start >= most_samples):
            first, whole, count = families[at]
            if first > start and whole <= most_rows and count <= most_samples:
                stop = first
            else:
                half = start + int(np.searchsorted(totals[start:at], rows / 2)) + 1
                stop = at - int(np.argmin(weight[half : at + 1][::-1])) if half <= at else at
            shards.append((start, stop))
            start = at = stop
            rows, ends = 0, []
            continue
        rows += own
        totals[at] = rows
        ends.append(lengths[at])
        at += 1
    if start < len(lengths):
        shards.append((start, len(lengths)))
    return shards


def _families(lengths: Sequence[int], common: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of each sample's family: its first sample, and the rows and samples that it has in one shard."""
    found: list[tuple[int, int, int]] = []
    start = rows = 0
    ends: list[int] = []

    def close(stop: int) -> None:
        found.extend([(start, rows, stop - start)] * (stop - start))

    for at, (length, same) in enumerate(zip(lengths, common, strict=True)):
        if at and same < MIN_SHARED:
            close(at)
            start, rows, ends = at, 0, []
        rows += length - _shared(ends, same)
        ends.append(length)
    close(len(lengths))
    return found


def trie_order(
    ids: np.ndarray[Any, Any], offsets: Ints, release: Callable[[], None] = lambda: None
) -> tuple[Ints, Ints]:
    """Families in the order of their first samples, each depth first by token ids; equal samples by arrival.

    Args:
        ids: int32 token ids of all samples, one after the other; may be mapped from a file.
        offsets: int64 ``[N + 1]``, where each begins and the last ends.
        release: called now and then, when pages of ``ids`` that were read are not needed for a while.

    Returns:
        the samples' numbers in that order, and for each the tokens in common with the one before it (0 where a family
        begins).
    """
    order, common = _lexicographic(ids, offsets, release)
    if not len(order):
        return order, common
    begins = common < MIN_SHARED
    begins[0] = True
    common[begins] = 0
    first = np.minimum.reduceat(order, np.flatnonzero(begins))
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    families = np.argsort(rank[np.cumsum(begins) - 1], kind="stable")
    return order[families], common[families]


def _lexicographic(ids: np.ndarray[Any, Any], offsets: Ints, release: Callable[[], None]) -> tuple[Ints, Ints]:
    """Sorts by the first tokens, then those that are tied by the next ones, and so on."""
    count = len(offsets) - 1
    lengths = np.diff(offsets)
    order, common = np.arange(count), np.zeros(count, dtype=np.int64)
    tied, group = np.arange(count), np.zeros(count, dtype=np.int64)
    depth, width = 0, MIN_SHARED
    while len(tied):
        who = order[tied]
        chunk = _chunk(ids, offsets, who, depth, width, release)
        together = group[1:] == group[:-1]
        keys = chunk.view(f"S{4 * width}").ravel()
        if not bool((keys[1:] == keys[:-1])[together].all()):
            by = np.lexsort((keys, group))  # groups stay where they are
            who, chunk = who[by], chunk[by]
            order[tied] = who
        del keys
        equal = _leading(chunk)
        left = np.minimum(lengths[who[1:]], lengths[who[:-1]]) - depth
        common[tied[1:][together]] = depth + np.minimum(equal, left)[together]
        more = together & (equal == width) & (chunk[1:, -1] != 0)
        beside = np.concatenate((more, [False])) | np.concatenate(([False], more))
        group = np.cumsum(~np.concatenate(([False], more)))[beside]
        tied = tied[beside]
        depth, width = depth + width, _WIDTH
    return order, common


def _chunk(
    ids: np.ndarray[Any, Any], offsets: Ints, who: Ints, depth: int, width: int, release: Callable[[], None]
) -> np.ndarray[Any, Any]:
    """Tokens ``depth`` to ``depth + width`` of some samples as big-endian numbers above 0; 0 where a sample has ended.

    Their bytes sort as the tokens do.
    """
    result = np.zeros((len(who), width), dtype=">u4")
    steps = np.arange(width)
    for at in range(0, len(who), _BATCH):
        some = who[at : at + _BATCH]
        starts, stops = offsets[some] + depth, offsets[some + 1]
        places = starts[:, None] + steps
        inside = places < stops[:, None]
        result[at : at + _BATCH][inside] = ids[places[inside]].astype(np.int64) + 1
        del places, inside
        release()
    return result


def _leading(chunk: np.ndarray[Any, Any]) -> Ints:
    """Equal leading tokens of each row and the row before it, for all rows but the first."""
    width = chunk.shape[1]
    result = np.empty(max(len(chunk) - 1, 0), dtype=np.int64)
    for at in range(0, len(result), _BATCH):
        part = chunk[at : at + _BATCH + 1]
        differs = part[1:] != part[:-1]
        result[at : at + _BATCH] = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    return result
