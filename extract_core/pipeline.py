"""The steps of a run, each one call: capture a shard, commit it, check everything, publish.

Flows and the plain loop in ``local.py`` order these calls; nothing here knows who calls. Every step is safe to repeat:
a shard with a commit record is never extracted again, a published plan is never published twice.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa

from extract_core.checks.rows import RowFailure, SampleStats, check_sample_rows
from extract_core.checks.run import CheckReport, check_run
from extract_core.engine.preflight import PROMPTS
from extract_core.engine.preflight import preflight as run_preflight
from extract_core.engine.protocol import JobSample, Progress, ShardDone, ShardJob
from extract_core.engine.supervisor import KILLS_TO_QUARANTINE, EngineSupervisor
from extract_core.errors import CheckFailedError, EngineCrashedError, IncompleteError
from extract_core.job import Job, machine_id, new_attempt
from extract_core.progress import reporter
from extract_core.store import layout
from extract_core.store.commits import read_commits, write_commit
from extract_core.store.index import INDEX_SCHEMA, write_index
from extract_core.store.records import (
    Accounting,
    CommitRecord,
    Excluded,
    IndexRef,
    Manifest,
    SampleRecord,
    SegmentRecord,
    ShardRef,
    Totals,
    canonical_json,
)
from extract_core.store.shard import SealedShard, Segment, seal_shard
from extract_core.store.unsealed import UnsealedShard
from extract_core.store.versions import publish as publish_version


@dataclass
class Captured:
    """A shard whose rows are in a spool file and not yet checked."""

    shard: int
    attempt: str
    path: Path
    samples: pa.Table
    done: ShardDone
    excluded: list[Excluded] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    record: CommitRecord | None = None
    """Set when the rows are checked and the file is sealed: a commit that is tried again goes on from there."""


def make_supervisor(job: Job) -> EngineSupervisor:
    """The engine of a job; it starts at the first shard."""
    engine = job.settings.engine
    return EngineSupervisor(
        job.engine_spec,
        job.spool / f"engine-logs-{os.getpid()}",
        start_timeout_s=engine.start_timeout_s,
        step_timeout_s=engine.step_timeout_s,
        on_stage=lambda stage: reporter().note(f"engine: {stage}"),
    )


def open_shards(job: Job) -> list[int]:
    """Shards of the plan that have no commit record yet."""
    done = read_commits(job.root, job.plan.fingerprint)
    return [shard.index for shard in job.plan.meta.shards if shard.index not in done]


def clean_spool(job: Job) -> None:
    """Remove spool files of this plan that a killed run on this machine left behind."""
    for path in job.spool.glob(f"{job.plan.fingerprint[:12]}-*.tmp"):
        *_, machine, pid, _attempt = path.name.split("-")
        if machine == machine_id() and not _alive(int(pid)):
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def capture_shard(
    job: Job, engine: EngineSupervisor, shard: int, on_tokens: Callable[[int], None] = lambda tokens: None
) -> Captured:
    """Run one shard through the engine, leaving out samples that kill it.

    Args:
        job: the job.
        engine: its engine; replaced inside when it dies.
        shard: index in the plan.
        on_tokens: called with the tokens of this shard computed so far.

    Raises:
        EngineCrashedError: the engine died and no sample could be blamed; trying again may help.
        CaptureError: rows did not arrive where they belong.
        NoSpaceError: the spool is full.
    """
    table = job.plan.shard(shard)
    samples = [
        JobSample(sample_id, first, token_ids.values.to_numpy().astype("<i4").tobytes())
        for sample_id, first, token_ids in zip(
            table["sample_id"].to_pylist(), table["first_row"].to_pylist(), table["token_ids"], strict=True
        )
    ]
    rows = job.plan.meta.shards[shard].rows
    excluded: dict[str, Excluded] = {}
    while True:
        attempt = new_attempt()
        path = job.spool_path(shard, attempt)
        request = ShardJob(
            attempt=attempt,
            path=str(path),
            rows=rows,
            samples=[s for s in samples if s.sample_id not in excluded],
            solo=engine.suspects(),
            want_top1=job.captures_last,
        )
        try:
            done = engine.extract(request, lambda progress: _report(progress, on_tokens))
        except EngineCrashedError as error:
            path.unlink(missing_ok=True)
            named = [sample for sample in engine.killers() if sample not in excluded]
            if not named:
                raise
            for sample in named:
                excluded[sample] = Excluded(
                    sample_id=sample,
                    reason="kills_engine",
                    detail=f"the engine died {KILLS_TO_QUARANTINE} times with it in flight; last: {error}",
                    attempts=KILLS_TO_QUARANTINE,
                )
            continue
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        break
    for sample, why in done.refused.items():
        reason, _, detail = why.partition(": ")
        excluded[sample] = Excluded(sample_id=sample, reason=reason, detail=detail)
    return Captured(
        shard, attempt, path, table, done, list(excluded.values()), {**engine.info, "preflight": engine.preflight}
    )


def preflight(job: Job, engine: EngineSupervisor) -> dict[str, Any]:
    """Self-test of the engine on the first real samples; its figures go into every commit record.

    Raises:
        PreflightError, EngineError: nothing is extracted.
    """
    prompts = [ids.values.to_numpy() for ids in job.plan.shard(0)["token_ids"][:PROMPTS]]
    figures = run_preflight(
        engine,
        prompts,
        layer_ids=job.layer_ids,
        compute_dtype=job.model.dtype,
        spool=job.spool,
        want_top1=job.captures_last,
    )
    engine.preflight = figures
    return figures


def _report(progress: Progress, on_tokens: Callable[[int], None]) -> None:
    on_tokens(progress.tokens)


def commit_shard(job: Job, captured: Captured) -> CommitRecord:
    """Check every row of a captured shard, store it and write its commit record; may be called again after a failure.

    Returns:
        the record that stands: this attempt's, or an earlier one's when another worker was first.

    Raises:
        CorruptDataError, NoSpaceError, StoreError: nothing is committed.
    """
    if captured.record is None:
        captured.record = _check_and_seal(job, captured)
    record = captured.record
    if record.object is not None and captured.path.exists():  # put_file takes the file away once it is durable
        job.root.put_file(captured.path, record.object)
    for item in record.excluded:
        job.root.put_bytes(
            layout.quarantine_path(job.plan.fingerprint, item.sample_id),
            canonical_json(item.model_dump(mode="json") | {"shard": captured.shard}),
        )
    standing = write_commit(job.root, record)
    if record.object is not None and standing.object != record.object:
        job.root.delete(record.object)  # another worker's record stands and names other bytes
    captured.path.unlink(missing_ok=True)
    return standing


def _check_and_seal(job: Job, captured: Captured) -> CommitRecord:
    started = time.perf_counter()
    stats, excluded = _check_rows(job, captured)
    rows = captured.samples.select(["sample_id", "first_row", "n_tokens"]).to_pylist()
    kept = [row for row in rows if row["sample_id"] in stats]
    sealed = _seal(job, captured, kept) if kept else None
    return CommitRecord(
        fingerprint=job.plan.fingerprint,
        shard=captured.shard,
        object=layout.shard_path(sealed.sha256) if sealed else None,
        sha256=sealed.sha256 if sealed else None,
        nbytes=sealed.nbytes if sealed else 0,
        rows=sealed.rows if sealed else 0,
        layer_ids=list(job.layer_ids),
        hidden_size=job.model.hidden_size,
        dtype=job.dtype,  # type: ignore[arg-type]
        samples=_records(captured, kept, sealed, stats) if sealed else [],
        excluded=excluded,
        attempt=captured.attempt,
        engine=captured.engine,
        timings={
            **{name: float(value) for name, value in captured.done.counters.items()},
            "check_and_seal_s": time.perf_counter() - started,
        },
    )


def _check_rows(job: Job, captured: Captured) -> tuple[dict[str, SampleStats], list[Excluded]]:
    import torch

    excluded = {item.sample_id: item for item in captured.excluded}
    stats: dict[str, SampleStats] = {}
    with UnsealedShard(captured.path) as shard:
        columns = captured.samples
        for sample, first, count, token_ids in zip(
            columns["sample_id"].to_pylist(),
            columns["first_row"].to_pylist(),
            columns["n_tokens"].to_pylist(),
            columns["token_ids"],
            strict=True,
        ):
            if sample in excluded:
                continue
            result = check_sample_rows(
                shard.rows(first, count),
                shard.token_ids(first, count),
                torch.from_numpy(token_ids.values.to_numpy().copy()),
                layer_ids=job.layer_ids,
            )
            if isinstance(result, RowFailure):
                excluded[sample] = Excluded(sample_id=sample, reason=result.reason, detail=result.detail)
            else:
                stats[sample] = result
    return stats, list(excluded.values())


def _seal(job: Job, captured: Captured, kept: list[dict[str, Any]]) -> SealedShard:
    # Only what every attempt at this shard would write: the digest must not depend on who wrote it or when.
    provenance = {
        "model": job.model.name,
        "fingerprint": job.plan.fingerprint,
        "shard": str(captured.shard),
        "norm_state": "pre",
        "n_layers": str(job.model.n_layers),
        "vllm": str(captured.engine.get("vllm", "")),
        "written_by": "coresample",
    }
    keep = [Segment(row["first_row"], row["n_tokens"]) for row in kept]
    return seal_shard(captured.path, keep=keep, metadata=provenance)


def _records(
    captured: Captured, kept: list[dict[str, Any]], sealed: SealedShard, stats: dict[str, SampleStats]
) -> list[SampleRecord]:
    return [
        SampleRecord(
            sample_id=row["sample_id"],
            n_tokens=row["n_tokens"],
            segments=[
                SegmentRecord(
                    shard=sealed.sha256,
                    first_row=segment.first_row,
                    rows=segment.rows,
                    byte_offset=segment.byte_offset,
                    byte_length=segment.byte_length,
                    xxh3=segment.xxh3,
                )
            ],
            greedy_token=captured.done.greedy.get(row["sample_id"]),
            top1_token=captured.done.top1.get(row["sample_id"]),
            norm_mean=stats[row["sample_id"]].norm_mean,
            norm_max=stats[row["sample_id"]].norm_max,
        )
        for row, segment in zip(kept, sealed.segments, strict=True)
    ]


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
    planned = {index: table["sample_id"].to_pylist() for index, table in enumerate(job.plan.shards())}
    missing = sorted(set(planned) - set(commits))
    if missing:
        raise CheckFailedError(
            f"{len(missing)} of {len(planned)} shards have no commit record (first {missing[0]}); run the job again, "
            "it goes on from the commit records"
        )
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
            f"{layout.quarantine_dir(job.plan.fingerprint)}; mend them, or lower completeness"
        )
    report = check_run(commits, planned, accounting, layer_ids=job.layer_ids, settings=job.settings.checks)
    if not report.passed:
        lines = [
            f"  {result.name}: {result.detail} (value {result.value}, threshold {result.threshold})"
            for result in report.failures
        ]
        raise CheckFailedError("the extracted rows fail these checks, nothing is published:\n" + "\n".join(lines))
    return report


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
