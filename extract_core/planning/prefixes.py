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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

MIN_SHARED = 16
"""Tokens of a block of the engine's prefix cache: samples that have fewer in common share no rows."""

_WIDTH = 64  # tokens compared at a time, beyond the first MIN_SHARED
_BATCH = 2**12  # samples looked at before the pages of their tokens are released; each maps up to 64 KiB of a file

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
    flat = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in sequences]) if len(sequences) else np.empty(0)
    order, common = trie_order(flat, np.cumsum(lengths) - lengths, lengths)
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
        start, stop = bisect_right(cuts, first), bisect_left(cuts, first + rows)
        if start == stop:
            nodes.append((first, rows))
        else:
            nodes += [(a, b - a) for a, b in pairwise([first, *cuts[start:stop], first + rows])]
    return nodes


def fused(segments: Sequence[Sequence[Run]]) -> list[list[Run]]:
    """Nodes of what is left of a layout: consecutive ones that the same samples use become one.

    Args:
        segments: of the samples that are left.
    """
    users = Counter(node for nodes in segments for node in nodes)
    together = Counter((a, b) for nodes in segments for a, b in pairwise(nodes) if a[0] + a[1] == b[0])
    joined = {(a, b) for (a, b), count in together.items() if count == users[a] == users[b]}
    result = []
    for nodes in segments:
        made: list[Run] = []
        for at, node in enumerate(nodes):
            if at and (nodes[at - 1], node) in joined:
                made[-1] = (made[-1][0], made[-1][1] + node[1])
            else:
                made.append(node)
        result.append(made)
    return result


def into_shards(
    lengths: Sequence[int], common: Sequence[int], *, most_rows: int, most_samples: int, most_tokens: int
) -> list[tuple[int, int]]:
    """Cut samples in the order of ``trie_order`` into shards: first sample and the one after the last, of each.

    A family (samples that share rows) stays in one shard where it fits into one; a larger one is cut where the samples
    have least in common, in the second half of what fits. A shard stands alone: it has its own copy of shared rows.

    Args:
        lengths: tokens of each.
        common: tokens that each has in common with the one before it.
        most_rows: target of a shard; only a single sample may be longer.
        most_samples: of a shard.
        most_tokens: of a shard's samples, shared ones counted for each.
    """
    families = _families(lengths, common)
    weight = np.asarray(common, dtype=np.int64) // MIN_SHARED
    totals = np.zeros(len(lengths), dtype=np.int64)  # rows of the shard at hand up to and with each sample
    shards: list[tuple[int, int]] = []
    start = at = rows = tokens = 0
    ends: list[int] = []
    while at < len(lengths):
        own = lengths[at] - _shared(ends, common[at])
        full = rows + own > most_rows or at - start >= most_samples or tokens + lengths[at] > most_tokens
        if at > start and full:
            family = families[at]
            if family.start > start and family.fits(most_rows, most_samples, most_tokens):
                stop = family.start
            else:
                half = start + int(np.searchsorted(totals[start:at], rows / 2)) + 1
                stop = at - int(np.argmin(weight[half : at + 1][::-1])) if half <= at else at
            shards.append((start, stop))
            start = at = stop
            rows, tokens, ends = 0, 0, []
            continue
        rows += own
        tokens += lengths[at]
        totals[at] = rows
        ends.append(lengths[at])
        at += 1
    if start < len(lengths):
        shards.append((start, len(lengths)))
    return shards


@dataclass(slots=True)
class _Family:
    """Samples that share rows: the first, how many, and their rows in one shard."""

    start: int
    samples: int = 0
    rows: int = 0
    tokens: int = 0

    def fits(self, most_rows: int, most_samples: int, most_tokens: int) -> bool:
        return self.rows <= most_rows and self.samples <= most_samples and self.tokens <= most_tokens


def _families(lengths: Sequence[int], common: Sequence[int]) -> list[_Family]:
    """The family of each sample."""
    found: list[_Family] = []
    ends: list[int] = []
    for at, (length, same) in enumerate(zip(lengths, common, strict=True)):
        if not at or same < MIN_SHARED:
            family, ends = _Family(at), []
        family.samples += 1
        family.rows += length - _shared(ends, same)
        family.tokens += length
        ends.append(length)
        found.append(family)
    return found


def trie_order(
    ids: np.ndarray[Any, Any], starts: Ints, lengths: Ints, release: Callable[[], None] = lambda: None
) -> tuple[Ints, Ints]:
    """Families in the order of their first samples, each depth first by token ids; equal samples by arrival.

    Args:
        ids: int32 token ids of all samples; may be mapped from a file.
        starts: int64 ``[N]``, where each sample begins in ``ids``.
        lengths: int64 ``[N]``, tokens of each.
        release: called now and then, when pages of ``ids`` that were read are not needed for a while.

    Returns:
        the samples' numbers in that order, and for each the tokens in common with the one before it (0 where a family
        begins).
    """
    order, common = _lexicographic(ids, starts, lengths, release)
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


def _lexicographic(
    ids: np.ndarray[Any, Any], starts: Ints, lengths: Ints, release: Callable[[], None]
) -> tuple[Ints, Ints]:
    """Sorts by the first tokens, then those that are tied by the next ones, and so on."""
    count = len(starts)
    order, common = np.arange(count), np.zeros(count, dtype=np.int64)
    tied, group = np.arange(count), np.zeros(count, dtype=np.int64)
    depth, width = 0, MIN_SHARED
    while len(tied):
        who = order[tied]
        chunk = _chunk(ids, starts[who] + depth, lengths[who] - depth, width, release)
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
    ids: np.ndarray[Any, Any], starts: Ints, left: Ints, width: int, release: Callable[[], None]
) -> np.ndarray[Any, Any]:
    """The next ``width`` tokens of some samples as big-endian numbers above 0; 0 where a sample has none left.

    Their bytes sort as the tokens do.
    """
    result = np.zeros((len(starts), width), dtype=">u4")
    steps = np.arange(width)
    windows = sliding_window_view(ids, width) if len(ids) >= width else ids[:0, None]
    for at in range(0, len(starts), _BATCH):
        some, rest = starts[at : at + _BATCH], left[at : at + _BATCH]
        whole = np.flatnonzero(rest >= width)
        result[at + whole] = windows[some[whole]].astype(np.uint32) + np.uint32(1)
        part = np.flatnonzero(rest < width)
        places, inside = some[part, None] + steps, steps < rest[part, None]
        values = np.zeros(places.shape, dtype=np.uint32)
        values[inside] = ids[places[inside]].astype(np.uint32) + np.uint32(1)
        result[at + part] = values
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
