"""Self-test of capture on the real model, before the first shard.

A few real prompts go through the engine twice, whole and cut into chunks. What a broken hook, a wrong layer id, a
misplaced row or a wrong norm would do shows here, on a few hundred tokens, instead of in a published dataset.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from extract_core.checks.rows import RowFailure, check_sample_rows
from extract_core.engine.protocol import JobSample, ShardDone, ShardJob
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.errors import EngineCrashedError, PreflightError
from extract_core.store.unsealed import UnsealedShard

PROMPTS, TOKENS, SETS = 4, 160, 3
"""How many prompts of at most how many tokens, and how many such sets are tried."""
CHUNK_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Largest relative difference, at the 90th percentile of rows, between a prefill in chunks and a whole one. A chunk
that misses its context is off by about 1; single rows may differ more where a mixture's router is near a tie."""
LEAST_AGREEMENT = 0.5
"""Of a handful of prompts one or two may sit at a tie of two tokens; a wrong layer or norm agrees on none."""


def preflight(
    engine: EngineSupervisor,
    prompts: Sequence[np.ndarray[Any, np.dtype[np.int32]]],
    *,
    layer_ids: Sequence[int],
    compute_dtype: str,
    folder: Path,
    want_top1: bool,
) -> dict[str, Any]:
    """Run the self-test; starts the engine if it does not run.

    A sample may be bad in itself (it kills the engine, its states overflow): when one set of prompts fails in such a
    way, others are tried, and the samples are judged later, each on its own.

    Args:
        engine: the job's engine.
        prompts: token ids of real samples; ``PROMPTS`` at a time are used, cut to ``TOKENS``.
        layer_ids: what the engine captures, ascending.
        compute_dtype: dtype of the forward; decides the tolerance.
        folder: for the probe files.
        want_top1: layer n is captured, so the next token can be computed from it.

    Returns:
        the figures, for the commit records.

    Raises:
        PreflightError: says what was expected, what came and what to change.
        EngineError: the engine did not start or failed on the probe.
    """
    sets = [prompts[at : at + PROMPTS] for at in range(0, len(prompts), PROMPTS)][:SETS]
    for number, chosen in enumerate(sets):
        cut = [ids[:TOKENS] for ids in chosen]
        cut += cut if len(cut) == 1 else []  # a request that is alone is never cut into chunks
        try:
            return _test(engine, cut, layer_ids, compute_dtype, folder, want_top1)
        except (EngineCrashedError, PreflightError):
            engine.kills.clear()  # the probes are nobody's samples
            if number == len(sets) - 1:
                raise
    raise PreflightError("there is no sample to test the capture with; expected at least one in the plan")


def _test(
    engine: EngineSupervisor,
    cut: Sequence[np.ndarray[Any, np.dtype[np.int32]]],
    layer_ids: Sequence[int],
    compute_dtype: str,
    folder: Path,
    want_top1: bool,
) -> dict[str, Any]:
    chunk = max(2, max(map(len, cut)) // 3)
    whole, done = _capture(engine, cut, layer_ids, folder, chunk=0, want_top1=want_top1)
    figures: dict[str, Any] = {"prompts": len(cut), "tokens": sum(map(len, cut)), "chunk": chunk}
    if want_top1:
        agree = sum(done.greedy[name] == done.top1[name] for name in done.greedy) / len(done.greedy)
        if agree < LEAST_AGREEMENT:
            raise PreflightError(
                f"lm_head(norm(h_n)) gives the engine's own next token for {agree:.0%} of {len(cut)} prompts, expected "
                f"at least {LEAST_AGREEMENT:.0%}: layer {layer_ids[-1]} is not the last block's output, or the final "
                "norm is another. This model needs support (ARCHITECTURE.md, section 4); leave layer n out of layers "
                "to go on without it"
            )
        figures["top1_agreement"] = agree
    parts, _ = _capture(engine, cut, layer_ids, folder, chunk=chunk, want_top1=False)
    worst = float(np.quantile(np.concatenate([_relative(a, b) for a, b in zip(parts, whole, strict=True)]), 0.9))
    tolerance = CHUNK_TOLERANCE[compute_dtype]
    if not worst <= tolerance:
        raise PreflightError(
            f"rows of a prefill in chunks of {chunk} tokens differ from those of a whole one by {worst:.2e} (relative, "
            f"90th percentile), expected at most {tolerance:.0e}: chunked prefill is not safe for this model here. Set "
            "engine.max_num_batched_tokens above the longest sample and engine.extra.enable_chunked_prefill to false"
        )
    return figures | {"chunked_p90": worst}


def _capture(
    engine: EngineSupervisor,
    prompts: Sequence[np.ndarray[Any, np.dtype[np.int32]]],
    layer_ids: Sequence[int],
    folder: Path,
    *,
    chunk: int,
    want_top1: bool,
) -> tuple[list[np.ndarray[Any, Any]], ShardDone]:
    import torch

    samples, first = [], 0
    for number, ids in enumerate(prompts):
        samples.append(JobSample(f"probe-{number}", first, ids.astype("<i4").tobytes()))
        first += len(ids)
    attempt = uuid.uuid4().hex
    path = folder / f"preflight-{attempt}.tmp"
    try:
        job = ShardJob(attempt, str(path), first, samples, want_top1=want_top1, chunk=chunk)
        done = engine.extract(job, lambda progress: None)
        if done.refused:
            raise PreflightError(f"the engine refuses the probe prompts: {done.refused}")
        rows = []
        with UnsealedShard(path) as shard:
            for sample, ids in zip(samples, prompts, strict=True):
                states = shard.rows(sample.first_row, len(ids))
                echo = shard.token_ids(sample.first_row, len(ids))
                result = check_sample_rows(states, echo, torch.from_numpy(ids.copy()), layer_ids=layer_ids)
                if isinstance(result, RowFailure):
                    raise PreflightError(
                        f"{sample.sample_id} ({'chunks of ' + str(chunk) if chunk else 'whole'}): {result.reason}: "
                        f"{result.detail}; the capture does not fit this model in this vLLM"
                    )
                rows.append(states.float().numpy())
        return rows, done
    finally:
        path.unlink(missing_ok=True)


def _relative(rows: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Relative difference of each row and layer, flat."""
    difference = np.linalg.norm(rows - reference, axis=-1) / np.linalg.norm(reference, axis=-1)
    return np.asarray(difference).ravel()
