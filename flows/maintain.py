"""Flows that run on a schedule: extract what changed, verify the latest version, remove what nothing refers to."""

from __future__ import annotations

from typing import Any

from prefect import flow

from extract_core.errors import CorruptDataError, SettingsError
from extract_core.settings import refuse_secrets
from extract_core.store.gc import Policy
from extract_core.store.root import Root
from flows.logs import told_to_run
from flows.parent import extract_version
from tasks import artifacts
from tasks.maintain import collect_garbage, verify_rows, verify_version


@flow(name="re-extract", persist_result=False, log_prints=False)
def re_extract(
    job: str | dict[str, Any],
    overrides: dict[str, Any] | None = None,
    workers: int | None = None,
    worker_deployment: str | None = None,
    stall_minutes: float = 60,
) -> None:
    """Look whether the job's data has changed, and publish a version in which only changed samples are new.

    A changed model, chat template, layer list or engine means that every sample is new; the job then needs
    allow_change: true.

    Args:
        job: Path of a job file on the machine that runs this flow, or the job itself as an object.
        overrides: Settings to change, by dotted name, such as {"chat.max_length": 2048}.
        workers: Most workers at once; empty means as many as the work pool of the workers allows.
        worker_deployment: Deployment to start workers from; empty means the one that fits the job.
        stall_minutes: A worker that commits no shard for so long is cancelled and its shards go to another.
    """
    with told_to_run():
        extract_version(job, overrides, workers, worker_deployment, stall_minutes)


@flow(name="verify", persist_result=False, log_prints=False)
def verify(
    root: str,
    version: int | None = None,
    deep: bool = True,
    samples: int = 16,
    seed: int = 0,
    model: str | None = None,
    engine: dict[str, Any] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> None:
    """Hold a version against its checksums, and sampled rows against what the model gives now; fails where they differ.

    Args:
        root: Directory or URL of the dataset.
        version: Which version; empty means the latest.
        deep: Also extract sampled rows again, with the engine of the machine that runs this flow.
        samples: How many samples are extracted again.
        seed: Which samples.
        model: Where the model is now, when it is not where the version says.
        engine: Engine settings of this machine, such as {"gpu_memory_utilization": 0.8}.
        storage_options: fsspec options of a remote root, such as {"endpoint_url": "http://host:9000"}; never secrets.
    """
    with told_to_run() as told:
        opened = Root.open(root, _harmless(storage_options))
        report = verify_version(opened, version)
        found = [str(problem) for problem in report.problems]
        compared = None
        if deep and not found:
            compared = verify_rows(
                root,
                report.version,
                _harmless(storage_options),
                samples=samples,
                seed=seed,
                model=model,
                engine=_harmless(engine),
            )
            found = compared.problems
        artifacts.verified(root, report, compared)
        if found:
            raise CorruptDataError(
                f"version {report.version} of {root}: {len(found)} problems; first: {found[0]}. See docs/repair.md"
            )
        told.note(f"version {report.version} of {root} is whole: {report.samples:,} samples, {report.shards} shards")


@flow(name="gc", persist_result=False, log_prints=False)
def gc(
    root: str,
    keep: int | None = None,
    grace_hours: float = 24,
    delete: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> None:
    """List what no version and no unfinished plan refers to, or remove it.

    Args:
        root: Directory or URL of the dataset.
        keep: Remove versions before the last so many, except tagged ones; empty means none.
        grace_hours: Touch nothing younger than this.
        delete: Remove it; without, it is only listed.
        storage_options: fsspec options of a remote root, such as {"endpoint_url": "http://host:9000"}; never secrets.
    """
    with told_to_run() as told:
        opened = Root.open(root, _harmless(storage_options))
        report = collect_garbage(opened, Policy(keep, 3600 * grace_hours), delete=delete)
        artifacts.collected(root, report)
        done = "removed" if delete else "could be removed (delete is off)"
        told.note(f"{len(report.items)} things of {report.nbytes / 1e6:,.1f} MB {done}")


def _harmless(options: dict[str, Any] | None) -> dict[str, Any]:
    """Parameters are stored by Prefect's server and shown to everybody: no secret may be among them."""
    try:
        return refuse_secrets(options or {})
    except ValueError as error:
        raise SettingsError(f"options: {error}") from error
