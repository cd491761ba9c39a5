"""Drives vLLM's EngineCore in this process: samples in, rows in a shard file out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from extract_core import errors
from extract_core.engine import compat
from extract_core.engine.protocol import EngineSpec, FinalNorm, JobSample, Progress, ShardDone, ShardJob
from extract_core.errors import CaptureError, CoresampleError, EngineError
from extract_core.planning.prefixes import MIN_SHARED

_REPORT_EVERY_S = 0.25
_ASK_S = 10.0


class EngineDriver:
    """One engine, many shards.

    Args:
        spec: how to build it; the constructor loads the model.

    Raises:
        EngineIncompatibleError: the installed vLLM lacks something needed; everything vLLM raises passes through.
    """

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.core = compat.build_core(spec)
        model = self.core.vllm_config.model_config
        self._vocab_size = model.get_vocab_size()
        self._max_tokens = model.max_model_len - 1  # one position is reserved for the output token
        self._ahead = self.core.vllm_config.scheduler_config.max_num_seqs * 2
        self._rpc("capture_setup", spec.buffer_bytes, spec.writer_threads)
        self.info = compat.engine_info(self.core) | {"model_runner": self._rpc("capture_runner")[0]}
        norm = self._rpc("capture_norm")[0]
        self.final_norm = None if "unknown" in norm else FinalNorm(**norm)
        if self.final_norm is None:
            self.info["final_norm"] = norm["unknown"]

    def _raise_worker_failure(self, error: BaseException) -> None:
        """What a worker process failed with, in place of the text that the executor makes of it.

        Raises:
            CoresampleError: of the kind raised in the worker.
        """
        if isinstance(error, CoresampleError) or self.spec.tensor_parallel_size == 1:
            return
        try:
            failures = self.core.model_executor.collective_rpc("capture_failure", timeout=_ASK_S)
        except BaseException as unanswered:  # noqa: BLE001 - the first failure is raised by the caller, this one noted
            error.add_note(f"the workers did not say more: {unanswered!r}")
            return
        for found in failures:
            if found is not None:
                kind = getattr(errors, found["kind"] or "EngineCrashedError", EngineError)
                kind = kind if issubclass(kind, EngineError) else EngineError
                raise kind(found["message"], engine_traceback=found["traceback"]) from error

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        result: list[Any] = self.core.collective_rpc(method, args=args)
        return result

    def refusal(self, sample: JobSample) -> str | None:
        """Why the engine must not be given this sample, or None.

        A prompt as long as the engine's limit spins for ever and an id beyond the vocabulary fails the whole step, so
        both are kept out here.
        """
        ids = np.frombuffer(sample.token_ids, dtype="<i4")
        if not len(ids):
            return "no_tokens: a sample needs at least one token"
        if len(ids) > self._max_tokens:
            return f"too_long: {len(ids)} tokens, the engine takes at most {self._max_tokens}"
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            return f"token_id_out_of_range: ids span {ids.min()}..{ids.max()}, the model has 0..{self._vocab_size - 1}"
        return None

    def extract(self, job: ShardJob, report: Callable[[Progress], None]) -> ShardDone:
        """Fill ``job.path`` with the rows of every sample.

        Args:
            job: the shard and its samples.
            report: called with progress a few times a second, and before and after each solo sample.

        Raises:
            CaptureError: a row never came, or a sample ended otherwise than after one token.
        """
        try:
            return self._extract(job, report)
        except BaseException as error:
            self._raise_worker_failure(error)
            raise

    def _extract(self, job: ShardJob, report: Callable[[Progress], None]) -> ShardDone:
        started = time.perf_counter()
        refused = {s.sample_id: why for s in job.samples if (why := self.refusal(s)) is not None}
        accepted = [s for s in job.samples if s.sample_id not in refused]
        self.core.vllm_config.scheduler_config.long_prefill_token_threshold = job.chunk
        self.core.reset_prefix_cache()  # a shard stands alone, whatever ran before
        ids = {f"{job.attempt}-{n}": s for n, s in enumerate(accepted)}
        self._rpc("capture_begin", job.path, job.rows, {rid: s.segments for rid, s in ids.items()})
        reads = self._reads_cache(accepted)
        run = _Run(self.core, report)
        alone = set(job.solo)
        for rid, sample in ids.items():
            if sample.sample_id in alone:
                run.feed([(rid, sample)], ahead=1, announce=True, reads_cache=reads)
        together = ((rid, s) for rid, s in ids.items() if s.sample_id not in alone)
        run.feed(together, ahead=self._ahead, reads_cache=reads)
        run.drain()
        again = self._uncovered(ids, job.rows) if reads else []
        if again:
            run.feed(again, ahead=self._ahead)
            run.drain()
        engine_s = time.perf_counter() - started
        ended = next(result for result in self._rpc("capture_end") if result is not None)
        if ended["missing"]:
            names = [ids[rid].sample_id for rid in ended["missing"]]
            raise CaptureError(
                f"{len(names)} of {len(accepted)} samples are missing rows after their prefill, first {names[0]}: "
                "nothing of this shard is kept"
            )
        top1: dict[str, int] = {}
        if job.want_top1 and accepted:
            lasts = [s.last_row for s in accepted]
            tokens = next(result for result in self._rpc("capture_next_tokens", job.path, lasts) if result)
            top1 = {s.sample_id: token for s, token in zip(accepted, tokens, strict=True)}
        return ShardDone(
            attempt=job.attempt,
            greedy={ids[rid].sample_id: token for rid, token in run.tokens.items()},
            top1=top1,
            refused=refused,
            counters={
                **ended["counters"],
                "engine_s": engine_s,
                "total_s": time.perf_counter() - started,
                "tokens": float(sum(s.tokens for s in accepted)),
                "samples_again": float(len(again)),
            },
        )

    def _reads_cache(self, samples: list[JobSample]) -> bool:
        """Whether prefixes are taken from the cache: where samples share rows, so that nobody misses them.

        A cache of smaller blocks than the layout counts with would serve rows that are not shared.
        """
        nodes = {node for s in samples for node in s.segments}
        shared = sum(s.tokens for s in samples) > sum(rows for _, rows in nodes)
        return shared and self.spec.prefix_caching and compat.hash_block_size(self.core) % MIN_SHARED == 0

    def _uncovered(self, ids: dict[str, JobSample], rows: int) -> list[tuple[str, JobSample]]:
        """Samples to run again without the cache, since rows of theirs never came: as few as have them all.

        The cache held their blocks, but who filled it did not have these rows as its own, or never came to its end.
        """
        missing = np.zeros(rows, dtype=bool)
        for first, count in next(found for found in self._rpc("capture_missing") if found is not None):
            missing[first : first + count] = True
        chosen: list[tuple[str, JobSample]] = []
        for rid, sample in ids.items():
            if not missing.any():
                break
            if any(missing[first : first + count].any() for first, count in sample.segments):
                chosen.append((rid, sample))
                for first, count in sample.segments:
                    missing[first : first + count] = False
        return chosen


class _Run:
    """Keeps the scheduler fed and collects what leaves it."""

    def __init__(self, core: Any, report: Callable[[Progress], None]):
        self._core, self._report = core, report
        self.tokens: dict[str, int] = {}
        self._entered: list[str] = []
        self._finished: list[str] = []
        self._in_flight: dict[str, JobSample] = {}
        self._done: set[tuple[int, int]] = set()
        self._done_rows = 0
        self._steps = self._reported_steps = 0
        self._last_report = 0.0

    def feed(
        self,
        samples: Iterable[tuple[str, JobSample]],
        *,
        ahead: int,
        announce: bool = False,
        reads_cache: bool = False,
    ) -> None:
        """Run ``samples`` to their end with at most ``ahead`` of them given to the scheduler at a time."""
        waiting = deque(samples)
        while waiting or self._in_flight:
            while waiting and len(self._in_flight) < ahead:
                rid, sample = waiting.popleft()
                ids = np.frombuffer(sample.token_ids, dtype="<i4").tolist()
                request = compat.make_request(self._core, rid, ids, reads_cache=reads_cache)
                self._in_flight[rid] = sample
                self._entered.append(sample.sample_id)
                self._core.add_request(request)
            self._send(force=announce)
            self._step()
        self._send(force=True)

    def drain(self) -> None:
        """The empty steps after the last finish, in which the engine forgets finished requests."""
        while self._core.scheduler.has_requests():
            self._step()

    def _step(self) -> None:
        outputs, executed = compat.one_step(self._core)
        for output in outputs:
            if output.finish_reason is None:
                continue
            sample = self._in_flight.pop(output.request_id)
            if str(output.finish_reason) != "length" or len(output.new_token_ids) != 1:
                raise CaptureError(
                    f"sample {sample.sample_id} ended with {output.finish_reason} and {len(output.new_token_ids)} "
                    "tokens, expected one token and its length limit"
                )
            self.tokens[output.request_id] = int(output.new_token_ids[0])
            self._finished.append(sample.sample_id)
            for node in sample.segments:
                if node not in self._done:
                    self._done.add(node)
                    self._done_rows += node[1]
        self._steps += executed

    def _send(self, *, force: bool = False) -> None:
        # A message means progress: an engine that spins without running the model must look hung.
        if not (self._entered or self._finished or self._steps > self._reported_steps):
            return
        now = time.monotonic()
        # A sample is announced before the step that it may not survive, however soon that is.
        if not (force or self._entered) and now - self._last_report < _REPORT_EVERY_S:
            return
        self._reported_steps = self._steps
        self._report(Progress(self._entered, self._finished, self._done_rows, self._steps))
        self._entered, self._finished, self._last_report = [], [], now
