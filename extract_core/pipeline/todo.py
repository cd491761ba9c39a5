"""What a run has to do: shards to extract, lost ones to make again, quarantined samples to try again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from extract_core.errors import CorruptDataError
from extract_core.job import Job
from extract_core.pipeline.adopt import origin, with_adopted
from extract_core.planning.plan import lay_out_again
from extract_core.progress import reporter
from extract_core.store import layout
from extract_core.store.commits import DamagedRecord, ShardCommits, all_records, read_commits
from extract_core.store.index import read_index
from extract_core.store.objects import damaged_objects, lost_by_commits
from extract_core.store.records import CommitRecord, Excluded, Manifest
from extract_core.store.versions import latest_version, read_manifest


@dataclass(frozen=True)
class ShardTask:
    """Samples of one planned shard that become one shard file and one commit record.

    Args:
        shard: index in the plan.
        rows: of its file; samples may share them.
        round: 0, or the number of the retry.
        samples: ids in any order; None for the whole planned shard.
        earlier: what earlier rounds say of the samples, where they are tried again.
        carried: samples that the record names as excluded without trying them.
        replaces: attempts, or sha256 of damaged records, that the new record may replace; see ``write_commit``.
        lost: the shard file that is lost or damaged.
        restores: path and bytes of the object that must be there afterwards, where a record stands already.
    """

    shard: int
    rows: int
    round: int = 0
    samples: tuple[str, ...] | None = None
    earlier: tuple[Excluded, ...] = ()
    carried: tuple[Excluded, ...] = ()
    replaces: frozenset[str] = frozenset()
    lost: str | None = None
    restores: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        """For people: ``00012``, ``00012.r1``."""
        return f"{self.shard:05d}{f'.r{self.round}' if self.round else ''}"

    @property
    def known_killers(self) -> list[str]:
        """Samples that killed an engine before: they run alone, and one more death is enough."""
        return [item.sample_id for item in self.earlier if item.reason == "kills_engine"]

    def table(self, job: Job) -> pa.Table:
        """The samples (schema ``PLAN_SCHEMA``), with segments in this task's own file."""
        if self.samples is None:
            return job.plan.shard(self.shard)
        return lay_out_again(_part(job, self.shard, self.samples), share=job.plan.shares)[0]


def _part(job: Job, shard: int, samples: Collection[str]) -> pa.Table:
    planned, wanted = job.plan.shard(shard), set(samples)
    return planned.filter(pa.array([sample in wanted for sample in planned["sample_id"].to_pylist()], pa.bool_()))


def _rows(job: Job, shard: int, samples: Collection[str]) -> int:
    """Rows of a file that holds some samples of a planned shard."""
    part = _part(job, shard, samples)
    if not part.num_rows or not job.plan.shares:
        return sum(part["n_tokens"].to_pylist())
    return lay_out_again(part, share=True)[1]


@dataclass(frozen=True)
class Damage:
    """What a repair found. ``version`` is the latest one, if its manifest or index is damaged."""

    objects: dict[str, str] = field(default_factory=dict)
    records: tuple[DamagedRecord, ...] = ()
    version: int | None = None
    repair: bool = False


SOUND = Damage()


@dataclass(frozen=True)
class Work:
    """What there is to do. ``existing`` is the published version of this plan, if it is whole.

    ``origin`` says how much of what the plan has is its own and how much it refers to (``pipeline.adopt.origin``).
    """

    tasks: list[ShardTask]
    existing: Manifest | None = None
    publish: bool = True
    origin: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def nothing(self) -> bool:
        """Whether the existing version is all there is to have."""
        return self.existing is not None and not self.tasks and not self.publish


def outstanding(job: Job, damage: Damage = SOUND, *, adopt: bool = False) -> Work:
    """What a run has to do; reads commit records only where something may be left.

    Args:
        job: the job.
        damage: what a repair found.
        adopt: write commit records for shards that earlier plans stored; otherwise they only do not count as open.

    Raises:
        CorruptDataError: a record is damaged and the run is no repair.
    """
    existing = None if damage.version is not None else job.published()
    if existing is not None and (damage.records or damage.objects.keys() & existing.objects.keys()):
        existing = None
    if existing is not None and not sum(existing.accounting.quarantined.values()):
        made = existing.provenance
        return Work([], existing, publish=False, origin={k: made[k] for k in ("reused", "extracted") if k in made})
    tasks, commits = _open(job, damage, adopt)
    known = origin(commits.values())
    if existing is None:
        return Work(tasks, origin=known)
    return Work(tasks, existing, publish=not is_current(existing, commits), origin=known)


def settled(job: Job, work: Work) -> Manifest | None:
    """The existing version, where everything that was done added nothing to it."""
    if work.existing is None or not is_current(work.existing, read_commits(job.root, job.plan.fingerprint)):
        return None
    tell_quarantine(work.existing)
    return work.existing


def tell_quarantine(manifest: Manifest) -> None:
    """A line for the user where a version lacks samples that could not be extracted."""
    count = sum(manifest.accounting.quarantined.values())
    if count:
        words = f"{count:,} samples stay" if count > 1 else "1 sample stays"
        reporter().note(f"{words} quarantined; version {manifest.version} is the same without")


def is_current(manifest: Manifest, commits: Mapping[int, ShardCommits]) -> bool:
    """Whether a version names exactly the shards that hold the samples of the commit records."""
    ours = {record.sha256 for shard in commits.values() for record in shard.stored}
    return {shard.sha256 for shard in manifest.shards} == ours


def open_shards(job: Job, damage: Damage = SOUND, *, adopt: bool = False) -> list[ShardTask]:
    """Shards of the plan to extract, in the order to do it: without a commit record, whose file is lost, to retry.

    A lost file is made again from the samples that it held; where the engine computes the same bits, it is the same
    file under the same name, and the version is whole again. A lost final norm comes back with any shard. Quarantined
    samples come last, since they may take the engine with them. What earlier plans stored is not open; ``adopt`` writes
    the commit records that refer to it.

    Raises:
        CorruptDataError: a commit record is damaged and this is no repair.
    """
    return _open(job, damage, adopt)[0]


def _open(job: Job, damage: Damage, adopt: bool) -> tuple[list[ShardTask], dict[int, ShardCommits]]:
    """Open shards, and the commit records that there are or would be once what is stored already is referred to."""
    damaged: list[DamagedRecord] | None = [] if damage.repair else None
    commits = read_commits(job.root, job.plan.fingerprint, damaged=damaged)
    unreadable = {(item.shard, item.round): item.sha256 for item in damaged or ()}
    first = {shard: sha for (shard, round), sha in unreadable.items() if not round}
    commits = with_adopted(job, commits, write=adopt, unusable=damage.objects, replaces=first)
    named = {path for shard in commits.values() for path in shard.objects}
    lost = {**lost_by_commits(job.root, commits), **{p: t for p, t in damage.objects.items() if p in named}}
    tasks: list[ShardTask] = []
    retries: list[ShardTask] = []
    for planned in job.plan.meta.shards:
        shard, known = planned.index, commits.get(planned.index, ShardCommits(()))
        if not known.complete:
            replaces = frozenset(sha for key, sha in unreadable.items() if key == (shard, 0))
            others = {s.sample_id for s in known.samples} | {item.sample_id for item in known.excluded}
            whole = ShardTask(shard, planned.rows, replaces=replaces)
            tasks.append(_rest(job, shard, others, replaces) if others else whole)
        tasks += [_again(job, shard, record) for record in known.stored if record.object in lost]
        late = {round: sha for (number, round), sha in unreadable.items() if number == shard and round}
        for round, sha in sorted(late.items()):
            # Whatever this round held is excluded by what is left; one round takes it all, the others become empty.
            held = known.excluded if round == min(late) else []
            retries.append(_retry(job, shard, round, held, frozenset({sha})))
        left = known.to_retry(job.settings.quarantine_runs)
        if left and known.complete and not late:
            retries.append(_retry(job, shard, known.next_round, left))
    if not tasks:
        tasks += _for_norms(job, commits, lost)
    return tasks + retries, commits


def _again(job: Job, shard: int, record: CommitRecord) -> ShardTask:
    samples = tuple(sample.sample_id for sample in record.samples)
    return ShardTask(
        shard,
        _rows(job, shard, samples),
        record.round,
        samples,
        carried=tuple(record.excluded),
        replaces=frozenset({record.attempt}),
        lost=record.object,
        restores=None if record.object is None else (record.object, record.nbytes),
    )


def _rest(job: Job, shard: int, others: set[str], replaces: frozenset[str]) -> ShardTask:
    samples = tuple(sample for sample in _ids(job, shard) if sample not in others)
    return ShardTask(shard, _rows(job, shard, samples), 0, samples, replaces=replaces)


def _retry(
    job: Job, shard: int, round: int, items: Iterable[Excluded], replaces: frozenset[str] = frozenset()
) -> ShardTask:
    earlier = tuple(items)
    there = set(_ids(job, shard))
    samples = tuple(item.sample_id for item in earlier if item.sample_id in there)
    return ShardTask(shard, _rows(job, shard, samples), round, samples, earlier, replaces=replaces)


def _ids(job: Job, shard: int) -> list[str]:
    return [str(name) for name in job.plan.shard(shard)["sample_id"].to_pylist()]


def _for_norms(job: Job, commits: dict[int, ShardCommits], lost: dict[str, str]) -> list[ShardTask]:
    """One shard for each lost norm: its engine has the norm; the shard's own record stays."""
    tasks: dict[str, ShardTask] = {}
    for record in all_records(commits):
        norm = record.final_norm
        if record.object is not None and norm is not None and norm.path in lost and norm.path not in tasks:
            again = _again(job, record.shard, record)
            tasks[norm.path] = replace(again, replaces=frozenset(), restores=(norm.path, norm.nbytes))
    return list(tasks.values())


def _to_refer_to(job: Job, commits: Mapping[int, ShardCommits]) -> set[str]:
    """Files of earlier plans that open shards are about to refer to."""
    return {
        layout.shard_path(shard.source.sha256)
        for shard in job.plan.meta.shards
        if shard.source is not None and shard.index not in commits
    }


def find_damage(job: Job) -> Damage:
    """Read every object that the plan's records and the latest version name, and hold it against its digest."""
    root, progress = job.root, reporter()
    records: list[DamagedRecord] = []
    commits = read_commits(root, job.plan.fingerprint, damaged=records)
    expected = {path: size for shard in commits.values() for path, size in shard.objects.items()}
    version = latest_version(root)
    bad_version: int | None = None
    foreign: dict[str, int] = {}
    if version is not None:
        try:
            manifest = read_manifest(root, version)
            if manifest.fingerprint == job.plan.fingerprint:
                expected |= manifest.objects
            else:
                foreign = {path: size for path, size in manifest.objects.items() if path not in expected}
                for path in foreign.keys() & _to_refer_to(job, commits):
                    expected[path] = foreign.pop(path)
            read_index(root, manifest)
        except CorruptDataError as error:
            progress.note(str(error))
            bad_version = version
    progress.stage("Verifying", total=sum(expected.values()) + sum(foreign.values()), unit="bytes")
    objects = damaged_objects(root, expected | foreign, on_progress=progress.advance)
    for path, what in objects.items():
        remedy = f"it is of version {version}, which another job made: repair that" if path in foreign else "made again"
        progress.note(f"{root.describe(path)} {what}; {remedy}")
    objects = {path: what for path, what in objects.items() if path not in foreign}
    for item in records:
        progress.note(f"{item.error}")
    if not objects and not records and bad_version is None:
        progress.note("every object is whole; there is nothing to repair")
    return Damage(objects, tuple(records), bad_version, repair=True)
