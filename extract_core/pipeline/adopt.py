"""Shards of a plan whose rows an earlier plan has stored: a commit record refers to them, no engine is needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from extract_core.job import Job, new_attempt
from extract_core.planning.plan import PlannedShard
from extract_core.progress import reporter
from extract_core.store.commits import DamagedRecord, ShardCommits, read_commits, write_commit
from extract_core.store.objects import lost_objects
from extract_core.store.records import CommitRecord, SampleRecord, ShardSource

_NONE = ShardCommits(())


def with_adopted(
    job: Job,
    commits: Mapping[int, ShardCommits],
    *,
    write: bool,
    unusable: Collection[str] = (),
    replaces: Mapping[int, str] | None = None,
) -> dict[int, ShardCommits]:
    """The commit records of a plan, and those that open shards get from what earlier plans stored.

    A shard whose source is gone (its commit record, its file, or a sample of it) stays open and is extracted. Safe to
    repeat and to be killed anywhere: one record after the other is created, each complete by itself.

    Args:
        job: the job.
        commits: the records that are there.
        write: create the records; otherwise only say what they would be.
        unusable: objects that are damaged.
        replaces: sha256 of damaged first records by shard, which the new ones replace.

    Raises:
        StoreError: a record could not be read or written.
    """
    wanted = [s for s in job.plan.meta.shards if s.source is not None and not commits.get(s.index, _NONE).complete]
    if not wanted:
        return dict(commits)
    found = _adoptable(job, wanted, unusable)
    result = dict(commits)
    for shard, record in found.items():
        if write:
            damaged = (replaces or {}).get(shard)
            record = write_commit(job.root, record, replaces=() if damaged is None else {damaged})
        result[shard] = ShardCommits((record, *commits.get(shard, _NONE).records))
    if write:
        _tell(found.values(), len(wanted) - len(found))
    return result


def origin(commits: Iterable[ShardCommits]) -> dict[str, dict[str, Any]]:
    """How much a plan refers to and how much it extracted, by its commit records (for manifest and command line)."""
    counts = {name: {"samples": 0, "tokens": 0, "shards": 0} for name in ("reused", "extracted")}
    plans: set[str] = set()
    for shard in commits:
        for record, samples in shard.by_record:
            count = counts["extracted" if record.source is None else "reused"]
            count["samples"] += len(samples)
            count["tokens"] += sum(sample.n_tokens for sample in samples)
            count["shards"] += 1
            if record.source is not None:
                plans.add(record.source.fingerprint)
    return {"reused": {**counts["reused"], "fingerprints": sorted(plans)}, "extracted": counts["extracted"]}


def _adoptable(job: Job, wanted: list[PlannedShard], unusable: Collection[str]) -> dict[int, CommitRecord]:
    by_plan: dict[str, list[tuple[PlannedShard, ShardSource]]] = defaultdict(list)
    for planned in wanted:
        if planned.source is not None:
            by_plan[planned.source.fingerprint].append((planned, planned.source))
    ids = job.plan.sample_ids()
    shape = (job.layer_ids, job.model.hidden_size, job.dtype, job.encoding)
    found: dict[int, CommitRecord] = {}
    for fingerprint, shards in by_plan.items():
        damaged: list[DamagedRecord] = []  # their samples are extracted; the job of that plan repairs them
        stored = read_commits(job.root, fingerprint, damaged=damaged)
        records = {(r.shard, r.round): r for known in stored.values() for r in known.records if r.object is not None}
        usable = {key: r for _, s in shards if (r := records.get(key := (s.shard, s.round))) is not None}
        lost = lost_objects(job.root, {r.object or "": r.nbytes for r in usable.values()})
        for planned, source in shards:
            base = usable.get((source.shard, source.round))
            if base is None or base.sha256 != source.sha256 or base.object in lost or base.object in unusable:
                continue
            if (tuple(base.layer_ids), base.hidden_size, base.dtype, base.encoding) != shape:
                continue
            held = {sample.sample_id: sample for sample in base.samples}
            if all(name in held for name in ids[planned.index]):
                found[planned.index] = _record(job, planned.index, source, base, [held[n] for n in ids[planned.index]])
    return dict(sorted(found.items()))


def _record(job: Job, shard: int, source: ShardSource, base: CommitRecord, samples: list[SampleRecord]) -> CommitRecord:
    return CommitRecord(
        fingerprint=job.plan.fingerprint,
        shard=shard,
        object=base.object,
        sha256=base.sha256,
        nbytes=base.nbytes,
        rows=base.rows,
        layer_ids=base.layer_ids,
        hidden_size=base.hidden_size,
        dtype=base.dtype,
        encoding=base.encoding,
        samples=samples,
        excluded=[],
        attempt=new_attempt(),
        engine=base.engine,  # what made the rows; no timings, so that no second is counted twice
        source=source,
    )


def _tell(records: Collection[CommitRecord], gone: int) -> None:
    samples = sum(len(record.samples) for record in records)
    if samples:
        reporter().note(
            f"{samples:,} samples are stored already, in {len(records):,} shard files; they are referred to"
        )
    if gone:
        reporter().note(
            f"what {gone:,} shards were to refer to is gone or damaged since the job was planned; they are extracted"
        )
