"""The engine's numbers: what a job leaves open follows from the job, its plan and its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from extract_core.planning.model import DTYPE_BYTES, ModelInfo, Widths
from extract_core.settings import EngineSettings, JobSettings

Device = Literal["cpu", "cuda"]

BLOCK = 128
"""Tokens that KV cache sizes are rounded up to; vLLM's blocks are no larger on any device."""
STEP_TOKENS = {"cpu": 2048, "cuda": 16384}
MOST_SAMPLES = 256
LEAST_POOL, MOST_POOL = 64 * 2**20, 4 * 2**30
LEAST_KV, MOST_KV = 64 * 2**20, 4 * 2**30


@dataclass(frozen=True)
class Demand:
    """Everything about a job and its model that decides memory; a setting left open is None.

    Attributes:
        weights: bytes of all weights once loaded.
        compute_bytes: of a value that the model computes.
        kv_bytes: of a value in the KV cache.
        row_bytes: of a stored row, L * H values.
        layers: layer ids captured, L.
        plan_tokens: tokens of the whole plan.
        mean_length: tokens of a sample on average.
        shard_bytes: of the plan's largest shard.
        shards: of the plan.
        spool: most bytes of shards that wait in the spool.
        spool_in_memory: whether the spool is a file system in memory.
        reference: bytes of a Hugging Face forward in the self-test; 0 without one.
        tensor_parallel: GPUs that hold one copy of the model together.
    """

    device: Device
    weights: int
    compute_bytes: int
    kv_bytes: int
    row_bytes: int
    layers: int
    blocks: int
    hidden: int
    vocab: int
    widths: Widths
    plan_tokens: int
    mean_length: int
    shard_bytes: int
    shards: int
    max_model_len: int
    step_tokens: int | None = None
    samples: int | None = None
    kv_cache: int | None = None
    pool: int | None = None
    tensor_parallel: int = 1
    utilization: float = 0.9
    reference: int = 0
    spool: int = 0
    spool_in_memory: bool = False


@dataclass(frozen=True)
class EngineSizes:
    """The engine's numbers as it will be built; ``kv_cache_bytes`` is None where vLLM takes what is left."""

    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_bytes: int | None
    buffer_bytes: int
    step_bytes: int


def demand_of(
    settings: JobSettings,
    model: ModelInfo,
    *,
    device: Device,
    layers: int,
    row_bytes: int,
    max_model_len: int,
    plan_tokens: int,
    plan_samples: int,
    shard_rows: int,
    shards: int,
    reference: int,
    spool: int,
    spool_in_memory: bool,
) -> Demand:
    """What decides the memory of a job.

    Args:
        settings: the job.
        model: its model.
        device: what the installed vLLM runs on.
        layers: layer ids captured.
        row_bytes: of a stored row.
        max_model_len: positions of the engine.
        plan_tokens: of the whole plan.
        plan_samples: of the whole plan.
        shard_rows: rows of the largest shard.
        shards: of the plan.
        reference: bytes of a Hugging Face forward in the self-test, 0 without one.
        spool: most bytes of shards that wait in the spool.
        spool_in_memory: whether these are in memory.
    """
    e = settings.engine
    compute = DTYPE_BYTES[model.dtype]
    return Demand(
        device=device,
        weights=model.weights_bytes(quantized=e.quantization is not None),
        compute_bytes=compute,
        kv_bytes=_kv_value_bytes(e, compute),
        row_bytes=row_bytes,
        layers=layers,
        blocks=model.n_layers,
        hidden=model.hidden_size,
        vocab=model.vocab_size,
        widths=model.widths,
        plan_tokens=plan_tokens,
        mean_length=max(1, plan_tokens // max(1, plan_samples)),
        shard_bytes=shard_rows * (row_bytes + 4),
        shards=shards,
        max_model_len=max_model_len,
        step_tokens=e.max_num_batched_tokens,
        samples=e.max_num_seqs,
        kv_cache=e.kv_cache_bytes,
        pool=e.buffer_bytes,
        tensor_parallel=e.tensor_parallel_size,
        utilization=e.gpu_memory_utilization,
        reference=reference,
        spool=spool,
        spool_in_memory=spool_in_memory,
    )


def _kv_value_bytes(engine: EngineSettings, compute: int) -> int:
    named = str(engine.extra.get("kv_cache_dtype", "auto"))
    if named == "auto":
        return compute
    return DTYPE_BYTES.get(named, 1 if named.startswith(("fp8", "int8", "uint8")) else compute)


def engine_sizes(demand: Demand) -> EngineSizes:
    """The numbers of the engine, from the job where it says them.

    Tokens of a step: 2048 on CPU, 16384 on GPU, no more than the plan has (rounded up to 128). Samples: 256. Pool of
    row buffers: two steps, 64 MiB to 4 GiB. KV cache on CPU: ``default_kv_cache``.
    """
    d = demand
    tokens = d.step_tokens
    if tokens is None:
        tokens = max(min(STEP_TOKENS[d.device], _rounded(d.plan_tokens)), d.samples or 0)
    if d.device == "cpu" and d.widths.latent:  # vLLM's CPU backend does not cut prefills of these models into chunks
        tokens = max(tokens, d.max_model_len, STEP_TOKENS["cpu"])
    samples = d.samples or min(MOST_SAMPLES, tokens)
    step_bytes = tokens * d.row_bytes
    pool = d.pool or min(max(2 * step_bytes, LEAST_POOL), MOST_POOL)
    kv = d.kv_cache
    if kv is None and d.device == "cpu":
        kv = default_kv_cache(d, tokens, samples)
    return EngineSizes(tokens, samples, kv, pool, step_bytes)


def kv_bytes(demand: Demand, tokens: int) -> int:
    """KV cache of ``tokens`` positions on one device, in whole blocks."""
    per_token = demand.blocks * demand.widths.kv_values(demand.tensor_parallel) * demand.kv_bytes
    return _rounded(tokens) * per_token


def least_kv_cache(demand: Demand) -> int:
    """The smallest KV cache that vLLM starts with: one sample of ``max_model_len``, and the block it keeps empty."""
    return kv_bytes(demand, demand.max_model_len + BLOCK)


def default_kv_cache(demand: Demand, tokens: int, samples: int) -> int:
    """KV cache on CPU: a full step, two samples of the greatest length that are under way, and the part of a block
    that each sample of a step leaves unused; 64 MiB to 4 GiB, more only where one sample needs it.
    """
    in_step = min(samples, tokens // demand.mean_length + 1)
    wanted = kv_bytes(demand, tokens + 2 * demand.max_model_len + in_step * BLOCK)
    return max(min(max(wanted, LEAST_KV), MOST_KV), least_kv_cache(demand))


def _rounded(tokens: int, to: int = BLOCK) -> int:
    return -(-tokens // to) * to
