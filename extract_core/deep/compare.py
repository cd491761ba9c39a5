"""Stored rows against the same rows extracted again: by how much they differ, and whether they are other rows.

The difference of a row is relative: the norm of the difference over the norm of the row extracted again, per layer. A
row that is merely rounded in another way differs by little; a row of another position, sample or layer differs by much
or, in a model whose rows are all alike, is at least nearer to that other row. Both are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from extract_core.engine.preflight import CHUNK_TOLERANCE, LEAST_AGREEMENT, STORE_ROUNDING

ROW_LIMIT = {"float32": 0.5, "bfloat16": 0.7, "float16": 0.7}
"""No single row may differ by more. A mixture's router near a tie changes a row, but leaves most of it; a row of zeros
or of another place differs by about 1."""
NEARER = 0.5
"""A stored row is nearer to another row when it differs from that one by less than this share of what it differs from
its own."""
MOST_NEARER = 0.25
"""Share of a sample's rows that may be nearer to the row before, or to the row after, by chance."""
_GRID = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
"""Positions at which samples are compared with each other."""
_ROUNDING_ONLY = 1e-6

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Difference:
    """Something wrong with the rows of a sample at a layer."""

    sample: str
    layer: int
    what: str

    def __str__(self) -> str:
        return f"sample {self.sample}, layer {self.layer}: {self.what}"


@dataclass(frozen=True)
class LayerResult:
    """Figures of a layer over all compared samples; errors are relative, see the module."""

    layer: int
    samples: int
    rows: int
    equal_rows: int
    median_error: float
    max_error: float
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``; an error that is no number (a stored row is not finite) is None."""
        errors = {name: getattr(self, name) for name in ("median_error", "max_error")}
        return {
            **vars(self),
            "equal_share": self.equal_rows / self.rows if self.rows else 0.0,
            **{name: value if math.isfinite(value) else None for name, value in errors.items()},
        }


@dataclass
class _Seen:
    sample: str
    positions: list[int]
    stored: Array
    again: Array


@dataclass
class Comparison:
    """Collects samples; ``tolerance`` is for the 90th percentile of a sample's rows, as in the self-test.

    Args:
        layer_ids: of the rows, ascending.
        compute_dtype: what the engine computes in.
        store_dtype: what rows are stored in.
    """

    layer_ids: Sequence[int]
    compute_dtype: str
    store_dtype: str
    problems: list[Difference] = field(default_factory=list)
    _errors: list[Array] = field(default_factory=list)
    _equal: int | np.ndarray[Any, Any] = 0
    _seen: list[_Seen] = field(default_factory=list)

    @property
    def tolerance(self) -> float:
        """Largest relative difference at the 90th percentile of a sample's rows."""
        return CHUNK_TOLERANCE[self.compute_dtype] + STORE_ROUNDING[self.store_dtype]

    @property
    def row_limit(self) -> float:
        """Largest relative difference of any row."""
        return ROW_LIMIT[self.compute_dtype]

    def add(self, sample: str, stored: torch.Tensor, again: torch.Tensor) -> None:
        """Compare one sample: both are rows ``[N, L, H]`` of the same positions, in the stored dtype."""
        same = stored.contiguous().view(torch.uint8) == again.contiguous().view(torch.uint8)
        self._equal = self._equal + same.all(dim=-1).sum(dim=0).numpy()
        ours, theirs = stored.float().numpy(), again.float().numpy()
        own = _errors(ours, theirs)
        self._errors.append(own)
        for at, layer in enumerate(self.layer_ids):
            self._judge(sample, layer, own[:, at], ours[:, at], theirs[:, at])
        grid = [position for position in _GRID if position < len(ours)] or [0]
        self._seen.append(_Seen(sample, grid, ours[grid], theirs[grid]))

    def _judge(self, sample: str, layer: int, own: Array, ours: Array, theirs: Array) -> None:
        def problem(what: str) -> None:
            self.problems.append(Difference(sample, layer, what))

        p90 = float(np.quantile(own, 0.9))
        if not p90 <= self.tolerance:
            problem(f"rows differ by {p90:.2e} (relative, 90th percentile), expected at most {self.tolerance:.1e}")
        worst = int(np.argmax(own))
        if not own[worst] <= self.row_limit:
            problem(f"row {worst} differs by {own[worst]:.2e}, expected at most {self.row_limit:g}")
        for step, where in ((-1, "before"), (1, "after")):
            nearer = _nearer(ours, theirs, own, step)
            clearly = nearer & (own > self.tolerance)
            if clearly.any():
                problem(f"row {int(np.argmax(clearly))} is that of the position {where} it")
            elif nearer.sum() > max(1.0, MOST_NEARER * len(own)):
                problem(f"{int(nearer.sum())} of {len(own)} rows are nearer to the row {where} them than to their own")

    def finish(self) -> list[LayerResult]:
        """Compare the samples with each other, and give the figures per layer."""
        for seen in self._seen:
            self._swapped(seen)
        errors = np.concatenate(self._errors)
        equal = np.broadcast_to(self._equal, (len(self.layer_ids),))
        wrong = {problem.layer for problem in self.problems}
        return [
            LayerResult(
                layer=layer,
                samples=len(self._errors),
                rows=len(errors),
                equal_rows=int(equal[at]),
                median_error=float(np.median(errors[:, at])),
                max_error=float(errors[:, at].max()),
                passed=layer not in wrong,
            )
            for at, layer in enumerate(self.layer_ids)
        ]

    def _swapped(self, seen: _Seen) -> None:
        own = _errors(seen.stored, seen.again)
        for other in self._seen:
            common = min(len(seen.positions), len(other.positions))
            if other is seen or seen.positions[:common] != other.positions[:common]:
                continue
            cross = _errors(seen.stored[:common], other.again[:common])
            nearer = ((cross < NEARER * own[:common]) & (own[:common] > _ROUNDING_ONLY)).mean(axis=0)
            for at, layer in enumerate(self.layer_ids):
                if nearer[at] > 0.5:
                    self.problems.append(Difference(seen.sample, layer, f"rows are those of sample {other.sample}"))


def _errors(rows: Array, reference: Array) -> Array:
    """Relative difference of each row (and layer); infinite where a value is no number."""
    size = np.maximum(np.linalg.norm(reference, axis=-1), 1e-30)  # an embedding may be zero
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.linalg.norm(rows - reference, axis=-1) / size
    return np.asarray(np.nan_to_num(errors, nan=np.inf, posinf=np.inf), dtype=np.float32)


def _nearer(ours: Array, theirs: Array, own: Array, step: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Rows that are nearer to the row ``step`` positions on than to their own; bool ``[N]``."""
    result = np.zeros(len(own), dtype=bool)
    if len(own) > 1:
        here, there = (slice(1, None), slice(None, -1)) if step < 0 else (slice(None, -1), slice(1, None))
        result[here] = _errors(ours[here], theirs[there]) < NEARER * own[here]
    return result & (own > _ROUNDING_ONLY)


def agreement(stored: Sequence[int | None], again: Sequence[int | None]) -> dict[str, Any] | None:
    """Share of samples whose next token is the same; None where no sample has one in the index."""
    pairs = [(a, b) for a, b in zip(stored, again, strict=True) if a is not None]
    if not pairs:
        return None
    same = sum(a == b for a, b in pairs)
    return {"samples": len(pairs), "same": same, "share": same / len(pairs), "least": LEAST_AGREEMENT}
