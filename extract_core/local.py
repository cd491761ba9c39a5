"""A whole run in this process without Prefect: the same steps as the flow, in a loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from extract_core import pipeline, spool
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.job import Job, prepare
from extract_core.pipeline import Captured, ShardTask
from extract_core.progress import reporter
from extract_core.provenance import RunClock
from extract_core.retries import with_retries
from extract_core.settings import JobSettings
from extract_core.store.publisher import sole_publisher
from extract_core.store.records import CommitRecord, Manifest
from extract_core.store.versions import latest_version

TOLD_WAIT_S = 10.0
"""An engine that waited less for the store is not worth a word."""


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    ``new`` is False where an existing version is the result; ``shards`` counts the shard files that were extracted, or
    extracted anew, all the same.
    """

    manifest: Manifest
    root: str
    new: bool
    seconds: float
    shards: int = 0


def run(settings: JobSettings, *, repair: bool = False) -> RunResult:
    """Plan, extract, validate and publish; goes on from the commit records of an earlier run.

    Args:
        settings: the job.
        repair: read everything that this job has stored, and make anew what is damaged.
    """
    started, clock = time.time(), RunClock()

    def result(manifest: Manifest, *, new: bool, shards: int = 0) -> RunResult:
        return RunResult(manifest, job.root.url, new, time.time() - started, shards)

    with clock.stage("planning_s"):
        job = with_retries(lambda: prepare(settings, repair=repair))
    damage = with_retries(lambda: pipeline.find_damage(job)) if repair else pipeline.SOUND
    before = latest_version(job.root) or 0
    work = with_retries(lambda: pipeline.outstanding(job, damage, adopt=True))
    if work.existing is not None and work.nothing:
        return result(work.existing, new=False)
    with sole_publisher(job.root):
        extract(job, todo=work.tasks, clock=clock)
        if (existing := with_retries(lambda: pipeline.settled(job, work))) is not None:
            return result(existing, new=False, shards=len(work.tasks))
        reporter().stage("Checking")
        with clock.stage("checks_s"):
            report = with_retries(lambda: pipeline.validate(job))
        reporter().stage("Publishing")
        manifest = with_retries(lambda: pipeline.publish(job, report, started=started, damage=damage, clock=clock))
    return result(manifest, new=manifest.version > before, shards=len(work.tasks))


def extract(
    job: Job,
    engine: EngineSupervisor | None = None,
    *,
    todo: list[ShardTask] | None = None,
    clock: RunClock | None = None,
) -> None:
    """Extract every shard that has no commit record; a shard is committed while the next one is captured.

    Args:
        job: the job.
        engine: a running engine of this job, which stays up; by default one is started and ended here.
        todo: what to extract; by default ``pipeline.open_shards``.
        clock: takes the time of preflight and extraction, and of the engine's starts.
    """
    clock = clock or RunClock()
    if todo is None:
        todo = pipeline.open_shards(job, adopt=True)
    if not todo:
        return
    spool.clean(job.spool)
    progress = ShardProgress(todo)
    with ExitStack() as stack:
        folder = stack.enter_context(spool.RunFolder(job.spool))
        lent = engine is not None
        if engine is None:
            engine = stack.enter_context(pipeline.make_supervisor(job, folder))
        if not engine.preflight:
            with clock.stage("preflight_s"):
                with_retries(partial(pipeline.preflight, job, engine, folder))
        committer = stack.enter_context(ThreadPoolExecutor(job.spool_limit.shards, "commit"))

        def capture(task: ShardTask, following: Callable[[], ShardTask | None]) -> Captured:
            return with_retries(partial(pipeline.capture_shard, job, engine, folder, task, progress.tokens, following))

        def commit(captured: Captured) -> Future[CommitRecord]:
            return committer.submit(with_retries, partial(pipeline.commit_shard, job, captured))

        abandon = _nothing if lent else engine.kill
        with clock.stage("extraction_s"):
            run_shards(todo, capture, commit, progress.shard_done, job.spool_limit, abandon=abandon)
        clock.engine_starts[:] = engine.start_seconds


class Waitable(Protocol):
    """A commit under way: a future of this process or of Prefect."""

    def result(self) -> Any:
        """Wait; raises what the commit raised."""


class HasRows(Protocol):
    """A shard to capture."""

    @property
    def rows(self) -> int:
        """Token positions."""


S = TypeVar("S", bound=HasRows)


def _nothing() -> None:
    """An engine that was lent stays up."""


def run_shards(
    todo: Iterable[S],
    capture: Callable[[S, Callable[[], S | None]], Captured],
    commit: Callable[[Captured], Waitable],
    on_captured: Callable[[S], None],
    limit: spool.SpoolLimit,
    abandon: Callable[[], None] = _nothing,
) -> None:
    """Capture shards one after the other; each is committed while the next ones are captured.

    The next shard begins when there is room for it in the spool: a store that is slower than the engine holds the
    engine back. ``capture`` is given a function that returns what follows as soon as there is room for that, too, so
    that the engine can go on without a gap.

    A failure ends the loop; what was captured before it is still committed, and whatever else fails then is told as a
    note, so that the first failure is the one raised. ``abandon`` is called first then: nothing more will be captured,
    and whoever cancelled wants the accelerator back before the last shards are stored.
    """
    waiting: deque[tuple[S, Captured, Waitable]] = deque()
    waited = 0.0
    shards = iter(todo)
    shard, following, begun = next(shards, None), None, False

    def ahead() -> S | None:
        nonlocal begun
        rows = [other.rows for other, captured, _ in waiting if not captured.committed]
        if following is None or shard is None or not limit.admits(following.rows, rows, capturing=shard.rows):
            return None
        begun = True
        return following

    try:
        while shard is not None:
            started = time.perf_counter()
            while not begun and not limit.admits(shard.rows, [other.rows for other, _, _ in waiting]):
                waiting[0][2].result()
                waiting.popleft()
            waited += time.perf_counter() - started
            while waiting and waiting[0][1].committed:
                waiting[0][2].result()
                waiting.popleft()
            following, begun = next(shards, None), False
            captured = capture(shard, ahead)
            on_captured(shard)
            waiting.append((shard, captured, commit(captured)))
            shard = following
        while waiting:
            waiting[0][2].result()
            waiting.popleft()
    except BaseException as first:
        abandon()
        for _, captured, under_way in waiting:
            try:
                under_way.result()
            except Exception as error:  # noqa: BLE001 - told, and the first failure is raised
                if error is not first:
                    reporter().note(f"shard {captured.shard} was not committed either: {error}")
        raise
    if waited >= TOLD_WAIT_S:
        reporter().note(
            f"the engine waited {waited:,.0f} s for room in the spool: checking and storing shards is slower than "
            "capturing them (store.commit_threads, store.spool_bytes)"
        )


class ShardProgress:
    """Tokens of the whole run, from the tokens of the shard at work."""

    def __init__(self, todo: Sequence[ShardTask]):
        self._done = 0
        self.total = sum(task.rows for task in todo)
        reporter().stage("Extracting", total=self.total, unit="tokens")

    def tokens(self, of_shard: int) -> None:
        """``of_shard`` tokens of the current shard are computed."""
        reporter().advance(self._done + of_shard)

    def shard_done(self, task: ShardTask) -> None:
        """A shard is captured."""
        self._done += task.rows
        reporter().advance(self._done)
