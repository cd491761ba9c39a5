"""A whole run in this process without Prefect: the same steps as the flow, in a loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from extract_core import pipeline, spool
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.errors import CoresampleError
from extract_core.job import Job, prepare
from extract_core.pipeline import Captured
from extract_core.progress import reporter
from extract_core.settings import JobSettings
from extract_core.store.records import CommitRecord, Manifest

T = TypeVar("T")

RETRIES = 3
"""Tries after the first, for failures that may pass (store unavailable, engine replaced)."""
RETRY_DELAYS_S = (2.0, 10.0, 30.0)
SPOOLED_SHARDS = 1
"""Shards that may wait on the spool for their commit while another is captured."""


@dataclass(frozen=True)
class RunResult:
    """What a run came to. ``new`` is False when the plan was published already and nothing ran."""

    manifest: Manifest
    root: str
    new: bool
    seconds: float


def is_retryable(error: BaseException) -> bool:
    """Whether trying the same again may help."""
    return isinstance(error, CoresampleError) and error.retryable


def with_retries(step: Callable[[], T], *, delays_s: tuple[float, ...] = RETRY_DELAYS_S) -> T:
    """Call a step, again after a delay when its failure may pass."""
    for delay in delays_s:
        try:
            return step()
        except CoresampleError as error:
            if not error.retryable:
                raise
            reporter().note(f"{error}; trying again in {delay:.0f} s")
            time.sleep(delay)
    return step()


def run(settings: JobSettings) -> RunResult:
    """Plan, extract, validate and publish; goes on from the commit records of an earlier run."""
    started = time.time()
    job = with_retries(lambda: prepare(settings))
    published = job.published()
    if published is not None:
        return RunResult(published, job.root.url, False, time.time() - started)
    extract(job)
    reporter().stage("Checking")
    report = with_retries(lambda: pipeline.validate(job))
    reporter().stage("Publishing")
    manifest = with_retries(lambda: pipeline.publish(job, report, started=started))
    return RunResult(manifest, job.root.url, True, time.time() - started)


def extract(job: Job, engine: EngineSupervisor | None = None) -> None:
    """Extract every shard that has no commit record; a shard is committed while the next one is captured.

    Args:
        job: the job.
        engine: a running engine of this job, which stays up; by default one is started and ended here.
    """
    todo = pipeline.open_shards(job)
    if not todo:
        return
    spool.clean(job.spool)
    progress = ShardProgress(job, todo)
    with ExitStack() as stack:
        folder = stack.enter_context(spool.RunFolder(job.spool))
        if engine is None:
            engine = stack.enter_context(pipeline.make_supervisor(job, folder))
        if not engine.preflight:
            with_retries(partial(pipeline.preflight, job, engine, folder))
        committer = stack.enter_context(ThreadPoolExecutor(1, "commit"))

        def capture(shard: int) -> Captured:
            return with_retries(partial(pipeline.capture_shard, job, engine, folder, shard, progress.tokens))

        def commit(captured: Captured) -> Future[CommitRecord]:
            return committer.submit(with_retries, partial(pipeline.commit_shard, job, captured))

        run_shards(todo, capture, commit, progress.shard_done)


class Waitable(Protocol):
    """A commit under way: a future of this process or of Prefect."""

    def result(self) -> Any:
        """Wait; raises what the commit raised."""


def run_shards(
    todo: Iterable[int],
    capture: Callable[[int], Captured],
    commit: Callable[[Captured], Waitable],
    on_captured: Callable[[int], None],
) -> None:
    """Capture shards one after the other; each is committed while the next one is captured.

    A failure ends the loop; what was captured before it is still committed, and whatever else fails then is told as a
    note, so that the first failure is the one raised.
    """
    waiting: deque[tuple[Captured, Waitable]] = deque()
    try:
        for shard in todo:
            captured = capture(shard)
            on_captured(shard)
            waiting.append((captured, commit(captured)))
            while len(waiting) > SPOOLED_SHARDS:
                waiting[0][1].result()
                waiting.popleft()
        while waiting:
            waiting[0][1].result()
            waiting.popleft()
    except BaseException as first:
        for captured, under_way in waiting:
            try:
                under_way.result()
            except Exception as error:  # noqa: BLE001 - told, and the first failure is raised
                if error is not first:
                    reporter().note(f"shard {captured.shard} was not committed either: {error}")
        raise


class ShardProgress:
    """Tokens of the whole run, from the tokens of the shard at work."""

    def __init__(self, job: Job, todo: list[int]):
        self._done = 0
        self._rows = {shard.index: shard.rows for shard in job.plan.meta.shards}
        reporter().stage("Extracting", total=sum(self._rows[shard] for shard in todo), unit="tokens")

    def tokens(self, of_shard: int) -> None:
        """``of_shard`` tokens of the current shard are computed."""
        reporter().advance(self._done + of_shard)

    def shard_done(self, shard: int) -> None:
        """A shard is captured."""
        self._done += self._rows[shard]
        reporter().advance(self._done)
