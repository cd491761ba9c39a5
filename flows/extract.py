"""The extraction flow: plan, capture and commit shard by shard, validate, publish.

Runs without a server to start first: with no ``PREFECT_API_URL`` Prefect starts a private one for the run, which has
no scheduler and cannot cancel from its UI. Order only; every step is a task of ``tasks/``.
"""

from __future__ import annotations

import time

from prefect import flow
from prefect.settings import PREFECT_API_URL
from prefect.task_runners import ThreadPoolTaskRunner

from extract_core import pipeline, spool
from extract_core.local import RunResult
from extract_core.progress import reporter
from extract_core.provenance import RunClock
from extract_core.settings import JobSettings
from extract_core.store.commits import read_commits
from extract_core.store.publisher import sole_publisher
from extract_core.store.records import Manifest
from extract_core.store.versions import latest_version
from flows.shards import extract_shards
from tasks import artifacts
from tasks.extract import find_damage, outstanding, plan_job, publish, validate


@flow(
    name="extract",
    flow_run_name="extract-{settings.root}",
    task_runner=ThreadPoolTaskRunner(max_workers=spool.MOST_COMMITS),  # type: ignore[arg-type]
    persist_result=False,
    log_prints=False,
    validate_parameters=False,
)
def extract(settings: JobSettings, repair: bool = False) -> RunResult:
    """Chats in, a published and verified dataset version out; goes on from the commit records of an earlier run.

    With ``repair`` everything that the job has stored is read first, and what is damaged is made anew.
    """
    started, clock = time.time(), RunClock()

    def result(manifest: Manifest, *, new: bool, shards: int = 0) -> RunResult:
        artifacts.summary(job, manifest, new=new)
        return RunResult(manifest, job.root.url, new, time.time() - started, shards)

    with clock.stage("planning_s"):
        job = plan_job(settings, repair=repair)
    damage = find_damage(job) if repair else pipeline.SOUND
    before = latest_version(job.root) or 0
    work = outstanding(job, damage)
    if work.existing is not None and work.nothing:
        return result(work.existing, new=False)
    with sole_publisher(job.root):
        extract_shards(job, work.tasks, lambda: artifacts.ProgressArtifact(job, work.tasks), clock)
        artifacts.shard_table(job, read_commits(job.root, job.plan.fingerprint))
        if (existing := pipeline.settled(job, work)) is not None:
            return result(existing, new=False, shards=len(work.tasks))
        reporter().stage("Checking")
        with clock.stage("checks_s"):
            report = validate(job)
        reporter().stage("Publishing")
        manifest = publish(job, report, started, damage, clock)
    return result(manifest, new=manifest.version > before, shards=len(work.tasks))


def run_flow(settings: JobSettings, *, repair: bool = False) -> RunResult:
    """Run the flow in this process; what it raises is raised here."""
    if not PREFECT_API_URL.value():
        from flows.server import end_server_with_run  # imports Prefect's server, which takes seconds

        end_server_with_run()
    return extract(settings, repair)
