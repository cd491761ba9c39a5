"""Layer ids: k is the residual stream after k decoder blocks, 0..n (vLLM's numbering)."""

from __future__ import annotations

from collections.abc import Sequence

from extract_core.errors import LayerIdError

_MOST_SHOWN = 4


def eagle3_layer_ids(n: int) -> tuple[int, ...]:
    """``2, n//2, n-3`` for a model of ``n`` blocks, ascending; those that exist and differ on a small model.

    Source: vLLM's defaults for ``eagle_aux_hidden_state_layer_ids``.
    """
    return tuple(sorted({k for k in (2, n // 2, n - 3) if 0 < k <= n}))


def default_layer_ids(n: int) -> tuple[int, ...]:
    """The EAGLE-3 layers and the last block ``n`` (for the target logits), ascending, for a model of ``n`` blocks."""
    return tuple(sorted({*eagle3_layer_ids(n), n}))


def resolve_layer_ids(requested: Sequence[int | str] | None, n: int) -> tuple[int, ...]:
    """Ascending layer ids, checked against a model of ``n`` blocks.

    Args:
        requested: ids, negative ids (Python-like over the n+1 ids: -1 = n, -(n+1) = 0) and names, as ``parse_layers``
            gives them: ``eagle3`` (2, n//2, n-3), ``last`` (n), ``all`` (0..n), ``every:K`` (0, K, 2K ... <= n, so n
            itself only where K divides it). None is ``eagle3`` and ``last``.
        n: decoder blocks of the model.

    Raises:
        LayerIdError: an entry names no layer of this model, or two name the same.
    """
    if requested is None:
        return default_layer_ids(n)
    outside = [k for k in requested if isinstance(k, int) and not -n - 1 <= k <= n]
    if outside:
        raise LayerIdError(
            f"layers: {outside} out of range; this model has {n} blocks, so ids go from 0 (embeddings) to {n} "
            f"(last block, before the final norm), or from -1 (= {n}) down to {-n - 1} (= 0)"
        )
    owner: dict[int, int | str] = {}
    clashes = []
    for entry in requested:
        for k in _resolve(entry, n):
            if k in owner:
                clashes.append(f"{owner[k]} and {entry} both name {k}")
            owner.setdefault(k, entry)
    if clashes:
        more = f" and {len(clashes) - _MOST_SHOWN} more" if len(clashes) > _MOST_SHOWN else ""
        raise LayerIdError(
            f"layers: more than once: {'; '.join(clashes[:_MOST_SHOWN])}{more} (this model has {n} blocks, ids 0 to "
            f"{n}); give every id once"
        )
    return tuple(sorted(owner))


def _resolve(entry: int | str, n: int) -> tuple[int, ...]:
    if isinstance(entry, int):
        return (entry if entry >= 0 else n + 1 + entry,)
    name, _, step = entry.partition(":")
    if name == "last":
        return (n,)
    if name == "all":
        return tuple(range(n + 1))
    if name == "every" and step.isdecimal() and int(step):
        if int(step) > n:
            raise LayerIdError(f"layers: {entry} is more than the {n} blocks of this model; choose a smaller step")
        return tuple(range(0, n + 1, int(step)))
    if name == "eagle3":
        found = eagle3_layer_ids(n)
        if not found:
            raise LayerIdError(f"layers: eagle3 needs a model of at least 2 blocks, this has {n}; give ids instead")
        return found
    raise LayerIdError(f"layers: {entry!r} is no layer; possible are ids, eagle3, last, all and every:K")
