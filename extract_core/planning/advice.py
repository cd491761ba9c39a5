"""Which setting to change, and to what, when a job does not fit; each piece of advice is alone enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from extract_core.hardware import Gpu
from extract_core.planning.sizes import BLOCK, Demand, engine_sizes, least_kv_cache
from extract_core.words import size

_MIB = 2**20
_LEAST_POOL = 16 * _MIB
_LEAST_LENGTH = 64
_SMALL_STEP = 512
_MOST_UTILIZATION = 0.95


Fits = Callable[[Demand], bool]


def advice(demand: Demand, gpus: Sequence[Gpu], fits: Fits) -> Iterator[str]:
    """Changes that solve a problem, the least harmful first.

    Args:
        demand: of the job as it is.
        gpus: that are visible.
        fits: whether a changed demand is free of the problem.
    """
    alone = [one(demand, gpus, fits) for one in _ALONE]
    yield from (text for text in (alone if any(alone) else [_together(demand, fits)]) if text is not None)


def _kv_cache(d: Demand, gpus: Sequence[Gpu], fits: Fits) -> str | None:
    now, least = engine_sizes(d).kv_cache_bytes, -(-least_kv_cache(d) // _MIB) * _MIB
    if now is None:
        return None
    if now < least:
        return f"raise engine.kv_cache_bytes to {least // _MIB}MiB" if fits(replace(d, kv_cache=least)) else None
    best = largest(lambda value: fits(replace(d, kv_cache=value)), least, now, _MIB)
    return f"lower engine.kv_cache_bytes to {best // _MIB}MiB (now {size(now)})" if best else None


def _step_tokens(d: Demand, gpus: Sequence[Gpu], fits: Fits) -> str | None:
    now = engine_sizes(d).max_num_batched_tokens
    floor = max(BLOCK, d.samples or 0)
    best = largest(lambda value: fits(replace(d, step_tokens=value)), floor, now - 1, BLOCK)
    return f"lower engine.max_num_batched_tokens to {best} (now {now})" if best else None


def _tensor_parallel(d: Demand, gpus: Sequence[Gpu], fits: Fits) -> str | None:
    if d.device != "cuda":
        return None
    there = len(gpus)
    if there < d.tensor_parallel:
        fewer = next((n for n in range(there, 0, -1) if _divides(d, n) and fits(replace(d, tensor_parallel=n))), None)
        return f"lower engine.tensor_parallel_size to {fewer}" if fewer else None
    more = (n for n in range(d.tensor_parallel + 1, there + 1) if _divides(d, n))
    best = next((n for n in more if fits(replace(d, tensor_parallel=n))), None)
    return f"raise engine.tensor_parallel_size to {best}" if best else None


def _divides(d: Demand, ranks: int) -> bool:
    return not d.widths.heads or d.widths.heads % ranks == 0


def _utilization(d: Demand, gpus: Sequence[Gpu], fits: Fits) -> str | None:
    used = gpus[: d.tensor_parallel]
    if d.device != "cuda" or len(used) < d.tensor_parallel:
        return None
    free = math.floor(100 * min(gpu.free / gpu.total for gpu in used))
    now = round(100 * d.utilization)
    if free < now:
        if free > 0 and fits(replace(d, utilization=free / 100)):
            return f"lower engine.gpu_memory_utilization to {free / 100:.2f}"
        return None
    top = min(free, round(100 * _MOST_UTILIZATION))
    best = next((value for value in range(now + 1, top + 1) if fits(replace(d, utilization=value / 100))), None)
    return f"raise engine.gpu_memory_utilization to {best / 100:.2f}" if best else None


def _pool(d: Demand, gpus: Sequence[Gpu], fits: Fits) -> str | None:
    now = engine_sizes(d).buffer_bytes
    best = largest(lambda value: fits(replace(d, pool=value)), _LEAST_POOL, now - 1, _MIB)
    return f"lower engine.buffer_bytes to {best // _MIB}MiB (now {size(now)})" if best else None


def _length(d: Demand, gpus: Sequence[Gpu], fits: Fits) -> str | None:
    best = largest(
        lambda value: fits(replace(d, max_model_len=value + 2)), _LEAST_LENGTH, d.max_model_len - 3, _LEAST_LENGTH
    )
    return f"lower chat.max_length to {best} (now {d.max_model_len - 2})" if best else None


def _reference(d: Demand, gpus: Sequence[Gpu], fits: Fits) -> str | None:
    return "set preflight.reference to never" if d.reference and fits(replace(d, reference=0)) else None


def _spool(d: Demand, gpus: Sequence[Gpu], fits: Fits) -> str | None:
    best = largest(lambda value: fits(replace(d, shard_bytes=value)), _MIB, d.shard_bytes - 1, _MIB)
    return f"lower store.shard_bytes to {best // _MIB}MiB, or set store.spool to a larger disk" if best else None


_ALONE = (_reference, _kv_cache, _step_tokens, _tensor_parallel, _utilization, _pool, _length, _spool)


def _together(d: Demand, fits: Fits) -> str | None:
    """Small steps, pool and KV cache at once, where none of them is enough."""
    tokens = min(engine_sizes(d).max_num_batched_tokens, max(_SMALL_STEP, d.samples or 0))
    small = replace(d, step_tokens=tokens, pool=None, kv_cache=None)
    pool = min(engine_sizes(small).buffer_bytes, engine_sizes(d).buffer_bytes)
    small = replace(small, pool=pool)
    parts = [f"engine.max_num_batched_tokens to {tokens}", f"engine.buffer_bytes to {pool // _MIB}MiB"]
    if engine_sizes(d).kv_cache_bytes is not None:
        least = -(-least_kv_cache(d) // _MIB) * _MIB
        small = replace(small, kv_cache=least)
        parts.append(f"engine.kv_cache_bytes to {least // _MIB}MiB")
    return f"set together {', '.join(parts)}" if fits(small) else None


def largest(fits: Callable[[int], bool], low: int, high: int, step: int) -> int | None:
    """The largest multiple of ``step`` in low..high (rounded inwards) that fits; None where none does."""
    first, last = -(-low // step), high // step
    if first > last or not fits(first * step):
        return None
    while first < last:
        middle = (first + last + 1) // 2
        first, last = (middle, last) if fits(middle * step) else (first, middle - 1)
    return first * step
