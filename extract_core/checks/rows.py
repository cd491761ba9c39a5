"""Checks of samples' rows, right after they were captured. A sample that fails is quarantined, never published."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

_CHUNK_VALUES = 2**20
"""Values that are widened to float32 at a time: 4 MiB."""
_FIRST_ROWS = 16
"""Rows that are looked at before their size is known."""


@dataclass(frozen=True)
class SampleStats:
    """L2 norms over channels, per layer: mean and maximum over positions, rounded to 6 digits."""

    norm_mean: list[float]
    norm_max: list[float]


@dataclass(frozen=True)
class RowFailure:
    """Why a sample must not be published.

    ``reason`` is one of shape, row_count, token_echo, not_finite, zero_row, constant_row, identical_rows.
    """

    reason: str
    detail: str


def check_sample_rows(
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    expected_token_ids: torch.Tensor,
    *,
    layer_ids: Sequence[int] | None = None,
) -> SampleStats | RowFailure:
    """Check the rows of one sample.

    Memory beyond the arguments is bounded by a few MiB whatever the length of the sample.

    Args:
        hidden: ``[n, L, H]``, any floating dtype.
        token_ids: ``[n]``, what the engine says it computed the rows from.
        expected_token_ids: ``[n]``, what was asked for.
        layer_ids: names the layers in messages; their numbers from 0 when absent.
    """
    if hidden.ndim != 3 or 0 in hidden.shape[1:] or not hidden.is_floating_point():
        return RowFailure("shape", f"rows are {hidden.dtype} {list(hidden.shape)}, expected floats [tokens, L, H]")
    rows, layers, _ = hidden.shape
    names = list(range(layers)) if layer_ids is None else list(layer_ids)
    if len(names) != layers:
        return RowFailure("shape", f"rows have {layers} layers, expected {len(names)}: {names}")
    expected = expected_token_ids.to(torch.int64)
    failure = _miscounted(rows, token_ids.to(torch.int64), expected)
    if failure is not None:
        return failure
    found = _together([_scan(rows, lambda first, count: hidden[first : first + count], names)], expected)
    return found if isinstance(found, RowFailure) else _all_identical(hidden, expected, names) or found


class RowReader(Protocol):
    """Gives rows ``[n, L, H]`` and token ids ``[n]`` of a shard that is being made (``store.unsealed``)."""

    def rows(self, first_row: int, rows: int) -> torch.Tensor:
        """Rows from ``first_row`` on."""

    def token_ids(self, first_row: int, rows: int) -> torch.Tensor:
        """Their token ids."""


class ShardChecker:
    """Checks the samples of a shard as ``check_sample_rows`` does, looking at rows that samples share once.

    Args:
        shard: where the rows are.
        layer_ids: of the rows.
    """

    def __init__(self, shard: RowReader, layer_ids: Sequence[int]):
        self._shard, self._names = shard, list(layer_ids)
        self._scans: dict[tuple[int, int], _Scan] = {}

    def check(self, segments: Sequence[tuple[int, int]], expected_token_ids: torch.Tensor) -> SampleStats | RowFailure:
        """Check one sample.

        Args:
            segments: (first row, rows), in the order of positions.
            expected_token_ids: ``[n]``, what was asked for.
        """
        expected = expected_token_ids.to(torch.int64)
        echoed = torch.cat([self._shard.token_ids(first, rows) for first, rows in segments]).to(torch.int64)
        failure = _miscounted(sum(rows for _, rows in segments), echoed, expected)
        if failure is not None:
            return failure
        found = _together([self._scan(segment) for segment in segments], expected)
        return found if isinstance(found, RowFailure) else self._identical(segments, expected) or found

    def faulty(self, segments: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """The segment by whose rows a sample that was checked fails; None where no segment is at fault by itself."""
        return next((segment for segment in segments if self._scan(segment).failure is not None), None)

    def _scan(self, segment: tuple[int, int]) -> _Scan:
        scan = self._scans.get(segment)
        if scan is None:
            start, rows = segment
            scan = _scan(rows, lambda first, count: self._shard.rows(start + first, count), self._names)
            self._scans[segment] = scan
        return scan

    def _identical(self, segments: Sequence[tuple[int, int]], expected: torch.Tensor) -> RowFailure | None:
        """Looks at all rows only where two of different tokens are the same."""
        other = torch.nonzero(expected != expected[0])
        if other.numel() == 0:
            return None
        one, first = (self._shard.rows(_row_of(segments, position), 1) for position in (int(other[0]), 0))
        if not bool((one == first).all(dim=-1).any()):
            return None
        whole = torch.cat([self._shard.rows(first, rows) for first, rows in segments])
        return _all_identical(whole, expected, self._names)


_Wrong = tuple[str, int, int, str]
"""A fault: reason, layer, position, and what is there."""


@dataclass(frozen=True)
class _Scan:
    """Consecutive rows: sums and maxima of their norms per layer, and what is wrong; positions count from the first.

    ``failure`` is the first fault.
    """

    rows: int
    total: torch.Tensor
    highest: torch.Tensor
    failure: _Wrong | None
    zero_embeddings: list[int]


def _row_of(segments: Sequence[tuple[int, int]], position: int) -> int:
    for first, rows in segments:
        if position < rows:
            return first + position
        position -= rows
    raise IndexError(position)


def _scan(rows: int, read: Callable[[int, int], torch.Tensor], names: list[int]) -> _Scan:
    """Look at rows; ``read`` gives so many from a first one on, as many as stay in the processor's cache.

    Few calls for each piece: several shards are checked at once, and every call waits for the interpreter's lock.
    """
    norms = torch.empty((rows, len(names)), dtype=torch.float32)
    suspect = torch.empty((rows, len(names)), dtype=torch.bool)
    start, step = 0, _FIRST_ROWS
    wide = torch.empty(0)
    while start < rows:
        chunk = read(start, min(step, rows - start))
        if chunk.shape != wide.shape or chunk.device != wide.device:
            wide = torch.empty(chunk.shape, dtype=torch.float32, device=chunk.device)
        stop = start + len(chunk)
        norms[start:stop] = torch.linalg.vector_norm(wide.copy_(chunk), dim=-1)
        suspect[start:stop] = _suspect(chunk)
        start, step = stop, max(1, _CHUNK_VALUES // chunk[0].numel())
    zero_embeddings: list[int] = []
    failure = _bad_values(read, norms, names) or _bad_rows(read, suspect, names, zero_embeddings)
    return _Scan(rows, norms.sum(dim=0, dtype=torch.float64), norms.amax(dim=0), failure, zero_embeddings)


def _together(scans: Sequence[_Scan], expected: torch.Tensor) -> SampleStats | RowFailure:
    zero_embeddings: list[int] = []
    depth = 0
    for scan in scans:
        if scan.failure is not None:
            reason, layer, at, what = scan.failure
            return RowFailure(reason, f"layer {layer}, position {depth + at}: {what}")
        zero_embeddings += [depth + at for at in scan.zero_embeddings]
        depth += scan.rows
    failure = _zero_embeddings(zero_embeddings, expected)
    if failure is not None:
        return failure
    mean = torch.stack([scan.total for scan in scans]).sum(dim=0) / depth
    highest = torch.stack([scan.highest for scan in scans]).amax(dim=0)
    return SampleStats([_short(x) for x in mean.tolist()], [_short(x) for x in highest.tolist()])


def _miscounted(rows: int, echoed: torch.Tensor, expected: torch.Tensor) -> RowFailure | None:
    if rows != expected.numel() or rows == 0:
        return RowFailure("row_count", f"{rows} rows for {expected.numel()} tokens")
    if echoed.shape != expected.shape or not torch.equal(echoed, expected):
        return RowFailure("token_echo", _echo(echoed, expected))
    return None


def _echo(echoed: torch.Tensor, expected: torch.Tensor) -> str:
    if echoed.numel() != expected.numel():
        return f"{echoed.numel()} token ids came with the rows, {expected.numel()} were asked for"
    at = int(torch.nonzero(echoed != expected)[0])
    return f"position {at}: token {int(echoed[at])} came with the row, {int(expected[at])} was asked for"


def _bad_values(read: Callable[[int, int], torch.Tensor], norms: torch.Tensor, names: list[int]) -> _Wrong | None:
    """NaN and infinity spread into the norm, so only rows with a bad norm are looked at. A norm that overflows float32
    from finite values (above 1e19) is as useless for training, and fails too.
    """
    bad = ~torch.isfinite(norms)
    if not bool(bad.any()):
        return None
    at, layer = (int(i) for i in torch.nonzero(bad)[0])
    row = read(at, 1)[0, layer].float()
    wrong = torch.nonzero(~torch.isfinite(row))
    what = "norm overflows" if wrong.numel() == 0 else f"value {float(row[wrong[0]])} at channel {int(wrong[0])}"
    more = int(bad.any(dim=1).sum()) - 1
    return "not_finite", names[layer], at, f"{what} (and {more} more rows)"


def _suspect(chunk: torch.Tensor) -> torch.Tensor:
    """Rows ``[n, L]`` whose channels may all be the same: two of one half and two of the other are. Hardly any honest
    row passes that. One channel alone is always the same; there only zero is wrong.
    """
    half = chunk.shape[2] // 2
    if half == 0:
        return (chunk == 0).all(dim=-1)
    some = min(2, half)
    return (chunk[:, :, :some] == chunk[:, :, half : half + some]).all(dim=-1)


def _bad_rows(
    read: Callable[[int, int], torch.Tensor], suspect: torch.Tensor, names: list[int], zero_embeddings: list[int]
) -> _Wrong | None:
    """Rows whose channels are all the same."""
    for at, layer in torch.nonzero(suspect).tolist():
        row = read(at, 1)[0, layer]
        if not bool((row == row[0]).all()):
            continue
        if float(row[0]) != 0:
            return "constant_row", names[layer], at, f"all {len(row)} channels are {float(row[0])}"
        if names[layer] != 0:
            return "zero_row", names[layer], at, f"all {len(row)} channels are 0"
        zero_embeddings.append(at)
    return None


def _zero_embeddings(positions: list[int], tokens: torch.Tensor) -> RowFailure | None:
    """Layer 0 is the embedding table, where an unused token may honestly be zero: then wherever that token stands."""
    if not positions:
        return None
    zero = torch.zeros(tokens.numel(), dtype=torch.bool)
    zero[positions] = True
    tokens = tokens.cpu()
    lost = zero & torch.isin(tokens, tokens[~zero])
    if bool(zero.all()) or bool(lost.any()):
        at = int(torch.nonzero(zero if bool(zero.all()) else lost)[0])
        return RowFailure("zero_row", f"layer 0, position {at}: all channels are 0 (token {int(tokens[at])})")
    return None


def _all_identical(hidden: torch.Tensor, tokens: torch.Tensor, names: list[int]) -> RowFailure | None:
    """Every position the same although the tokens differ: a broadcast or a row written everywhere."""
    other = torch.nonzero(tokens != tokens[0])
    if other.numel() == 0:
        return None
    same = (hidden[int(other[0])] == hidden[0]).all(dim=-1)
    for layer in torch.nonzero(same).flatten().tolist():
        first = hidden[0, layer]
        if all(bool((part == first).all()) for part in hidden[:, layer].split(1024)):
            return RowFailure(
                "identical_rows", f"layer {names[layer]}: all {tokens.numel()} positions have the same row"
            )
    return None


def _short(value: float) -> float:
    return float(f"{value:.6g}") if math.isfinite(value) else value
