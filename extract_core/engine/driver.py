"""Drives vLLM's EngineCore in this process: samples in, rows in shard files out.

Shards are not waited for: while the last samples of one are computed, the steps are filled with samples of the next,
and files are written and closed beside the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from extract_core import errors
from extract_core.engine import compat
from extract_core.engine.feed import ShardRun
from extract_core.engine.protocol import EngineSpec, FinalNorm, JobSample, Progress, ShardDone, ShardJob
from extract_core.errors import CaptureError, CoresampleError, EngineError
from extract_core.planning.prefixes import MIN_SHARED

_REPORT_EVERY_S = 0.25
_ASK_S = 10.0
POLL_S = 0.002
"""Between two looks at files that are being written, while the engine has nothing else to do."""


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
        self._chunk = self.core.vllm_config.scheduler_config.long_prefill_token_threshold
        self._runs: list[ShardRun] = []
        self._in_flight: dict[str, tuple[ShardRun, JobSample]] = {}
        self._alone = False
        self._steps = self._told_steps = 0
        self._told_at = self._ended_at = 0.0
        self._rpc("capture_setup", spec.buffer_bytes, spec.writer_threads)
        self.info = compat.engine_info(self.core) | {"model_runner": self._rpc("capture_runner")[0]}
        norm = self._rpc("capture_norm")[0]
        self.startup: dict[str, float] = self._rpc("capture_startup")[0]
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

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._runs and not self.core.scheduler.has_requests()

    @property
    def computing(self) -> bool:
        """Whether the next ``turn`` has work for the model; otherwise files are being written."""
        return any(run.left or run.in_flight for run in self._runs) or self.core.scheduler.has_requests()

    def add(self, job: ShardJob) -> None:
        """Take a job; its samples follow those of the jobs before it without a gap."""
        try:
            refused = {s.sample_id: why for s in job.samples if (why := self.refusal(s)) is not None}
            accepted = [s for s in job.samples if s.sample_id not in refused]
            run = ShardRun(self.core, job, refused, reads_cache=self._reads_cache(accepted))
            self._rpc("capture_begin", job.attempt, job.path, job.rows, {rid: s.segments for rid, s in run.ids.items()})
            self._runs.append(run)
        except BaseException as error:
            self._raise_worker_failure(error)
            raise

    def turn(self, report: Callable[[Progress], None]) -> list[ShardDone]:
        """Feed the scheduler, run one step, end the shards whose rows are all in their files.

        Args:
            report: called with progress a few times a second, and before samples enter.

        Raises:
            CaptureError: a row never came, or a sample ended otherwise than after one token.
        """
        try:
            self._feed()
            self._tell(report)
            if self._in_flight or self.core.scheduler.has_requests():
                self._step()
            return self._end(report)
        except BaseException as error:
            self._raise_worker_failure(error)
            raise

    def extract(self, job: ShardJob, report: Callable[[Progress], None]) -> ShardDone:
        """Run one job to its end; see ``turn``."""
        self.add(job)
        while not (done := self.turn(report)):
            if not self.computing:
                time.sleep(POLL_S)
        return done[0]

    def _feed(self) -> None:
        """Give the scheduler requests: as many as two full steps can hold, whichever shard they are of."""
        while len(self._in_flight) < self._ahead and not self._alone:
            run = next((run for run in self._runs if run.left), None)
            if run is None:
                return
            apart = run.next_is_solo or run.job.chunk != self._chunk
            if apart and self._in_flight:
                return
            if run.job.chunk != self._chunk:
                self._chunk = self.core.vllm_config.scheduler_config.long_prefill_token_threshold = run.job.chunk
            self._alone = run.next_is_solo
            taken = run.take(wait=not self._in_flight)
            if taken is None:
                self._alone = False
                return
            rid, sample, request = taken
            self._in_flight[rid] = run, sample
            self.core.add_request(request)

    def _step(self) -> None:
        outputs, executed = compat.one_step(self.core)
        for output in outputs:
            if output.finish_reason is None:
                continue
            run, sample = self._in_flight.pop(output.request_id)
            if str(output.finish_reason) != "length" or len(output.new_token_ids) != 1:
                raise CaptureError(
                    f"sample {sample.sample_id} ended with {output.finish_reason} and {len(output.new_token_ids)} "
                    "tokens, expected one token and its length limit"
                )
            run.came_back(output.request_id, sample, int(output.new_token_ids[0]))
            self._alone = False
        self._steps += executed

    def _tell(self, report: Callable[[Progress], None], ended: ShardRun | None = None) -> None:
        # A message means progress: an engine that spins without running the model must look hung.
        now = time.monotonic()
        due = now - self._told_at >= _REPORT_EVERY_S
        for run in self._runs:
            stepped = due and run is self._runs[0] and self._steps > self._told_steps
            # A sample is announced before the step that it may not survive, however soon that is.
            if run.entered or stepped or (run.finished and (due or run is ended)):
                report(Progress(run.job.attempt, run.entered, run.finished, run.done_rows, self._steps))
                run.entered, run.finished = [], []
                self._told_at, self._told_steps = now, self._steps

    def _end(self, report: Callable[[Progress], None]) -> list[ShardDone]:
        ended = []
        for run in list(self._runs):
            if not run.left and not run.in_flight and run.again is None:
                run.run_again(self._first("capture_missing", run.job.attempt))
            if not run.computed:
                continue
            if run.ended_at is None:
                run.ended_at = time.perf_counter()
                began = max(run.fed_at or run.ended_at, self._ended_at)
                run.engine_s, self._ended_at = run.ended_at - began, run.ended_at
            if (done := self._done(run)) is not None:
                self._tell(report, run)
                self._runs.remove(run)
                ended.append(done)
        return ended

    def _done(self, run: ShardRun) -> ShardDone | None:
        """The result of a shard whose samples are computed; None while its file is written or read back."""
        job, accepted = run.job, run.accepted
        if not run.result:
            run.result = self._first("capture_end", job.attempt)
        if not run.result:
            return None
        if run.result["missing"]:
            names = [run.ids[rid].sample_id for rid in run.result["missing"]]
            raise CaptureError(
                f"{len(names)} of {len(accepted)} samples are missing rows after their prefill, first {names[0]}: "
                "nothing of this shard is kept"
            )
        top1: dict[str, int] = {}
        if job.want_top1 and accepted:
            found = self._rpc("capture_next_tokens", job.path, [s.last_row for s in accepted])
            tokens = next((tokens for tokens in found if tokens), None)
            if tokens is None:
                return None
            top1 = {s.sample_id: token for s, token in zip(accepted, tokens, strict=True)}
        assert run.ended_at is not None
        return ShardDone(
            attempt=job.attempt,
            greedy=run.greedy,
            top1=top1,
            refused=run.refused,
            counters={
                **run.result["counters"],
                "engine_s": run.engine_s,
                "total_s": run.engine_s + time.perf_counter() - run.ended_at,
                "tokens": float(sum(s.tokens for s in accepted)),
                "samples_again": float(len(run.again or ())),
            },
        )

    def _first(self, method: str, *args: Any) -> Any:
        """The answer of the rank that has one."""
        return next(found for found in self._rpc(method, *args) if found is not None)

    def _reads_cache(self, samples: list[JobSample]) -> bool:
        """Whether prefixes are taken from the cache: where samples share rows, so that nobody misses them.

        A cache of smaller blocks than the layout counts with would serve rows that are not shared.
        """
        nodes = {node for s in samples for node in s.segments}
        shared = sum(s.tokens for s in samples) > sum(rows for _, rows in nodes)
        return shared and self.spec.prefix_caching and compat.hash_block_size(self.core) % MIN_SHARED == 0
