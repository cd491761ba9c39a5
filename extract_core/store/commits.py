"""Commit records: one per shard of a plan and round, created exclusively. Resume and status read nothing else.

Round 0 is the shard as planned. Where samples of it were left out (quarantined), a later run tries them again and
writes a further record, ``00012.r1.json``, with a small shard file of its own; what is there already never changes.
Only the record of a shard that is lost or damaged is ever removed, and only once its replacement is stored.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from extract_core.errors import AlreadyExistsError, CorruptDataError, StoreUnavailableError
from extract_core.store import layout
from extract_core.store.records import CommitRecord, Excluded, FinalNormRef, SampleRecord
from extract_core.store.root import MAX_RECORD_BYTES, Root

_REMOTE_READERS = 8
_REPLACE_TRIES = 4
_NOT_FOUND_WAITS_S = (0.05, 0.2)
_REMEMBERED_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ShardCommits:
    """All commit records of one shard, by round.

    A sample counts in the first round that holds it; it is excluded while no round does.
    """

    records: tuple[CommitRecord, ...]

    @property
    def complete(self) -> bool:
        """Whether the first round is there; without it most of the shard's samples are missing."""
        return bool(self.records) and self.records[0].round == 0

    @cached_property
    def by_record(self) -> list[tuple[CommitRecord, list[SampleRecord]]]:
        """Records that hold samples which no earlier one holds, with these samples."""
        seen: set[str] = set()
        found = []
        for record in self.records:
            own = [sample for sample in record.samples if sample.sample_id not in seen]
            seen.update(sample.sample_id for sample in own)
            if own:
                found.append((record, own))
        return found

    @cached_property
    def samples(self) -> list[SampleRecord]:
        """Every extracted sample, once."""
        return [sample for _, own in self.by_record for sample in own]

    @cached_property
    def excluded(self) -> list[Excluded]:
        """Samples that no round holds, as the last round that tried them says."""
        held = {sample.sample_id for sample in self.samples}
        return list(
            {
                item.sample_id: item
                for record in self.records
                for item in record.excluded
                if item.sample_id not in held
            }.values()
        )

    @property
    def stored(self) -> list[CommitRecord]:
        """The records whose shard files hold the samples."""
        return [record for record, _ in self.by_record]

    @property
    def objects(self) -> dict[str, int]:
        """Objects that the samples need: path to size in bytes."""
        return {path: size for record in self.stored or self.records for path, size in record.objects.items()}

    @property
    def rows(self) -> int:
        """Rows of all shard files."""
        return sum(record.rows for record in self.stored)

    @property
    def nbytes(self) -> int:
        """Bytes of all shard files."""
        return sum(record.nbytes for record in self.stored)

    @property
    def timings(self) -> dict[str, float]:
        """Sums over the rounds."""
        total: Counter[str] = Counter()
        for record in self.records:
            total.update(record.timings)
        return dict(total)

    @property
    def final_norm(self) -> FinalNormRef | None:
        """What the first record that tells says."""
        return next((norm for record in self.records if (norm := record.final_norm) is not None), None)

    @property
    def next_round(self) -> int:
        """Number of the next retry."""
        return self.records[-1].round + 1 if self.records else 0

    def to_retry(self, runs: int) -> list[Excluded]:
        """Excluded samples that fewer than ``runs`` rounds have tried."""
        tried = Counter(item.sample_id for record in self.records for item in record.excluded)
        return [item for item in self.excluded if tried[item.sample_id] < runs]


@dataclass(frozen=True)
class DamagedRecord:
    """A commit record that cannot be read; ``sha256`` of its bytes."""

    path: str
    shard: int
    round: int
    sha256: str
    error: CorruptDataError


def write_commit(root: Root, record: CommitRecord, *, replaces: Collection[str] = ()) -> CommitRecord:
    """Commit a shard whose bytes are durable already; the first attempt to arrive wins.

    Args:
        root: the dataset root.
        record: what to write.
        replaces: attempts (or sha256 of the bytes, where a record cannot be read) whose shards are lost: such a record
            is removed if it stands in the way and names another object or final norm. Between removal and creation a
            kill leaves the shard without a record, and the next run extracts it again.

    Returns:
        the record that stands: ``record`` itself, also when an earlier try of this attempt had got through, or that of
        another attempt (compare ``attempt``), in which case the caller discards its own shard.

    Raises:
        CorruptDataError: the record that is there cannot be read.
        StoreUnavailableError: other runs replace it at the same time.
        StoreError: the record could not be written.
    """
    rel = layout.commit_path(record.fingerprint, record.shard, record.round)
    for _ in range(_REPLACE_TRIES):
        try:
            root.create_exclusive(rel, record.dump())
        except AlreadyExistsError as error:
            existing = error.existing
        else:
            return record
        if hashlib.sha256(existing).hexdigest() not in replaces:
            standing = _load(root, rel, existing, record.fingerprint, record.shard, record.round)
            same = (standing.object, _norm(standing)) == (record.object, _norm(record))
            if standing.attempt not in replaces or same:
                return standing
        root.delete(rel)
    raise StoreUnavailableError(f"{root.describe(rel)} is replaced by other runs at the same time; try again later")


def _norm(record: CommitRecord) -> tuple[object, ...] | None:
    return None if record.final_norm is None else record.final_norm.identity


def read_commits(
    root: Root, fingerprint: str, *, damaged: list[DamagedRecord] | None = None
) -> dict[int, ShardCommits]:
    """All commit records of a plan by shard number; empty when there are none.

    Args:
        root: the dataset root.
        fingerprint: the plan's.
        damaged: takes the damaged records, which are then left out instead of raised.

    Raises:
        CorruptDataError: a record is damaged or belongs to another plan, shard or round.
    """
    folder = layout.commits_dir(fingerprint)
    found = sorted(key for name in root.list(folder) if (key := layout.commit_shard(name)) is not None)

    def read(key: tuple[int, int]) -> CommitRecord | DamagedRecord | None:
        rel = layout.commit_path(fingerprint, *key)
        data = _read_listed(root, rel)
        if data is None:
            return None
        try:
            return _load(root, rel, data, fingerprint, *key)
        except CorruptDataError as error:
            if damaged is None:
                raise
            return DamagedRecord(rel, *key, hashlib.sha256(data).hexdigest(), error)

    if root.is_local:
        items = list(map(read, found))
    else:
        with ThreadPoolExecutor(_REMOTE_READERS) as pool:
            items = list(pool.map(read, found))
    records: dict[int, list[CommitRecord]] = {}
    for item in items:
        if isinstance(item, CommitRecord):
            records.setdefault(item.shard, []).append(item)
        elif item is not None and damaged is not None:
            damaged.append(item)
    return {shard: ShardCommits(tuple(rounds)) for shard, rounds in records.items()}


def read_commit(root: Root, fingerprint: str, shard: int, round: int = 0) -> CommitRecord | None:
    """One commit record; None where there is none.

    Raises:
        CorruptDataError: it is damaged or belongs to another plan, shard or round.
    """
    rel = layout.commit_path(fingerprint, shard, round)
    try:
        data = root.read_bytes(rel, most=MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    return _load(root, rel, data, fingerprint, shard, round)


def _read_listed(root: Root, rel: str) -> bytes | None:
    """A record that was listed a moment ago; None where it stays away, since it is being replaced.

    A store may list an object before it answers for it everywhere, so the first "not found" is not believed.
    """
    for wait_s in (*_NOT_FOUND_WAITS_S, None):
        try:
            return root.read_bytes(rel, most=MAX_RECORD_BYTES)
        except FileNotFoundError:
            if wait_s is None:
                break
            time.sleep(wait_s)
    return None


class _Parsed:
    """The records that were read last, by the sha256 of their bytes.

    A run reads each record several times and takes its bytes from the store every time; only checking and parsing the
    same bytes again is left out.
    """

    def __init__(self, most_bytes: int):
        self._most, self._held = most_bytes, 0
        self._records: OrderedDict[bytes, tuple[CommitRecord, int]] = OrderedDict()
        self._lock = threading.Lock()

    def record(self, data: bytes, where: str) -> CommitRecord:
        """See ``CommitRecord.load``."""
        key = hashlib.sha256(data).digest()
        with self._lock:
            if key in self._records:
                self._records.move_to_end(key)
                return self._records[key][0]
        record = CommitRecord.load(data, where)
        with self._lock:
            if key not in self._records:
                self._records[key] = record, len(data)
                self._held += len(data)
            while self._held > self._most:
                self._held -= self._records.popitem(last=False)[1][1]
        return record


_parsed = _Parsed(_REMEMBERED_BYTES)


def all_records(commits: Mapping[int, ShardCommits]) -> Iterable[CommitRecord]:
    """Every record, by shard and round."""
    return (record for _, shard in sorted(commits.items()) for record in shard.records)


def state_of(commits: Mapping[int, ShardCommits]) -> str:
    """A digest that changes with any record: what was checked is what is published."""
    keys = [f"{record.shard} {record.round} {record.attempt}" for record in all_records(commits)]
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def _load(root: Root, rel: str, data: bytes, fingerprint: str, shard: int, round: int) -> CommitRecord:
    where = root.describe(rel)
    remedy = "run the job with --repair: only this shard is extracted anew"
    try:
        record = _parsed.record(data, where)
    except CorruptDataError as error:
        if "install a newer" in str(error):  # not damaged
            raise
        raise CorruptDataError(f"{error}; {remedy}") from error
    if (record.fingerprint, record.shard, record.round) != (fingerprint, shard, round):
        raise CorruptDataError(
            f"commit record {where} is of plan {record.fingerprint} shard {record.shard} round {record.round}, "
            f"expected plan {fingerprint} shard {shard} round {round}; it was copied or renamed; {remedy}"
        )
    return record
