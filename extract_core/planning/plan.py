"""The plan: every sample, its shard and its first row, fixed before the model runs.

``planning.making`` lays out a plan; here is what a plan is, and how one is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from extract_core.errors import CorruptDataError
from extract_core.planning.model import canonical_digest
from extract_core.store import layout
from extract_core.store.records import Digest, ShardSource
from extract_core.store.root import Root
from extract_core.store.shard import HEADER_BYTES

CHECKSUM = "checksum"
_MOST_META = 2**30

_REMEDY = "run the job with --repair: it is planned again, and commit records beside it stay good"

PLAN_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("shard", pa.int32()),
        ("first_row", pa.int64()),
        ("n_tokens", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("source_file", pa.string()),
        ("source_row", pa.int64()),
        ("source_turn", pa.int32()),
        ("split", pa.string()),
        ("mask_method", pa.string()),
        ("truncated", pa.bool_()),
    ]
)


class PlannedShard(BaseModel):
    """One shard of the layout; ``rows`` token positions of ``samples`` samples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    rows: int
    samples: int
    source: ShardSource | None = None
    """The stored shard that holds these samples already; the run refers to it instead of extracting them."""


class PlanMeta(BaseModel):
    """What is known about a plan without reading its samples (``plan.json``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 3
    """2 added a checksum to the file, 3 the sources of shards and ``base``."""
    fingerprint: str
    spec: dict[str, Any]
    plan_sha256: Digest
    row_bytes: int
    shards: list[PlannedShard]
    input: int
    samples: int
    tokens: int
    supervised_tokens: int
    truncated: int
    duplicates: int
    dropped: dict[str, int]
    malformed: int
    mask_methods: dict[str, int]
    length_histogram: dict[str, int]
    longest: int
    base: str = ""
    """Digest of the commit records that were there to be reused (``planning.base``); empty: none."""

    @property
    def bytes(self) -> int:
        """Bytes of the shard files the plan will store: rows, token ids, headers; none for what it refers to."""
        own = [shard.rows for shard in self.shards if shard.source is None]
        return sum(own) * (self.row_bytes + 4) + len(own) * HEADER_BYTES


class Plan:
    """A plan that exists under a root, with access to the samples of one shard at a time."""

    def __init__(self, root: Root, meta: PlanMeta, table: pq.ParquetFile):
        self.root, self.meta, self._table = root, meta, table

    @property
    def fingerprint(self) -> str:
        """Names the plan under ``plans/``."""
        return self.meta.fingerprint

    def shard(self, index: int) -> pa.Table:
        """The samples of one shard, by first row (schema ``PLAN_SCHEMA``).

        Raises:
            CorruptDataError: the layout's file holds no such rows, though its digest is that of ``plan.json``.
        """
        return self._read(index, None)

    def sample_ids(self) -> dict[int, list[str]]:
        """The ids of every shard's samples; reads nothing else of the plan."""
        return {
            shard.index: self._read(shard.index, ["sample_id"])["sample_id"].to_pylist() for shard in self.meta.shards
        }

    def _read(self, index: int, columns: list[str] | None) -> pa.Table:
        where = f"{self.root.url}/{layout.plan_path(self.fingerprint, self.meta.plan_sha256)}"
        try:
            if not 0 <= index < self._table.num_row_groups:
                raise ValueError(f"it has {self._table.num_row_groups} row groups")
            table = self._table.read_row_group(index, columns=columns)
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptDataError(f"{where}: shard {index} cannot be read ({error}); {_REMEDY}") from error
        return table

    def shards(self) -> Iterator[pa.Table]:
        """Every shard's samples, one shard in memory at a time."""
        for shard in self.meta.shards:
            yield self.shard(shard.index)


def load_plan(root: Root, fingerprint: str) -> Plan | None:
    """The plan of this fingerprint, or None if the root has none.

    Raises:
        CorruptDataError: ``plan.json`` or ``plan.parquet`` is not what was written.
    """
    meta = read_plan_meta(root, fingerprint)
    return None if meta is None else Plan(root, meta, _open_table(root, meta))


def read_plan_meta(root: Root, fingerprint: str) -> PlanMeta | None:
    """``plan.json`` of a fingerprint, or None where there is none.

    Raises:
        CorruptDataError: it is not what was written.
    """
    try:
        name = layout.plan_meta_path(fingerprint)
        raw = root.read_bytes(name, most=_MOST_META)
    except (ValueError, FileNotFoundError):  # a folder that is no plan's, or a plan that was never finished
        return None
    try:
        tree = json.loads(raw)
        checksum = tree.pop(CHECKSUM, None) if isinstance(tree, dict) else None
        meta = PlanMeta.model_validate_json(json.dumps(tree))
    except (ValidationError, ValueError, RecursionError) as error:
        raise CorruptDataError(f"{root.url}/{name} is not a plan this version can read: {error}; {_REMEDY}") from error
    if meta.fingerprint != fingerprint or (checksum is not None and checksum != canonical_digest(tree)):
        raise CorruptDataError(
            f"{root.url}/{name} does not match its own checksum or folder; it was altered after writing; {_REMEDY}"
        )
    return meta


def _open_table(root: Root, meta: PlanMeta) -> pq.ParquetFile:
    file = sound_layout(root, meta)
    try:
        table = pq.ParquetFile(file)
        if not table.schema_arrow.equals(PLAN_SCHEMA):
            raise ValueError(f"columns {table.schema_arrow.names}")
    except (pa.ArrowException, OSError, ValueError) as error:
        name = layout.plan_path(meta.fingerprint, meta.plan_sha256)
        raise CorruptDataError(f"{root.url}/{name} is not the layout of a plan ({error}); {_REMEDY}") from error
    return table


def sound_layout(root: Root, meta: PlanMeta) -> Path | pa.BufferReader:
    """The layout's file, or its bytes on a remote root, after checking its digest.

    Raises:
        CorruptDataError: it is missing, or differs from what ``plan.json`` says.
    """
    name = layout.plan_path(meta.fingerprint, meta.plan_sha256)
    local = root.local_path(name)
    try:
        data = root.read_bytes(name) if local is None else None
        digest = file_digest(local) if local is not None else hashlib.sha256(data or b"").hexdigest()
    except FileNotFoundError:
        raise CorruptDataError(f"{root.url}/{name}, which plan.json names, is missing; {_REMEDY}") from None
    if digest != meta.plan_sha256:
        raise CorruptDataError(f"{root.url}/{name}: sha256 {digest}, plan.json says {meta.plan_sha256}; {_REMEDY}")
    return local if local is not None else pa.BufferReader(data)


def file_digest(path: Path) -> str:
    """sha256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
