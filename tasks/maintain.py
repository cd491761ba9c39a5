"""Prefect tasks of the flows that look after a dataset: one thin call into extract_core each."""

from __future__ import annotations

from typing import Any

from prefect import task

from extract_core.deep.verify import DeepReport, verify_deep
from extract_core.progress import reporter
from extract_core.reader import HiddenStatesDataset
from extract_core.store.gc import GcReport, Policy, collect, survey
from extract_core.store.root import Root
from extract_core.store.verify import VerifyReport
from extract_core.store.verify import verify as verify_stored
from tasks.extract import OPTIONS


@task(name="verify-version", task_run_name="verify-version", **OPTIONS)
def verify_version(root: Root, version: int | None) -> VerifyReport:
    """Every checksum, count and invariant of a version."""
    reporter().stage("Reading every byte")
    return verify_stored(root, version)


@task(name="verify-rows", task_run_name="verify-rows", **OPTIONS)
def verify_rows(
    root: str,
    version: int | None,
    storage_options: dict[str, Any],
    *,
    samples: int,
    seed: int,
    model: str | None,
    engine: dict[str, Any] | None,
) -> DeepReport:
    """Sampled rows, extracted again and compared; called directly, so that a cancelled flow stops the engine."""
    dataset = HiddenStatesDataset(root, version=version, storage_options=storage_options)
    return verify_deep(dataset, samples=samples, seed=seed, model=model, engine=engine)


@task(name="collect-garbage", task_run_name="collect-garbage", **OPTIONS)
def collect_garbage(root: Root, policy: Policy, *, delete: bool) -> GcReport:
    """What nothing refers to: listed, or removed."""
    return collect(root, policy) if delete else survey(root, policy)
