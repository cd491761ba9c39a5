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

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view

MIN_SHARED = 16
"""Tokens of a block of the engine's prefix cache: samples that have fewer in common share no rows."""

_NARROWEST, _WIDEST = 64, 512  # tokens of a sample compared at a time: few at first, twice as many in each round
_CHUNK = 2**19  # tokens held at a time to be compared
_LOOKED = 2**12  # samples looked at before the pages of their tokens are released; each maps up to 64 KiB of a file
_BLOCK = 2**24  # tokens of families that are sorted together

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
        made = one_after_another(lengths)
        return ShardLayout(made.segments, made.rows, made.computed)
    flat = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in sequences]) if len(sequences) else np.empty(0)
    order, common = trie_order(flat, np.cumsum(lengths) - lengths, lengths)
    made = along_trie(lengths[order].tolist(), common.tolist())
    segments: list[list[Run]] = [[] for _ in sequences]
    for at, found in zip(order.tolist(), made.segments, strict=True):
        segments[at] = found
    return ShardLayout(segments, made.rows, made.computed)


class FlatLayout(NamedTuple):
    """A ``ShardLayout`` as arrays: first row and rows of all segments, end to end, and how many each sample has."""

    firsts: Ints
    counts: Ints
    sizes: Ints
    rows: int
    computed: int

    @property
    def segments(self) -> list[list[Run]]:
        """Those of each sample."""
        found = iter(zip(self.firsts.tolist(), self.counts.tolist(), strict=True))
        return [list(islice(found, size)) for size in self.sizes.tolist()]


def one_after_another(lengths: Ints) -> FlatLayout:
    """The layout of samples that share nothing."""
    stops = np.cumsum(lengths)
    total = int(stops[-1]) if len(stops) else 0
    return FlatLayout(stops - lengths, lengths, np.ones_like(lengths), total, total)


def along_trie(lengths: Iterable[int], common: Iterable[int]) -> FlatLayout:
    """The layout of samples in the order of ``trie_order``.

    Args:
        lengths: tokens of each.
        common: tokens that each has in common with the one before it; that of the first does not count.
    """
    rows = computed = 0
    path: list[tuple[int, int, int]] = []  # of the sample before: depth, first row, rows
    firsts: list[int] = []
    counts: list[int] = []
    sizes: list[int] = []
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
        computed += length - (min(same, length - 1) // MIN_SHARED * MIN_SHARED if sizes else 0)
        firsts += [first for _, first, _ in path]
        counts += [count for _, _, count in path]
        sizes.append(len(path))
        ends.append(length)
    return FlatLayout(*_cut(firsts, counts, sizes, cuts), rows, computed)


def _shared(ends: list[int], same: int) -> int:
    """Tokens whose rows a sample shares with the one before it; ``ends`` are those of samples on its way, ascending."""
    if not ends:
        return 0
    while ends and ends[-1] > same:
        ends.pop()
    depth = max(same // MIN_SHARED * MIN_SHARED, ends[-1] if ends else 0)
    return depth if depth >= MIN_SHARED else 0


def _cut(firsts: list[int], counts: list[int], sizes: list[int], cuts: set[int]) -> tuple[Ints, Ints, Ints]:
    """Runs of rows of samples, as arrays, with those that have cuts inside as several."""
    first, count, size = (np.array(values, dtype=np.int64) for values in (firsts, counts, sizes))
    if not cuts:
        return first, count, size
    at = np.array(sorted(cuts), dtype=np.int64)
    start, stop = np.searchsorted(at, first, side="right"), np.searchsorted(at, first + count)
    parts = stop - start + 1
    ends = np.cumsum(parts)
    number = np.arange(ends[-1]) - np.repeat(ends - parts, parts)  # of a part in its run
    inside = np.repeat(start, parts) + number
    begins = np.where(number == 0, np.repeat(first, parts), at[np.maximum(inside - 1, 0)])
    last = np.repeat(parts, parts) == number + 1
    stops = np.where(last, np.repeat(first + count, parts), at[np.minimum(inside, len(at) - 1)])
    return begins, stops - begins, np.add.reduceat(parts, np.cumsum(size) - size)


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
    tokens = _Tokens(ids, starts, lengths, release)
    family = _first_of_family(tokens)
    order = np.argsort(family, kind="stable")
    common = np.zeros(len(order), dtype=np.int64)
    family = family[order]
    begins = np.flatnonzero(np.diff(family, prepend=-1))
    before = (np.cumsum(lengths[order]) - lengths[order])[begins] // _BLOCK
    blocks = begins[np.flatnonzero(np.diff(before, prepend=-1))].tolist()
    for start, stop in pairwise([*blocks, len(order)]):
        _sort(tokens, order[start:stop], common[start:stop], family[start:stop])
    return order, common


class _Tokens:
    """Token ids of samples, looked at a few at a time."""

    def __init__(self, ids: np.ndarray[Any, Any], starts: Ints, lengths: Ints, release: Callable[[], None]):
        self.lengths = lengths
        self._ids, self._starts, self._release, self._looked = ids, starts, release, 0

    def chunk(self, who: Ints, depth: Ints, width: int) -> np.ndarray[Any, Any]:
        """int32 ``[len(who), width]``: the tokens of some samples from a depth on, -1 where a sample has none left."""
        starts, left, steps = self._starts[who] + depth, self.lengths[who] - depth, np.arange(width)
        last = len(self._ids) - width
        if last >= 0:
            found = sliding_window_view(self._ids, width)[np.minimum(starts, last)].astype(np.int32, copy=False)
        else:
            found = np.empty((len(who), width), dtype=np.int32)
        behind = np.flatnonzero(starts > last)
        found[behind] = self._ids[np.minimum(starts[behind, None] + steps, len(self._ids) - 1)]
        short = np.flatnonzero(left < width)
        found[short] = np.where(steps < left[short, None], found[short], np.int32(-1))
        self._looked += len(who)
        if self._looked >= _LOOKED:
            self._looked = 0
            self._release()
        return found

    def compare(self, who: Ints, depth: Ints, width: int) -> tuple[Ints, np.ndarray[Any, Any]]:
        """Each sample but the first and the one before it, from a depth on: equal tokens, at most ``width`` (what is
        behind the end of both counts), and whether it sorts before that one.
        """
        equal = np.empty(max(len(who) - 1, 0), dtype=np.int64)
        falls = np.empty(len(equal), dtype=bool)
        step = min(_LOOKED, _CHUNK // width)
        for at in range(0, len(equal), step):
            part = self.chunk(who[at : at + step + 1], depth[at : at + step + 1], width)
            differs = part[1:] != part[:-1]
            row, column = np.arange(len(differs)), differs.argmax(axis=1)
            equal[at : at + step] = np.where(differs[row, column], column, width)
            falls[at : at + step] = part[row + 1, column] < part[row, column]
        return equal, falls


def _first_of_family(tokens: _Tokens) -> Ints:
    """For each sample the number of the first one that has its first ``MIN_SHARED`` tokens; its own if it has fewer."""
    family = np.arange(len(tokens.lengths))
    many = np.flatnonzero(tokens.lengths >= MIN_SHARED)
    if not len(many):
        return family
    heads = np.empty((len(many), MIN_SHARED), dtype=np.int32)
    for at in range(0, len(many), _LOOKED):
        part = many[at : at + _LOOKED]
        heads[at : at + _LOOKED] = tokens.chunk(part, np.zeros_like(part), MIN_SHARED)
    keys = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(heads.itemsize * MIN_SHARED), len(many), [None, pa.py_buffer(heads)]
    )
    codes = keys.dictionary_encode().indices.to_numpy()
    first = np.empty(int(codes.max()) + 1, dtype=np.int64)
    first[codes[::-1]] = many[::-1]  # of equal places the last value stays: that of the first sample
    family[many] = first[codes]
    return family


def _sort(tokens: _Tokens, order: Ints, common: Ints, family: Ints) -> None:
    """Sort the samples of some families, in place, and say what each has in common with the one before it.

    In each round samples that are still tied, group by group, are compared with their neighbours; only groups that are
    not in order already are sorted, by the first tokens in which they differ.
    """
    tied = np.flatnonzero(_beside(family[1:] == family[:-1]))
    group, depth, width = family[tied], np.full(len(tied), MIN_SHARED), _NARROWEST
    while len(tied):
        who = order[tied]
        together = group[1:] == group[:-1]
        equal, falls = tokens.compare(who, depth, width)
        size = np.full(len(who), width)
        if bool((falls & together).any()):
            _sort_groups(tokens, who, depth, together, equal, falls, size)
            order[tied] = who
        lengths = tokens.lengths[who]
        left = np.minimum(lengths[1:], lengths[:-1]) - depth[1:]
        common[tied[1:][together]] = (depth[1:] + np.minimum(equal, left))[together]
        more = together & (equal == size[1:]) & (left >= size[1:])
        beside = _beside(more)
        group = np.cumsum(~np.concatenate(([False], more)))[beside]
        tied, depth = tied[beside], (depth + size)[beside]
        width = min(2 * width, _WIDEST)


def _beside(pairs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which are in one of these pairs of neighbours."""
    return np.concatenate((pairs, [False])) | np.concatenate(([False], pairs))


def _sort_groups(
    tokens: _Tokens,
    who: Ints,
    depth: Ints,
    together: np.ndarray[Any, Any],
    equal: Ints,
    falls: np.ndarray[Any, Any],
    size: Ints,
) -> None:
    """Sort the groups that are not in order, in place, with what they have in common and how many tokens that is of."""
    begins = np.concatenate(([True], ~together))
    first, number = np.flatnonzero(begins), np.cumsum(begins) - 1
    wrong = np.logical_or.reduceat(np.concatenate(([False], falls & together)), first)
    agreed = np.minimum.reduceat(np.concatenate((size[:1], np.where(together, equal, size[1:]))), first)
    rows = np.flatnonzero(wrong[number])
    number, skip = number[rows], agreed[number[rows]]
    at = who[rows]
    keys = (tokens.chunk(at, depth[rows] + skip, MIN_SHARED).view(np.uint32) + np.uint32(1)).astype(">u4")
    by = np.lexsort((keys.view(f"S{4 * MIN_SHARED}").ravel(), number))  # bytes of such numbers sort as the tokens do
    who[rows] = at = at[by]
    same, _ = tokens.compare(at, depth[rows] + skip, MIN_SHARED)
    pairs = number[1:] == number[:-1]
    equal[rows[1:][pairs] - 1] = (skip[1:] + same)[pairs]
    size[rows] = skip + MIN_SHARED
