"""Self-test of capture on the real model, before the first shard.

A few real prompts go through the engine twice, whole and cut into chunks; a third time behind their own beginnings,
which the prefix cache then serves, where samples of the job share prefixes. What a broken hook, a wrong layer id, a
misplaced row or a wrong norm would do shows here, on a few hundred tokens, instead of in a published dataset. Where the
model is small enough, the rows are compared with a Hugging Face forward of the same weights, too.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from extract_core.checks.rows import RowFailure, check_sample_rows
from extract_core.engine.protocol import ShardDone, ShardJob, laid_out
from extract_core.engine.reference import Reference, ReferenceFailedError, compute
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.errors import CaptureError, EngineCrashedError, PreflightError
from extract_core.planning.prefixes import MIN_SHARED
from extract_core.store.unsealed import UnsealedShard

PROMPTS, TOKENS, SETS = 4, 160, 3
"""How many prompts of at most how many tokens, and how many such sets are tried."""
CHUNK_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.1, "float16": 0.1}
"""Largest relative difference, at the 90th percentile of rows, between a prefill in chunks and a whole one. A chunk
that misses its context is off by about 1; single rows may differ more where a mixture's router is near a tie."""
STORE_ROUNDING = {"float32": 0.0, "bfloat16": 4e-3, "float16": 5e-4}
"""What rounding to the stored dtype adds at most (half a unit in the last place of the mantissa, relative)."""
LEAST_AGREEMENT = 0.5
"""Of a handful of prompts one or two may sit at a tie of two tokens; a wrong layer or norm agrees on none."""
REFERENCE_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.2, "float16": 0.1}
"""Largest relative difference to a float32 Hugging Face forward, median of rows, at any layer. A GPU's float32 products
are shorter than float32 (1.5e-3 measured on six blocks); a wrong layer shows by being nearer to another id."""
_REFERENCE_S = 900

Prompts = Sequence[np.ndarray[Any, np.dtype[np.int32]]]
Rows = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Probe:
    """What the self-test needs to know of a job.

    ``layer_ids`` ascend, of a model of ``n_layers`` blocks. ``compute_dtype`` is the dtype of the forward and, with the
    engine's dtype of stored rows, decides the tolerances. ``reference`` is "never", "auto" (compare with Hugging Face,
    go on where its forward fails) or "always". Probe files go to ``folder``. ``shares``: samples share prefixes.
    """

    layer_ids: Sequence[int]
    n_layers: int
    compute_dtype: str
    folder: Path
    reference: str = "never"
    shares: bool = False

    @property
    def captures_last(self) -> bool:
        """Layer n is captured, so the next token can be computed from it."""
        return self.layer_ids[-1] == self.n_layers

    @property
    def neighbours(self) -> list[int]:
        """The layers asked for and those beside them, which show an id that is off by one."""
        return sorted({k + step for k in self.layer_ids for step in (-1, 0, 1)} & set(range(self.n_layers + 1)))


def preflight(engine: EngineSupervisor, prompts: Prompts, probe: Probe) -> dict[str, Any]:
    """Run the self-test; starts the engine if it does not run.

    A sample may be bad in itself (it kills the engine, its states overflow): when one set of prompts fails in such a
    way, others are tried, and the samples are judged later, each on its own.

    Args:
        engine: the job's engine.
        prompts: token ids of real samples; ``PROMPTS`` at a time are used, cut to ``TOKENS``.
        probe: what to expect.

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
            return _test(engine, cut, probe)
        except (EngineCrashedError, PreflightError):
            engine.kills.clear()  # the probes are nobody's samples
            if number == len(sets) - 1:
                raise
    raise PreflightError("there is no sample to test the capture with; expected at least one in the plan")


def _test(engine: EngineSupervisor, cut: Prompts, probe: Probe) -> dict[str, Any]:
    if probe.reference == "never":
        return _test_engine(engine, cut, probe)[0]
    stop = threading.Event()
    with ThreadPoolExecutor(1) as beside:  # a process of its own, which runs while the engine starts
        reference = beside.submit(_reference, engine, cut, probe, stop)
        try:
            figures, whole = _test_engine(engine, cut, probe)
            return figures | _compare(reference, whole, probe, engine.spec.store_dtype)
        finally:
            stop.set()


def _test_engine(engine: EngineSupervisor, cut: Prompts, probe: Probe) -> tuple[dict[str, Any], list[Any]]:
    chunk = max(2, max(map(len, cut)) // 3)
    whole, done = _capture(engine, cut, probe, chunk=0)
    figures: dict[str, Any] = {"prompts": len(cut), "tokens": sum(map(len, cut)), "chunk": chunk}
    if probe.captures_last:
        agree = sum(done.greedy[name] == done.top1[name] for name in done.greedy) / len(done.greedy)
        if agree < LEAST_AGREEMENT:
            raise PreflightError(
                f"lm_head(norm(h_n)) gives the engine's own next token for {agree:.0%} of {len(cut)} prompts, expected "
                f"at least {LEAST_AGREEMENT:.0%}: layer {probe.n_layers} is not the last block's output, or the final "
                "norm is another. Try engine.capture: hooks (docs/compatibility.md)"
            )
        figures["top1_agreement"] = agree
    tolerance = CHUNK_TOLERANCE[probe.compute_dtype] + STORE_ROUNDING[engine.spec.store_dtype]
    if probe.shares:
        figures |= _test_cache(engine, cut, whole, probe, tolerance)
    if engine.spec.extra.get("enable_chunked_prefill") is False:
        return figures, whole
    parts, _ = _capture(engine, cut, probe, chunk=chunk)
    worst = _worst(parts, whole)
    if not worst <= tolerance:
        raise PreflightError(
            f"rows of a prefill in chunks of {chunk} tokens differ from those of a whole one by {worst:.2e} (relative, "
            f"90th percentile), expected at most {tolerance:.1e}: chunked prefill is not safe for this model here. Set "
            "engine.extra.enable_chunked_prefill to false (and engine.max_num_batched_tokens above the longest sample)"
        )
    return figures | {"chunked_p90": worst}, whole


def _test_cache(
    engine: EngineSupervisor, cut: Prompts, whole: Sequence[Rows], probe: Probe, tolerance: float
) -> dict[str, Any]:
    """The prompts once more, each behind its own first half, whose rows it shares."""
    heads = [ids[: len(ids) // 2] for ids in cut if len(ids) // 2 >= MIN_SHARED]
    if not heads:
        return {}
    found, done = _capture(engine, [*heads, *cut], probe, chunk=0, share=True)
    worst = _worst(found[len(heads) :], whole)
    if not worst <= tolerance:
        raise PreflightError(
            f"rows of prompts whose beginning came from the prefix cache differ from those of a whole prefill by "
            f"{worst:.2e} (relative, 90th percentile), expected at most {tolerance:.1e}: sharing prefixes is not safe "
            "for this model here. Set store.share_prefixes to false"
        )
    tokens = sum(map(len, [*heads, *cut]))
    return {"cached_p90": worst, "cached_tokens": tokens - int(done.counters["computed"])}


def _worst(rows: Sequence[Rows], reference: Sequence[Rows]) -> float:
    """Relative difference at the 90th percentile of rows and layers."""
    found = [_relative(a, b).ravel() for a, b in zip(rows, reference, strict=True)]
    return float(np.quantile(np.concatenate(found), 0.9))


def _reference(engine: EngineSupervisor, cut: Prompts, probe: Probe, stop: threading.Event) -> Reference:
    return compute(
        Path(engine.spec.model),
        cut,
        probe.neighbours,
        probe.folder,
        trust_remote_code=engine.spec.trust_remote_code,
        timeout_s=_REFERENCE_S,
        stop=stop,
    )


def _compare(
    running: Future[Reference], whole: Sequence[np.ndarray[Any, Any]], probe: Probe, store_dtype: str
) -> dict[str, Any]:
    try:
        reference = running.result()
    except ReferenceFailedError as error:
        if probe.reference == "always":
            raise PreflightError(
                f"no comparison with Hugging Face: {error}; set preflight.reference to auto or never to go on without",
                log_tail=error.log_tail,
            ) from error
        return {"reference": f"not compared: {error}"}
    known = probe.neighbours
    captured = np.concatenate(list(whole))
    expected = np.concatenate(reference.rows)
    tolerance = REFERENCE_TOLERANCE[probe.compute_dtype] + STORE_ROUNDING[store_dtype]
    medians: dict[str, float] = {}
    for at, k in enumerate(probe.layer_ids):
        rows = captured[:, at]
        errors = {c: float(np.median(_relative(rows, expected[:, i]))) for i, c in enumerate(known) if abs(c - k) <= 1}
        nearest = min(errors, key=lambda c: errors[c])
        if nearest != k:
            raise PreflightError(
                f"what was captured as layer {k} is layer {nearest} of a Hugging Face forward (relative difference "
                f"{errors[nearest]:.2e}, to layer {k} {errors[k]:.2e}): this vLLM counts the layers of this model in "
                "another way. Try engine.capture: hooks"
            )
        if not errors[k] <= tolerance:
            raise PreflightError(
                f"layer {k} differs from a Hugging Face forward of the same weights by {errors[k]:.2e} (relative, "
                f"median of {len(rows)} rows), expected at most {tolerance:g}: the engine computes another model than "
                "the checkpoint says (quantization, position encoding, or a fault of this vLLM). Compare engine.extra "
                "with the model's card, or set preflight.reference to never if the difference is meant"
            )
        medians[str(k)] = errors[k]
    return {"reference": medians}


def _capture(
    engine: EngineSupervisor,
    prompts: Prompts,
    probe: Probe,
    *,
    chunk: int,
    share: bool = False,
) -> tuple[list[Rows], ShardDone]:
    import torch

    samples, tokens = laid_out(prompts, "probe-", share=share)
    attempt = uuid.uuid4().hex
    path = probe.folder / f"preflight-{attempt}.tmp"
    try:
        job = ShardJob(attempt, str(path), tokens, samples, want_top1=probe.captures_last, chunk=chunk)
        try:
            done = engine.extract(job, lambda progress: None)
        except CaptureError as error:
            raise PreflightError(
                f"{error}; the capture does not fit this model in this vLLM. Try the other engine.capture "
                "(docs/compatibility.md)",
                engine_traceback=error.engine_traceback,
                log_tail=error.log_tail,
            ) from error
        if done.refused:
            raise PreflightError(f"the engine refuses the probe prompts: {done.refused}")
        rows = []
        with UnsealedShard(path) as shard:
            for sample, ids in zip(samples, prompts, strict=True):
                states, echo = shard.sample(sample.segments)
                result = check_sample_rows(states, echo, torch.from_numpy(ids.copy()), layer_ids=probe.layer_ids)
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
    """Relative difference of each row (and layer)."""
    size = np.maximum(np.linalg.norm(reference, axis=-1), 1e-30)  # an embedding may be zero
    return np.asarray(np.linalg.norm(rows - reference, axis=-1) / size)
