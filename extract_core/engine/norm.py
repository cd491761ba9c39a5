"""The model's final norm: found, described so that others can apply it, and used to prove that a row is layer n."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from extract_core.engine.protocol import FinalNorm
from extract_core.errors import EngineIncompatibleError
from extract_core.store.norms import norm_formula

_PROOF_ROWS = 64


def final_norm(holder: torch.nn.Module, blocks: torch.nn.ModuleList) -> torch.nn.Module:
    """The norm between block n and lm_head: the last norm beside the decoder blocks.

    Args:
        holder: the module that holds ``blocks``.
        blocks: the decoder blocks.

    Returns:
        the norm, or an identity for a model that ends without one.
    """
    names = list(holder._modules)
    after = names.index(next(name for name, child in holder._modules.items() if child is blocks))
    norms = [i for i, child in enumerate(holder._modules.values()) if "norm" in type(child).__name__.lower()]
    # One that stands before the blocks may be a norm of the embeddings; OPT registers its final norm there.
    chosen = [i for i in norms if i > after] or norms
    return holder._modules[names[chosen[-1]]] or torch.nn.Identity() if chosen else torch.nn.Identity()


def spread_rows(tokens: int, device: torch.device) -> torch.Tensor:
    """Positions of up to 64 rows over a whole step: a stale or misplaced part shows wherever it lies."""
    return torch.linspace(0, tokens - 1, min(tokens, _PROOF_ROWS), device=device).round().long()


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative difference of a row between two computations of one norm in ``dtype``."""
    return 1e-3 if dtype == torch.float32 else 0.05


@torch.inference_mode()
def apply_norm(norm: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """``norm(rows)``; some norms of vLLM return a pair."""
    result = norm(rows.clone())  # fused kernels may work in place
    tensor: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


@torch.inference_mode()
def norm_error(norm: torch.nn.Module, stream: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """Relative difference between ``norm(stream)`` and ``normed``, both [S, H]: that of the worst row, not waited for.

    An off-by-one layer, a stream after the norm or a partial sum is off by about 1; infinite where one of the two is
    not finite although the stream is. NaN where no row of the stream is finite: the row checks name those.
    """
    if stream.shape != normed.shape:
        return torch.tensor(float("inf"), device=stream.device)
    return difference(apply_norm(norm, stream), normed, torch.isfinite(stream).all(dim=-1))


@torch.inference_mode()
def difference(rows: torch.Tensor, reference: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """The largest ``|row - reference| / |reference|`` of the rows ``counted`` (bool [S]), a scalar on the device."""
    ours, theirs = torch.isfinite(rows).all(dim=-1), torch.isfinite(reference).all(dim=-1)
    errors = (rows.float() - reference.float()).norm(dim=-1) / reference.float().norm(dim=-1).clamp_min(1e-30)
    errors = torch.where(ours & theirs, errors, torch.where(ours == theirs, torch.nan, torch.inf))
    if counted is not None:
        errors = torch.where(counted, errors, torch.nan)
    known = ~torch.isnan(errors)
    return torch.where(known.any(), torch.where(known, errors, 0.0).max(), torch.nan)


@torch.inference_mode()
def describe_norm(norm: torch.nn.Module, hidden_size: int, dtype: torch.dtype, device: torch.device) -> FinalNorm:
    """The norm as a formula with its weights, checked against the module itself on random rows.

    Raises:
        EngineIncompatibleError: neither an RMS norm (weight or 1 + weight) nor a layer norm.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(32, hidden_size, generator=generator)
    rows = torch.cat([rows, rows * 1e-3]).to(dtype)  # epsilon only shows in small rows
    expected = apply_norm(norm, rows.to(device)).float().cpu()
    rows = rows.float()
    weight, bias = (_vector(getattr(norm, name, None), hidden_size) for name in ("weight", "bias"))
    epsilon = next(
        (v for n in ("variance_epsilon", "eps", "epsilon", "norm_eps") if (v := getattr(norm, n, None))), 0.0
    )
    epsilon = float(str(np.float32(epsilon)))  # a float32 on its way through vLLM: 1e-05, not 9.999999747e-06
    best: tuple[float, FinalNorm] | None = None
    for kind in ("none",) if isinstance(norm, torch.nn.Identity) else ("rms", "layer"):
        for offset in (0.0, 1.0):
            if weight is None and offset:
                continue
            found = FinalNorm(
                kind=kind,
                epsilon=epsilon,
                offset=offset,
                weight=b"" if weight is None else weight.numpy().tobytes(),
                bias=b"" if bias is None else bias.numpy().tobytes(),
            )
            ours = norm_formula(rows, kind, epsilon, None if weight is None else weight + offset, bias)
            error = float(((ours - expected).norm() / expected.norm().clamp_min(1e-30)).item())
            if best is None or error < best[0]:
                best = error, found
    if best is None or not best[0] <= tolerance(dtype) / 2:
        raise EngineIncompatibleError(
            f"the final norm ({type(norm).__name__}) is neither an RMS norm nor a layer norm with its own weights"
            + (f" (closest formula differs by {best[0]:.2g})" if best else "")
        )
    return best[1]


def _vector(value: Any, size: int) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor) or value.shape != (size,):
        return None
    return value.detach().float().cpu().contiguous()


@torch.inference_mode()
def next_tokens(model: Any, norm: torch.nn.Module, h_n: torch.Tensor, chunk: int = 64) -> list[int]:
    """``argmax(lm_head(norm(h_n)))`` for rows [S, H] of the last block, with the model's own modules.

    Off-by-one layers, rows of another request, zeros, partial sums and a wrong norm all show up here.
    """
    result: list[int] = []
    for rows in h_n.split(chunk):
        logits = model.compute_logits(apply_norm(norm, rows))
        if logits is not None:  # tensor-parallel ranks that do not gather return nothing
            result.extend(logits.argmax(dim=-1).tolist())
    return result
