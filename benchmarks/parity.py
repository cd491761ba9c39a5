"""How far captured rows are from a Hugging Face float32 forward, per layer.

The relative error of a row is ``|captured - reference| / |reference|`` (L2 norms over channels); the cosine is between
the two rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class LayerError:
    """Errors of one layer over every row of every sample."""

    layer: int
    rows: int
    max_relative: float
    p99_relative: float
    mean_relative: float
    min_cosine: float
    mean_cosine: float


def compare(captured: Sequence[np.ndarray], reference: Sequence[np.ndarray], layers: Sequence[int]) -> list[LayerError]:
    """Per-layer errors of float32 rows ``[N, L, H]`` per sample."""
    got, want = np.concatenate(captured).astype(np.float64), np.concatenate(reference).astype(np.float64)
    if got.shape != want.shape:
        raise ValueError(f"captured {got.shape} against reference {want.shape}")
    norm = np.linalg.norm(want, axis=-1)
    relative = np.linalg.norm(got - want, axis=-1) / norm
    cosine = (got * want).sum(-1) / (np.linalg.norm(got, axis=-1) * norm)
    return [
        LayerError(
            layer=k,
            rows=len(got),
            max_relative=float(relative[:, i].max()),
            p99_relative=float(np.quantile(relative[:, i], 0.99)),
            mean_relative=float(relative[:, i].mean()),
            min_cosine=float(cosine[:, i].min()),
            mean_cosine=float(cosine[:, i].mean()),
        )
        for i, k in enumerate(layers)
    ]


def table(title: str, errors: Sequence[LayerError]) -> str:
    """A Markdown table of the errors."""
    head = "| layer | rows | max rel. error | p99 | mean | min cosine | mean cosine |\n|---|---|---|---|---|---|---|"
    rows = [
        f"| {e.layer} | {e.rows} | {e.max_relative:.2e} | {e.p99_relative:.2e} | {e.mean_relative:.2e} "
        f"| {e.min_cosine:.9f} | {e.mean_cosine:.9f} |"
        for e in errors
    ]
    return "\n".join([f"**{title}**", "", head, *rows, ""])


def as_json(errors: Sequence[LayerError]) -> list[dict[str, float]]:
    """The same for a raw result file."""
    return [asdict(error) for error in errors]
