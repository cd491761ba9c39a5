"""One engine working through shards: shared by the run on one machine and by each of several workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from extract_core import pipeline, spool
from extract_core.engine.follow import LogFollower
from extract_core.job import Job
from extract_core.local import ShardProgress, run_shards
from extract_core.pipeline.share import still_open
from extract_core.progress import reporter
from extract_core.provenance import RunClock
from flows.logs import LogReporter
from tasks.extract import capture_shard, commit_shard, preflight, whole


def extract_shards(
    job: Job,
    todo: Sequence[pipeline.ShardTask],
    progress: Callable[[], ShardProgress],
    clock: RunClock,
    *,
    shared: bool = False,
) -> None:
    """Every shard of these, one after the other; a shard is committed while the next is captured.

    Args:
        job: the job.
        todo: what to extract; nothing is started where this is empty.
        progress: makes what is told of tokens and shards.
        clock: takes the times.
        shared: other workers are at the same plan: what they have committed is passed over.
    """
    if not todo:
        return
    spool.clean(job.spool)
    shown, heard = progress(), reporter()
    with (
        spool.RunFolder(job.spool) as folder,
        pipeline.make_supervisor(job, folder) as engine,
        LogFollower(folder.logs, heard.warn if isinstance(heard, LogReporter) else lambda level, line: None),
    ):
        try:
            with clock.stage("preflight_s"):
                preflight(job, engine, folder)
        except BaseException:
            engine.kill()  # whoever cancels does not wait for an engine that is loading
            raise
        with clock.stage("extraction_s"):
            run_shards(
                still_open(job, todo) if shared else todo,
                lambda task, following: capture_shard(
                    whole(job), whole(engine), whole(folder), whole(task), whole(shown), whole(following)
                ),
                lambda captured: commit_shard.submit(whole(job), whole(captured)),
                shown.shard_done,
                job.spool_limit,
                abandon=engine.kill,
            )
        clock.engine_starts[:] = engine.start_seconds
