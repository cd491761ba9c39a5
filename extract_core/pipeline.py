"""The steps of a run, each one call: capture a shard, commit it, check everything, publish.

Flows and the plain loop in ``local.py`` order these calls; nothing here knows who calls. Every step is safe to repeat:
a shard with a commit record is never extracted again, a published plan is never published twice.
"""

from __future__ import annotations

import json
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
from extract_core.engine.preflight import preflight as run_preflight
from extract_core.engine.protocol import JobSample, ShardDone, ShardJob
from extract_core.engine.supervisor import KILLS_TO_QUARANTINE, EngineSupervisor
from extract_core.errors import (
    CaptureError,
    CheckFailedError,
    CorruptDataError,
    EngineCrashedError,
    EngineError,
    IncompleteError,
    StoreError,
)
from extract_core.job import Job, new_attempt
from extract_core.progress import reporter
from extract_core.spool import RunFolder
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

CAPTURE_FAULTS = frozenset({"shape", "row_count", "token_echo", "zero_row", "identical_rows"})
"""Row failures that no sample can cause by itself: they stop the run instead of shrinking the dataset."""
MOST_FAILED, MOST_FAILED_SHARE = 4, 0.05
"""Samples of a shard that may fail their row checks before it is the machine's fault."""


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
    stored: bool = False
    """The sealed file is in the store and durable."""


def make_supervisor(job: Job, folder: RunFolder) -> EngineSupervisor:
    """The engine of a job; it starts at the first shard."""
    engine = job.settings.engine
    return EngineSupervisor(
        job.engine_spec,
        folder.logs,
        start_timeout_s=engine.start_timeout_s,
        step_timeout_s=engine.step_timeout_s,
        on_stage=lambda stage: reporter().note(f"engine: {stage}"),
    )


def open_shards(job: Job) -> list[int]:
    """Shards of the plan that have no commit record yet."""
    done = {layout.commit_shard(name) for name in job.root.list(layout.commits_dir(job.plan.fingerprint))}
    return [shard.index for shard in job.plan.meta.shards if shard.index not in done]


def capture_shard(
    job: Job,
    engine: EngineSupervisor,
    folder: RunFolder,
    shard: int,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Captured:
    """Run one shard through the engine, leaving out samples that kill it.

    An engine that dies is replaced here: the samples it held run alone, so that the one that kills it is known the
    second time, and the others go on.

    Args:
        job: the job.
        engine: its engine.
        folder: this run's part of the spool.
        shard: index in the plan.
        on_tokens: called with the tokens of this shard computed so far.

    Raises:
        EngineCrashedError: the engine died and no sample could be blamed (trying again may help), or so many were to
            blame that it is not the samples.
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
    excluded: dict[str, Excluded] = {}
    while True:
        attempt = new_attempt()
        path = folder.shard(shard, attempt)
        request = ShardJob(
            attempt=attempt,
            path=str(path),
            rows=job.plan.meta.shards[shard].rows,
            samples=[s for s in samples if s.sample_id not in excluded],
            solo=engine.suspects(),
            want_top1=job.captures_last,
        )
        suspected = set(engine.suspects())
        try:
            done = engine.extract(request, lambda progress: on_tokens(progress.tokens))
        except EngineCrashedError as error:
            path.unlink(missing_ok=True)
            killers = [sample for sample in engine.killers() if sample not in excluded]
            if not killers and not set(engine.suspects()) - suspected:
                raise
            excluded.update((sample, _killer(sample, error)) for sample in killers)
            engine.blamed += len(killers)
            if engine.blamed > most_killers(job):
                raise EngineError(
                    f"the engine was killed by {engine.blamed} different samples, more than this job may lose; it is "
                    f"rather the engine or the machine. Last: {error}",
                    engine_traceback=error.engine_traceback,
                    log_tail=error.log_tail,
                ) from error
            reporter().note(f"shard {shard}: {error}; replacing the engine")
            continue
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        break
    for sample, why in done.refused.items():
        reason, _, detail = why.partition(": ")
        excluded[sample] = Excluded(sample_id=sample, reason=reason, detail=detail)
    info = {**engine.info, "preflight": engine.preflight}
    return Captured(shard, attempt, path, table, done, list(excluded.values()), info)


def _killer(sample: str, error: EngineCrashedError) -> Excluded:
    return Excluded(
        sample_id=sample,
        reason="kills_engine",
        detail=f"the engine died {KILLS_TO_QUARANTINE} times with it in flight; last: {error}",
        attempts=KILLS_TO_QUARANTINE,
    )


def most_killers(job: Job) -> int:
    """Samples that may be blamed for the engine's deaths in one run, before the engine itself is."""
    return max(4, int((1 - job.settings.completeness) * job.plan.meta.input))


def preflight(job: Job, engine: EngineSupervisor, folder: RunFolder) -> dict[str, Any]:
    """Self-test of the engine on the first real samples; its figures go into every commit record.

    Raises:
        PreflightError, EngineError: nothing is extracted.
    """
    engine.preflight = run_preflight(
        engine,
        [ids.values.to_numpy() for ids in job.plan.shard(0)["token_ids"]],
        layer_ids=job.layer_ids,
        compute_dtype=job.model.dtype,
        folder=folder.path,
        want_top1=job.captures_last,
    )
    return engine.preflight


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
    if record.object is not None and not captured.stored:
        job.root.put_file(captured.path, record.object)
        captured.stored = True
    standing = write_commit(job.root, record)
    for item in standing.excluded:
        job.root.put_bytes(
            layout.quarantine_path(job.plan.fingerprint, item.sample_id),
            canonical_json(item.model_dump(mode="json") | {"shard": captured.shard}),
        )
    if record.object is not None and standing.object != record.object:
        try:  # another worker's record stands and names other bytes
            job.root.delete(record.object)
        except StoreError as error:
            reporter().note(f"{record.object} is not needed but could not be deleted: {error}")
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
                if result.reason in CAPTURE_FAULTS:
                    raise CaptureError(
                        f"shard {captured.shard}, sample {sample}: {result.reason}: {result.detail}. Such rows "
                        "come from the capture, not from the sample; nothing of this shard is kept"
                    )
                excluded[sample] = Excluded(sample_id=sample, reason=result.reason, detail=result.detail)
            else:
                stats[sample] = result
    failed = len(excluded) - len(captured.excluded)
    if failed > max(MOST_FAILED, MOST_FAILED_SHARE * len(columns)):
        reasons = Counter(item.reason for item in excluded.values())
        raise CaptureError(
            f"shard {captured.shard}: {failed} of {len(columns)} samples fail their row checks ({dict(reasons)}); so "
            "many are not the samples' fault. Nothing of this shard is kept; check the machine, the dtype "
            "(model.dtype) and the model"
        )
    return stats, list(excluded.values())


def _seal(job: Job, captured: Captured, kept: list[dict[str, Any]]) -> SealedShard:
    # Only what every attempt at this shard would write: the digest must not depend on who wrote it or when.
    provenance = {
        "architecture": job.model.architecture,
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
    """Every shard that a commit record names is there and has its size; its bytes are for ``verify``."""
    for shard, commit in sorted(commits.items()):
        if commit.object is None:
            continue
        try:
            size = job.root.size(commit.object)
        except FileNotFoundError:
            size = -1
        if size != commit.nbytes:
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise CorruptDataError(
                f"{job.root.url}/{commit.object} {found}, its commit record says {commit.nbytes} bytes; delete "
                f"{layout.commit_path(job.plan.fingerprint, shard)} and run the job again to extract that shard anew"
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
