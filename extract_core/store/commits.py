"""Commit records: one per shard of a plan, created exclusively. Resume and status read nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from extract_core.errors import AlreadyExistsError, CorruptDataError
from extract_core.store import layout
from extract_core.store.records import CommitRecord
from extract_core.store.root import Root

_REMOTE_READERS = 8


def write_commit(root: Root, record: CommitRecord) -> CommitRecord:
    """Commit a shard whose bytes are durable already; the first attempt to arrive wins.

    Returns:
        the record that stands: ``record`` itself, also when an earlier try of this attempt had got through, or that of
        another attempt (compare ``attempt``), in which case the caller discards its own shard.

    Raises:
        CorruptDataError: the record that is there cannot be read.
        StoreError: the record could not be written.
    """
    rel = layout.commit_path(record.fingerprint, record.shard)
    try:
        root.create_exclusive(rel, record.dump())
    except AlreadyExistsError as error:
        return _load(root, rel, error.existing, record.fingerprint, record.shard)
    return record


def read_commits(
    root: Root, fingerprint: str, *, damaged: dict[int, CorruptDataError] | None = None
) -> dict[int, CommitRecord]:
    """All commit records of a plan by shard number; empty when there are none.

    Args:
        root: the dataset root.
        fingerprint: the plan's.
        damaged: takes the failures of damaged records, which are then left out instead of raised.

    Raises:
        CorruptDataError: a record is damaged or belongs to another plan or shard.
    """
    folder = layout.commits_dir(fingerprint)
    shards = [shard for name in root.list(folder) if (shard := layout.commit_shard(name)) is not None]

    def read(shard: int) -> CommitRecord | CorruptDataError:
        rel = layout.commit_path(fingerprint, shard)
        try:
            return _load(root, rel, root.read_bytes(rel), fingerprint, shard)
        except CorruptDataError as error:
            if damaged is None:
                raise
            return error

    shards.sort()
    if root.is_local:
        found = list(map(read, shards))
    else:
        with ThreadPoolExecutor(_REMOTE_READERS) as pool:
            found = list(pool.map(read, shards))
    records: dict[int, CommitRecord] = {}
    for shard, item in zip(shards, found, strict=True):
        if isinstance(item, CommitRecord):
            records[shard] = item
        elif damaged is not None:
            damaged[shard] = item
    return records


def _load(root: Root, rel: str, data: bytes, fingerprint: str, shard: int) -> CommitRecord:
    where = root.describe(rel)
    remedy = f"delete {where} and run the job again: only this shard is extracted anew"
    try:
        record = CommitRecord.load(data, where)
    except CorruptDataError as error:
        if "install a newer" in str(error):  # not damaged
            raise
        raise CorruptDataError(f"{error}; {remedy}") from error
    if (record.fingerprint, record.shard) != (fingerprint, shard):
        raise CorruptDataError(
            f"commit record {where} is of plan {record.fingerprint} shard {record.shard}, "
            f"expected plan {fingerprint} shard {shard}; it was copied or renamed; {remedy}"
        )
    return record
