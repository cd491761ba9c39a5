"""A worker: one engine, loaded once, that works through its share of a plan's shards.

Started by the parent flow (``flows/parent.py``) as a deployment run, one per group of accelerators. What it finishes is
in the commit records; its own state only tells how it ended.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from extract_core import spool
from extract_core.pipeline.share import share_of
from extract_core.provenance import RunClock
from extract_core.retries import with_retries
from extract_core.settings import load_job
from extract_core.shares import as_ranges, from_ranges
from flows.logs import told_to_run
from flows.shards import extract_shards
from tasks import artifacts
from tasks.extract import open_planned


@flow(
    name="extract-worker",
    task_runner=ThreadPoolTaskRunner(max_workers=spool.MOST_COMMITS),  # type: ignore[arg-type]
    persist_result=False,
    log_prints=False,
)
def extract_worker(settings: dict[str, Any], fingerprint: str, shards: str) -> None:
    """Extract some shards of a plan that the parent flow has made.

    Args:
        settings: The whole job, as the parent read it.
        fingerprint: Which plan under the job's root.
        shards: Numbers and ranges of shards in the order to do them, such as 0-11,40; what is committed is left out.
    """
    with told_to_run() as told:
        job = open_planned(load_job(None, settings), fingerprint)
        todo = with_retries(lambda: share_of(job, from_ranges(shards)))
        if not todo:
            told.note(f"every shard of {shards} is committed already; no engine is started")
            return
        told.note(f"{len(todo)} shards to extract: {as_ranges(task.name for task in todo)}")
        extract_shards(job, todo, lambda: artifacts.ProgressArtifact(job, todo, shards), RunClock(), shared=True)
