"""From commit records to a visible version."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from importlib import metadata
from typing import Any

import pyarrow as pa

from extract_core.checks.run import CheckReport, check_run
from extract_core.errors import (
    CheckFailedError,
    CorruptDataError,
    IncompleteError,
)
from extract_core.job import Job, new_attempt
from extract_core.store import layout
from extract_core.store.commits import read_commits
from extract_core.store.index import INDEX_SCHEMA, write_index
from extract_core.store.objects import lost_by_commits
from extract_core.store.records import (
    Accounting,
    CommitRecord,
    IndexRef,
    Manifest,
    ShardRef,
    Totals,
)
from extract_core.store.versions import publish as publish_version


def account(job: Job, commits: dict[int, CommitRecord]) -> Accounting:
    """Where every input row went; the equation is asserted by the type."""
    meta = job.plan.meta
    quarantined = Counter(item.reason for commit in commits.values() for item in commit.excluded)
    return Accounting(
        input=meta.input,
        published=sum(len(commit.samples) for commit in commits.values()),
        duplicates=meta.duplicates,
        dropped=meta.dropped,
        quarantined=dict(quarantined),
    )


def validate(job: Job) -> CheckReport:
    """Run-level checks over all commit records, and the completeness threshold.

    Raises:
        CheckFailedError: a check failed; nothing is published.
        IncompleteError: too many rows malformed or quarantined; nothing is published (exit 3).
    """
    commits = read_commits(job.root, job.plan.fingerprint)
    planned = job.plan.sample_ids()
    missing = sorted(set(planned) - set(commits))
    if missing:
        raise CheckFailedError(
            f"{len(missing)} of {len(planned)} shards have no commit record (first {missing[0]}); run the job again, "
            "it goes on from the commit records"
        )
    _stored_whole(job, commits)
    accounting = account(job, commits)
    lost = job.plan.meta.malformed + sum(accounting.quarantined.values())
    share = 1 - lost / accounting.input
    if share < job.settings.completeness or not accounting.published:
        reasons = {**job.plan.meta.dropped, **accounting.quarantined}
        raise IncompleteError(
            f"{lost} of {accounting.input} input rows are malformed or quarantined: completeness {share:.4f} is below "
            f"{job.settings.completeness} and nothing is published. By reason: "
            + ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
            + f". Rows are named in {job.root.url}/{layout.dropped_path(job.plan.fingerprint)} and "
            f"{layout.quarantine_dir(job.plan.fingerprint)}; mend them, or lower completeness. To extract quarantined "
            f"samples again, delete the commit records of their shards: {_commits_with_excluded(job, commits)}"
        )
    report = check_run(commits, planned, accounting, layer_ids=job.layer_ids, settings=job.settings.checks)
    if not report.passed:
        lines = [
            f"  {result.name}: {result.detail} (value {result.value}, threshold {result.threshold})"
            for result in report.failures
        ]
        raise CheckFailedError("the extracted rows fail these checks, nothing is published:\n" + "\n".join(lines))
    return report


def _stored_whole(job: Job, commits: dict[int, CommitRecord]) -> None:
    """Every file that a commit record names is there and has its size; its bytes are for ``verify``."""
    lost = lost_by_commits(job.root, commits.values())
    for shard, commit in sorted(commits.items()):
        for path in sorted(lost.keys() & commit.objects.keys()):
            raise CorruptDataError(
                f"{job.root.url}/{path} {lost[path]}, its commit record says {commit.objects[path]} bytes, "
                f"and extracting it again gave other bytes; delete {layout.commit_path(job.plan.fingerprint, shard)} "
                "and run the job again: the new shard then replaces it in a new version"
            )


def _commits_with_excluded(job: Job, commits: dict[int, CommitRecord]) -> str:
    paths = [layout.commit_path(job.plan.fingerprint, s) for s, c in sorted(commits.items()) if c.excluded]
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "") or "none"


def publish(job: Job, report: CheckReport, *, started: float | None = None) -> Manifest:
    """Write the index, then the manifest by exclusive create, then the hint.

    Args:
        job: a job whose shards are all committed.
        report: result of ``validate``.
        started: ``time.time()`` at the start of the run, for the manifest's timings.
    """
    existing = job.published()
    if existing is not None:
        return existing
    commits = read_commits(job.root, job.plan.fingerprint)
    index = write_index(job.root, _index_table(job, commits))
    attempt = new_attempt()

    def build(version: int) -> Manifest:
        # Called again when another publisher was first; it may have published this very plan.
        if (other := job.published()) is not None:
            raise _PublishedByAnotherError(other)
        return _manifest(job, version, attempt, commits, index, report, started)

    try:
        return publish_version(job.root, build, attempt)
    except _PublishedByAnotherError as first:
        return first.manifest


class _PublishedByAnotherError(Exception):
    def __init__(self, manifest: Manifest):
        self.manifest = manifest


def _index_table(job: Job, commits: dict[int, CommitRecord]) -> pa.Table:
    tables = []
    for shard, table in enumerate(job.plan.shards()):
        by_id = {record.sample_id: record for record in commits[shard].samples}
        ids = table["sample_id"].to_pylist()
        kept = table.filter(pa.array([sample in by_id for sample in ids]))
        records = [by_id[sample] for sample in ids if sample in by_id]
        computed = {
            "segments": [[segment.model_dump() for segment in record.segments] for record in records],
            **{name: [getattr(record, name) for record in records] for name in _FROM_RECORD},
        }
        for name, values in computed.items():
            kept = kept.append_column(name, pa.array(values, INDEX_SCHEMA.field(name).type))
        tables.append(kept.select(INDEX_SCHEMA.names).cast(INDEX_SCHEMA))
    return pa.concat_tables(tables)


_FROM_RECORD = ("norm_mean", "norm_max", "greedy_token", "top1_token")


def _manifest(
    job: Job,
    version: int,
    attempt: str,
    commits: dict[int, CommitRecord],
    index: IndexRef,
    report: CheckReport,
    started: float | None,
) -> Manifest:
    shards = {c.sha256: c for _, c in sorted(commits.items()) if c.object is not None and c.sha256 is not None}
    tokens = sum(sample.n_tokens for commit in commits.values() for sample in commit.samples)
    engine_s = sum(commit.timings.get("engine_s", 0.0) for commit in commits.values())
    timings = {"engine_s": engine_s, "tokens_per_s": tokens / engine_s if engine_s else 0.0}
    if started is not None:
        timings["run_s"] = time.time() - started
    return Manifest(
        version=version,
        attempt=attempt,
        coresample_version=metadata.version("coresample"),
        fingerprint=job.plan.fingerprint,
        spec=json.loads(json.dumps(job.spec.document)),
        layer_ids=list(job.layer_ids),
        n_layers=job.model.n_layers,
        hidden_size=job.model.hidden_size,
        dtype=job.dtype,  # type: ignore[arg-type]
        final_norm=next((norm for _, c in sorted(commits.items()) if (norm := c.final_norm) is not None), None),
        index=index,
        shards=[
            ShardRef(path=c.object or "", sha256=digest, nbytes=c.nbytes, rows=c.rows) for digest, c in shards.items()
        ],
        accounting=account(job, commits),
        totals=Totals(
            samples=sum(len(c.samples) for c in commits.values()),
            tokens=tokens,
            bytes=sum(c.nbytes for c in shards.values()),
        ),
        checks=report.to_dict(),
        provenance={
            "host": platform.node(),
            "python": platform.python_version(),
            "model": job.model.name,
            "mask_methods": job.plan.meta.mask_methods,
            "engines": _distinct([commit.engine for _, commit in sorted(commits.items())]),
        },
        timings=timings,
    )


def _distinct(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for n, item in enumerate(items) if item not in items[:n]]
