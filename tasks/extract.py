"""Prefect tasks of an extraction: one thin call into extract_core each.

Completion is a commit record in the store, never a Prefect cache entry or result: so no task is cached and none
persists what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.states import State
from prefect.tasks import Task, exponential_backoff
from prefect.utilities.annotations import quote

from extract_core import pipeline
from extract_core.checks.run import CheckReport
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.job import Job, planned, prepare
from extract_core.local import ShardProgress
from extract_core.pipeline import Captured, Damage, ShardTask, Work
from extract_core.progress import reporter
from extract_core.provenance import RunClock
from extract_core.retries import RETRIES, is_retryable
from extract_core.settings import JobSettings
from extract_core.spool import RunFolder
from extract_core.store.records import CommitRecord, Manifest

T = TypeVar("T")


def whole(value: T) -> T:
    """A parameter that Prefect passes on as it is; otherwise it walks through it twice for every shard."""
    return quote(value)  # type: ignore[return-value]


def _retryable(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    try:
        state.result()
    except BaseException as error:  # noqa: BLE001 - it stays recorded in the state; only its kind decides here
        if is_retryable(error):
            reporter().note(f"{task_run.name}: {error}; trying again")
            return True
    return False


OPTIONS: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "cache_result_in_memory": False,
    "retries": RETRIES,
    "retry_delay_seconds": exponential_backoff(backoff_factor=5),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": _retryable,
    "log_prints": False,
}


@task(name="plan", task_run_name="plan", **OPTIONS)
def plan_job(settings: JobSettings, *, repair: bool = False) -> Job:
    """Check the job and lay out every row."""
    return prepare(settings, repair=repair)


@task(name="open-plan", task_run_name="open-plan", **OPTIONS)
def open_planned(settings: JobSettings, fingerprint: str) -> Job:
    """The job of a plan that the parent flow has made."""
    return planned(settings, fingerprint)


@task(name="find-damage", task_run_name="find-damage", **OPTIONS)
def find_damage(job: Job) -> Damage:
    """Read everything that the job has stored and hold it against its digests."""
    return pipeline.find_damage(job)


@task(name="look", task_run_name="look", **OPTIONS)
def outstanding(job: Job, damage: Damage) -> Work:
    """What is left to extract, to make again and to try again."""
    return pipeline.outstanding(job, damage, adopt=True)


@task(name="preflight", task_run_name="preflight", **OPTIONS)
def preflight(job: Job, engine: EngineSupervisor, folder: RunFolder) -> dict[str, Any]:
    """Start the engine and test the capture on the first real samples."""
    return pipeline.preflight(job, engine, folder)


@task(name="capture-shard", task_run_name="capture-shard-{todo.name}", **OPTIONS)
def capture_shard(
    job: Job,
    engine: EngineSupervisor,
    folder: RunFolder,
    todo: ShardTask,
    progress: ShardProgress,
    following: Callable[[], ShardTask | None],
) -> Captured:
    """Run one shard through the engine; called directly, so that a cancelled flow stops it."""
    return pipeline.capture_shard(job, engine, folder, todo, progress.tokens, following)


@task(name="commit-shard", task_run_name="commit-shard-{captured.name}", **OPTIONS)
def commit_shard(job: Job, captured: Captured) -> CommitRecord:
    """Check every row of a captured shard, store it, commit it."""
    return pipeline.commit_shard(job, captured)


@task(name="validate", task_run_name="validate", **OPTIONS)
def validate(job: Job) -> CheckReport:
    """Checks over the whole run, and the completeness threshold."""
    return pipeline.validate(job)


@task(name="publish", task_run_name="publish", **OPTIONS)
def publish(job: Job, report: CheckReport, started: float, damage: Damage, clock: RunClock) -> Manifest:
    """Index, manifest, hint."""
    return pipeline.publish(job, report, started=started, damage=damage, clock=clock)
