"""From commit records to a visible version."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

import pyarrow as pa

from extract_core.checks.run import CheckReport, check_run
from extract_core.errors import (
    CheckFailedError,
    CorruptDataError,
    IncompleteError,
    StoreUnavailableError,
)
from extract_core.job import Job, new_attempt
from extract_core.pipeline.adopt import origin
from extract_core.pipeline.commit import write_quarantine
from extract_core.pipeline.todo import SOUND, Damage, is_current
from extract_core.provenance import RunClock, provenance
from extract_core.store import layout
from extract_core.store.commits import ShardCommits, all_records, read_commits, state_of
from extract_core.store.index import INDEX_SCHEMA, write_index
from extract_core.store.objects import lost_by_commits
from extract_core.store.records import (
    Accounting,
    IndexRef,
    Manifest,
    ShardRef,
    Totals,
)
from extract_core.store.versions import latest_version, read_manifest
from extract_core.store.versions import publish as publish_version

_TRIES = 10
_REPLACING_S = 1.0
"""A missing record is looked for again after so long: another run may be replacing that of a lost shard."""


def account(job: Job, commits: Mapping[int, ShardCommits]) -> Accounting:
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
    planned = job.plan.sample_ids()
    for delay in (_REPLACING_S, 0.0):
        commits = read_commits(job.root, job.plan.fingerprint)
        missing = sorted(shard for shard in planned if shard not in commits or not commits[shard].complete)
        if not missing:
            break
        time.sleep(delay)
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
            f"{layout.quarantine_dir(job.plan.fingerprint)}; mend them, or lower completeness. {_left(job, commits)}"
        )
    report = check_run(commits, planned, accounting, layer_ids=job.layer_ids, settings=job.settings.checks)
    if not report.passed:
        lines = [
            f"  {result.name}: {result.detail} (value {result.value}, threshold {result.threshold})"
            for result in report.failures
        ]
        raise CheckFailedError("the extracted rows fail these checks, nothing is published:\n" + "\n".join(lines))
    return report


def _left(job: Job, commits: Mapping[int, ShardCommits]) -> str:
    """What the next run does about quarantined samples."""
    runs = job.settings.quarantine_runs
    left = sum(len(shard.to_retry(runs)) for shard in commits.values())
    if left:
        return f"The next run of this job tries {left} quarantined sample{'s' if left > 1 else ''} again"
    if any(shard.excluded for shard in commits.values()):
        return f"Quarantined samples were tried by {runs} runs; quarantine_runs lets more of them try"
    return "No sample is quarantined"


def _stored_whole(job: Job, commits: Mapping[int, ShardCommits]) -> None:
    """Every file that a commit record names is there and has its size; its bytes are for ``verify``."""
    lost = lost_by_commits(job.root, commits)
    for shard in commits.values():
        for path in sorted(lost.keys() & shard.objects.keys()):
            raise CorruptDataError(
                f"{job.root.url}/{path} {lost[path]}, its commit record says {shard.objects[path]} bytes; it was lost "
                "while this run was at work: run the job again, only what is lost is extracted anew"
            )


def publish(
    job: Job,
    report: CheckReport,
    *,
    started: float | None = None,
    damage: Damage = SOUND,
    clock: RunClock | None = None,
) -> Manifest:
    """Write the index, then the manifest by exclusive create, then the hint.

    A version that names exactly these shards already is returned instead. Where commit records changed since they were
    checked (another run rescued samples, or replaced a lost shard), they are checked again.

    Args:
        job: a job whose shards are all committed.
        report: result of ``validate``.
        started: ``time.time()`` at the start of the run, for the manifest's timings.
        damage: what a repair found; a version whose manifest or index is damaged is not taken for this one.
        clock: stages of the run so far, for the manifest.

    Raises:
        CheckFailedError, IncompleteError: of commit records that came meanwhile.
        StoreUnavailableError: others change the records all the time.
    """
    clock = clock or RunClock()
    for _ in range(_TRIES):
        before = latest_version(job.root) or 0
        commits = read_commits(job.root, job.plan.fingerprint)
        if state_of(commits) != report.state:
            report = validate(job)
            continue
        if (existing := _standing(job, commits, damage)) is not None:
            return existing
        _settle_quarantine(job, commits)
        with clock.stage("index_s"):
            index = write_index(job.root, _index_tables(job, commits))
        if (existing := _healed(job, commits, damage, index)) is not None:
            return existing
        attempt = new_attempt()
        try:
            return publish_version(
                job.root, _builder(job, commits, damage, index, report, attempt, started, clock, before), attempt
            )
        except _OvertakenError as other:
            if other.manifest is not None:
                return other.manifest
    raise StoreUnavailableError(f"{job.root.url}: other runs change this plan all the time; try again later")


def _builder(
    job: Job,
    commits: Mapping[int, ShardCommits],
    damage: Damage,
    index: IndexRef,
    report: CheckReport,
    attempt: str,
    started: float | None,
    clock: RunClock,
    before: int,
) -> Callable[[int], Manifest]:
    """What makes the manifest; ``before`` is the latest version when this run last looked whether it is published."""

    def build(version: int) -> Manifest:
        if version != before + 1:  # another publisher was here since: this very plan, perhaps with more samples
            if state_of(now := read_commits(job.root, job.plan.fingerprint)) != report.state:
                raise _OvertakenError(None)
            if (other := _standing(job, now, damage)) is not None:
                raise _OvertakenError(other)
        return _manifest(job, version, attempt, commits, index, report, started, clock)

    return build


def _standing(job: Job, commits: Mapping[int, ShardCommits], damage: Damage) -> Manifest | None:
    """The latest version, where it is whole and names exactly these shards."""
    if damage.version is not None and latest_version(job.root) == damage.version:
        return None
    existing = job.published()
    return existing if existing is not None and is_current(existing, commits) else None


def _healed(job: Job, commits: Mapping[int, ShardCommits], damage: Damage, index: IndexRef) -> Manifest | None:
    """The damaged version, where the index that was just written is its own."""
    if damage.version is None or latest_version(job.root) != damage.version:
        return None
    try:
        manifest = read_manifest(job.root, damage.version)
    except CorruptDataError:
        return None
    same = manifest.fingerprint == job.plan.fingerprint and is_current(manifest, commits)
    return manifest if same and manifest.index == index else None


def _settle_quarantine(job: Job, commits: Mapping[int, ShardCommits]) -> None:
    """Exactly the samples that are left out have a file."""
    folder = layout.quarantine_dir(job.plan.fingerprint)
    there = {f"{folder}/{name}" for name in job.root.list(folder)}
    for shard in commits.values():
        for item in shard.excluded:
            path = layout.quarantine_path(job.plan.fingerprint, item.sample_id)
            if path not in there:
                write_quarantine(job, shard.records[-1], item)
            there.discard(path)
    for path in there:
        job.root.delete(path)


class _OvertakenError(Exception):
    """Another publisher was first; with its version where that is all there is."""

    def __init__(self, manifest: Manifest | None):
        self.manifest = manifest


def _index_tables(job: Job, commits: Mapping[int, ShardCommits]) -> Iterator[pa.Table]:
    """The index shard by shard, so that a large one is never in memory."""
    for shard, table in enumerate(job.plan.shards()):
        by_id = {record.sample_id: record for record in commits[shard].samples}
        ids = table["sample_id"].to_pylist()
        records = [by_id[sample] for sample in ids if sample in by_id]
        if len(records) < len(ids):
            table = table.filter(pa.array([sample in by_id for sample in ids]))
        computed = {
            "segments": [[dict(segment) for segment in record.segments] for record in records],
            **{name: [getattr(record, name) for record in records] for name in _FROM_RECORD},
        }
        columns = [
            pa.chunked_array([pa.array(computed[field.name], field.type)])
            if field.name in computed
            else table[field.name].cast(field.type)
            for field in INDEX_SCHEMA
        ]
        yield pa.Table.from_arrays(columns, schema=INDEX_SCHEMA)


_FROM_RECORD = ("norm_mean", "norm_max", "greedy_token", "top1_token")


def _manifest(
    job: Job,
    version: int,
    attempt: str,
    commits: Mapping[int, ShardCommits],
    index: IndexRef,
    report: CheckReport,
    started: float | None,
    clock: RunClock,
) -> Manifest:
    shards = {r.sha256: r for _, c in sorted(commits.items()) for r in c.stored if r.sha256 is not None}
    tokens = sum(sample.n_tokens for commit in commits.values() for sample in commit.samples)
    records = list(all_records(commits))
    engine_s = sum(record.timings.get("engine_s", 0.0) for record in records)
    made = origin(commits.values())
    timings = {"engine_s": engine_s, "tokens_per_s": made["extracted"]["tokens"] / engine_s if engine_s else 0.0}
    if engine_s and any("computed" in record.timings for record in records):
        timings["computed_per_s"] = sum(record.timings.get("computed", 0.0) for record in records) / engine_s
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
        encoding=job.encoding,
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
            **provenance(),
            "model": job.model.name,
            "mask_methods": job.plan.meta.mask_methods,
            "engines": _distinct([record.engine for record in records]),
            "rounds": len(records) - len(commits),
            **made,
            **clock.to_dict(records),
        },
        timings=timings,
    )


def _distinct(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for n, item in enumerate(items) if item not in items[:n]]
