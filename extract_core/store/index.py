"""The index of a version: a Parquet file with one row per sample, named by its digest.

A small index is read whole and held against that digest. Of a large one only the parts are read that are asked for: its
footer has checksums of itself and of every column chunk, so each part is checked when it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from extract_core.errors import CorruptDataError
from extract_core.store import layout
from extract_core.store.failures import failure
from extract_core.store.indexparts import IndexParts, add_checksums, with_room_for_checksums
from extract_core.store.layout import TEMP_PREFIX
from extract_core.store.objects import read_object
from extract_core.store.records import IndexRef, Manifest
from extract_core.store.root import Root

SEGMENT_TYPE = pa.struct(
    [
        ("shard", pa.string()),
        ("first_row", pa.int64()),
        ("rows", pa.int32()),
        ("byte_offset", pa.int64()),
        ("byte_length", pa.int64()),
        ("xxh3", pa.string()),
    ]
)

INDEX_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("source_file", pa.string(), nullable=False),
        pa.field("source_row", pa.int64(), nullable=False),
        pa.field("source_turn", pa.int32()),
        pa.field("split", pa.string(), nullable=False),
        pa.field("n_tokens", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("mask_method", pa.string(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("segments", pa.list_(SEGMENT_TYPE), nullable=False),
        pa.field("norm_mean", pa.list_(pa.float32()), nullable=False),
        pa.field("norm_max", pa.list_(pa.float32()), nullable=False),
        pa.field("greedy_token", pa.int32()),
        pa.field("top1_token", pa.int32()),
    ]
)

_GROUP_SAMPLES, _GROUP_TOKENS = 4096, 2**17
"""A row group at most (but for a single longer sample): what is read for one sample of a large index."""
_LEAVES = len(INDEX_SCHEMA) - 1 + len(SEGMENT_TYPE)
"""Columns of the file: the fields of a segment are one each."""
_FEW_VALUES = ["source_file", "split", "mask_method", "segments.list.element.shard"]
_WHOLE = 8 * 2**20
"""Bytes up to which an index is read whole: some 7,000 samples of usual length."""


def write_index(root: Root, samples: pa.Table | Iterable[pa.Table]) -> IndexRef:
    """Store the index; durable on return.

    Args:
        root: the dataset root.
        samples: the columns of ``INDEX_SCHEMA``, in any order; the order of rows is kept. Tables that come one after
            the other are written as they come: what is in memory is a row group and the table at hand. The same samples
            give the same file, however they are cut into tables.

    Raises:
        ValueError: a column is missing, of another type, or null where it may not be.
        NoSpaceError, StoreError: the file could not be written.
    """
    tables = [samples] if isinstance(samples, pa.Table) else samples
    folder = root.local_path(layout.INDEXES) or Path(tempfile.gettempdir())
    root.check_inside(layout.index_path("0" * 64))
    temp = folder / f"{TEMP_PREFIX}{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rows = _write(temp, map(_fitting, tables))
        with temp.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = temp.stat().st_size
        ref = IndexRef(path=layout.index_path(digest), sha256=digest, nbytes=size, rows=rows)
        root.put_file(temp, ref.path)
    except OSError as error:
        raise failure(error, "write index", str(temp)) from error
    finally:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
    return ref


def _fitting(samples: pa.Table) -> pa.Table:
    unknown = sorted(set(samples.column_names) ^ set(INDEX_SCHEMA.names))
    if unknown:
        raise ValueError(f"index columns are missing or unknown: {unknown}")
    table = samples.select(INDEX_SCHEMA.names)
    for field in INDEX_SCHEMA:
        if not field.nullable and table.column(field.name).null_count:
            raise ValueError(f"index column {field.name!r} has empty values")
    try:
        return table.cast(INDEX_SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"the index does not fit its schema: {error}") from error


def _write(path: Path, tables: Iterable[pa.Table]) -> int:
    rows = groups = 0
    # Dictionaries would hide from zstd that shared prefixes are repeated; nobody looks for ids by their statistics.
    with pq.ParquetWriter(
        path, INDEX_SCHEMA, compression="zstd", use_dictionary=_FEW_VALUES, write_statistics=False
    ) as writer:
        for group in _groups(tables):
            writer.write_table(group, row_group_size=max(1, group.num_rows))
            rows, groups = rows + group.num_rows, groups + 1
        writer.add_key_value_metadata(with_room_for_checksums(groups * _LEAVES))
    add_checksums(path)
    return rows


def _groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The samples in row groups, each as full as it may be."""
    held: list[pa.Table] = []
    samples = tokens = 0
    for table in tables:
        lengths = pc.list_value_length(table.column("token_ids")).to_numpy().astype(np.int64)
        ends, start = np.cumsum(lengths), 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + _GROUP_TOKENS - tokens, side="right"))
            stop = max(min(stop, start + _GROUP_SAMPLES - samples), start if held else start + 1)
            if stop > start:
                held.append(table.slice(start, stop - start))
                samples, tokens, start = samples + stop - start, tokens + int(ends[stop - 1]) - before, stop
            if start < len(ends):
                yield pa.concat_tables(held)
                held, samples, tokens = [], 0, 0
    if held:
        yield pa.concat_tables(held)


def _with_empty_values(table: pa.Table) -> list[str]:
    """Columns that hold lists with nulls in them, which a schema cannot forbid without changing it."""
    found = []
    for name in table.column_names:
        column = table.column(name)
        if pa.types.is_list(column.type):
            values = pc.list_flatten(column)
            parts = [values, *values.flatten()] if pa.types.is_struct(values.type) else [values]
            if any(part.null_count for part in parts):
                found.append(name)
    return found


def open_index(root: Root, manifest: Manifest) -> pa.Table | IndexParts:
    """The index of a version for looking things up: whole where it is small, else by parts, each checked when read.

    Both have ``num_rows``, ``column(name)``, ``slice(position, count)`` and ``take(positions)``. A large index without
    checksums of its parts, as older Coresamples wrote them, is read whole as well.

    Raises:
        CorruptDataError: it is missing, or differs from what the manifest says.
    """
    ref = manifest.index
    if ref.nbytes > _WHOLE:
        parts = IndexParts.open(root, ref, INDEX_SCHEMA, _refuse_empty, owner=f" of version {manifest.version}")
        if parts is not None:
            return parts
    return read_index(root, manifest)


def read_index(root: Root, manifest: Manifest) -> pa.Table:
    """The index of a version, after checking its digest.

    Raises:
        CorruptDataError: it is missing, or differs from what the manifest says.
    """
    ref, where = manifest.index, root.describe(manifest.index.path)
    owner = f" of version {manifest.version}"
    data = read_object(root, ref.path, sha256=ref.sha256, nbytes=ref.nbytes, what="index", owner=owner)
    try:
        table = pq.read_table(io.BytesIO(data))
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptDataError(f"index {where} is not Parquet: {error}") from error
    if not table.schema.equals(INDEX_SCHEMA):
        raise CorruptDataError(f"index {where} has other columns than this Coresample expects: {table.schema.names}")
    _refuse_empty(table, where)
    if table.num_rows != ref.rows:
        raise CorruptDataError(f"index {where} has {table.num_rows} samples, the manifest says {ref.rows}")
    return table


def _refuse_empty(table: pa.Table, where: str) -> None:
    if empty := _with_empty_values(table):
        raise CorruptDataError(f"index {where} has empty values inside {empty}; it is not an index of ours")
