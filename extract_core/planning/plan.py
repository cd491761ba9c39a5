"""The plan: every sample, its shard and its rows there, fixed before the model runs.

``planning.making`` lays out a plan; here is what a plan is, and how one is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from extract_core.errors import CorruptDataError
from extract_core.planning.fingerprint import JobSpec
from extract_core.planning.model import canonical_digest
from extract_core.planning.prefixes import Ints, Run, lay_out
from extract_core.store import layout
from extract_core.store.records import Digest, ShardSource
from extract_core.store.root import Root
from extract_core.store.shard import HEADER_BYTES

CHECKSUM = "checksum"
_MOST_META = 2**30

_REMEDY = "run the job with --repair: it is planned again, and commit records beside it stay good"

SEGMENTS_TYPE = pa.list_(pa.struct([("first_row", pa.int64()), ("rows", pa.int64())]))
"""Rows of a sample in the shard file before it is sealed, in the order of its positions (``planning.prefixes``)."""

PLAN_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("shard", pa.int32()),
        ("segments", SEGMENTS_TYPE),
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


_FIRST_ROW = pa.field("first_row", pa.int64())
_OLDER_SCHEMA = pa.schema([_FIRST_ROW if field.name == "segments" else field for field in PLAN_SCHEMA])


class PlannedShard(BaseModel):
    """One shard of the layout; ``rows`` are stored for ``samples`` samples, which may share them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    rows: int
    samples: int
    source: ShardSource | None = None
    """The stored shard that holds these samples already; the run refers to it instead of extracting them."""


class PlanMeta(BaseModel):
    """What is known about a plan without reading its samples (``plan.json``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 4
    """2 added a checksum to the file, 3 the sources of shards and ``base``, 4 ``rows``, ``computed`` and segments."""
    fingerprint: str
    spec: dict[str, Any]
    plan_sha256: Digest
    row_bytes: int
    shards: list[PlannedShard]
    input: int
    samples: int
    tokens: int
    rows: int
    """Stored rows: what samples of a shard share counts once. Before schema 4 as many as tokens."""
    computed: int
    """Tokens that the engine computes, where its cache has blocks of ``MIN_SHARED`` tokens."""
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

    @model_validator(mode="before")
    @classmethod
    def _older(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("schema_version") in (1, 2, 3) and "tokens" in tree:
            return {"rows": tree["tokens"], "computed": tree["tokens"], **tree}
        return tree

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

    @property
    def shares(self) -> bool:
        """Whether samples of a shard share the rows of common prefixes."""
        return JobSpec(self.meta.spec).shares

    def shard(self, index: int) -> pa.Table:
        """The samples of one shard in their order (schema ``PLAN_SCHEMA``).

        Raises:
            CorruptDataError: the layout's file holds no such rows, though its digest is that of ``plan.json``.
        """
        table = self._read(index, None)
        if "segments" in table.column_names:
            return table
        runs = [[(first, count)] for first, count in zip(*(table[k].to_pylist() for k in _OLDER), strict=True)]
        return with_segments(table, runs)

    def sample_ids(self) -> dict[int, list[str]]:
        """The ids of every shard's samples; reads nothing else of the plan."""
        return {
            shard.index: self._read(shard.index, ["sample_id"])["sample_id"].to_pylist() for shard in self.meta.shards
        }

    def lengths(self, index: int) -> dict[str, int]:
        """Tokens of each sample of a shard by its id; reads nothing else of the plan."""
        table = self._read(index, ["sample_id", "n_tokens"])
        return dict(zip(table["sample_id"].to_pylist(), table["n_tokens"].to_pylist(), strict=True))

    def _read(self, index: int, columns: list[str] | None) -> pa.Table:
        where = f"{self.root.url}/{layout.plan_path(self.fingerprint, self.meta.plan_sha256)}"
        try:
            if not 0 <= index < self._table.num_row_groups:
                raise ValueError(f"it has {self._table.num_row_groups} row groups")
            table = self._table.read_row_group(index, columns=columns)
            table.validate(full=True)
            if "segments" in table.column_names:
                _check_segments(table, self.meta.shards[index].rows)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptDataError(f"{where}: shard {index} cannot be read ({error}); {_REMEDY}") from error
        return table

    def shards(self) -> Iterator[pa.Table]:
        """Every shard's samples, one shard in memory at a time."""
        for shard in self.meta.shards:
            yield self.shard(shard.index)


_OLDER = ("first_row", "n_tokens")


def with_segments(table: pa.Table, segments: Sequence[Sequence[Run]]) -> pa.Table:
    """A table of samples with these segments in place of those it has (schema ``PLAN_SCHEMA``)."""
    found = {name: table[name] for name in table.column_names if name != "first_row"}
    found["segments"] = segments_array(segments)
    return pa.table([found[name] for name in PLAN_SCHEMA.names], PLAN_SCHEMA)


def segments_array(segments: Sequence[Sequence[Run]]) -> pa.ListArray:
    """The column of these segments."""
    numbers = chain.from_iterable(chain.from_iterable(segments))
    runs = np.fromiter(numbers, dtype=np.int64).reshape(-1, 2)
    sizes = np.array([len(runs) for runs in segments], dtype=np.int64)
    return segments_column(np.ascontiguousarray(runs[:, 0]), np.ascontiguousarray(runs[:, 1]), sizes)


def segments_column(first: Ints, count: Ints, sizes: Ints) -> pa.ListArray:
    """The column of segments that are end to end, ``sizes`` of each sample (``prefixes.FlatLayout``)."""
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    parts = [pa.array(first), pa.array(count)]
    values = pa.StructArray.from_arrays(parts, fields=list(SEGMENTS_TYPE.value_type))
    return pa.ListArray.from_arrays(offsets, values)


def segments_of(table: pa.Table) -> list[list[Run]]:
    """The segments of each sample of a table (schema ``PLAN_SCHEMA``)."""
    column = table["segments"].combine_chunks()
    runs = column.flatten()
    firsts, counts = (runs.field(k).to_pylist() for k in (0, 1))
    sizes = np.diff(column.offsets.to_numpy()).tolist()
    found = iter(zip(firsts, counts, strict=True))
    return [list(islice(found, size)) for size in sizes]


def _check_segments(table: pa.Table, rows: int) -> None:
    column = table["segments"].combine_chunks()
    runs = column.flatten()
    firsts, counts = (runs.field(k) for k in (0, 1))
    if column.null_count or runs.null_count or firsts.null_count or counts.null_count:
        raise ValueError("segments are missing")
    first, count = firsts.to_numpy(), counts.to_numpy()
    most = min(max(rows, 0), 2**62)  # a damaged number of rows may be any
    if not ((first >= 0) & (count >= 1) & (count <= most) & (first <= most - count)).all():
        raise ValueError(f"segments lie outside the {rows} rows of the shard")
    ends = np.concatenate(([0], np.cumsum(count)))
    offsets = column.offsets.to_numpy() - column.offsets[0].as_py()
    if not np.array_equal(np.diff(ends[offsets]), table["n_tokens"].to_numpy()):
        raise ValueError("segments have other rows than the samples have tokens")


def lay_out_again(table: pa.Table, *, share: bool) -> tuple[pa.Table, int]:
    """Samples in a shard file of their own: the table with these segments, and the rows of the file."""
    made = lay_out([ids.values.to_numpy() for ids in table["token_ids"]], share=share)
    return with_segments(table, made.segments), made.rows


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
        if not table.schema_arrow.equals(_OLDER_SCHEMA if meta.schema_version < 4 else PLAN_SCHEMA):
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
