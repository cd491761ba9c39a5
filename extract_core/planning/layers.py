"""Layer ids: k is the residual stream after k decoder blocks, 0..n (vLLM's numbering)."""

from __future__ import annotations

from collections.abc import Sequence

from extract_core.errors import LayerIdError


def default_layer_ids(n: int) -> tuple[int, ...]:
    """The EAGLE-3 layers ``2, n//2, n-3`` and the last block ``n``, ascending, for a model of ``n`` blocks.

    Source: vLLM's defaults for ``eagle_aux_hidden_state_layer_ids``, plus n for the target logits.
    """
    return tuple(sorted({k for k in (2, n // 2, n - 3, n) if 0 < k <= n}))


def resolve_layer_ids(requested: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """Ascending layer ids, checked against a model of ``n`` blocks.

    Raises:
        LayerIdError: an id is outside 0..n or repeated.
    """
    if requested is None:
        return default_layer_ids(n)
    outside = [k for k in requested if not 0 <= k <= n]
    if outside:
        raise LayerIdError(
            f"layers: {outside} out of range; this model has {n} blocks, so ids go from 0 (embeddings) to {n} "
            "(last block, before the final norm)"
        )
    repeated = sorted({k for k in requested if list(requested).count(k) > 1})
    if repeated:
        raise LayerIdError(f"layers: {repeated} given more than once; give every id once")
    return tuple(sorted(requested))
