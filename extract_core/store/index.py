"""The index of a version: a Parquet file with one row per sample, named by its digest."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tempfile
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from extract_core.errors import CorruptDataError
from extract_core.store import layout
from extract_core.store.failures import failure
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

_ROWS_PER_GROUP = 4096


def write_index(root: Root, samples: pa.Table) -> IndexRef:
    """Store the index; durable on return.

    Args:
        root: the dataset root.
        samples: the columns of ``INDEX_SCHEMA``, in any order; the order of rows is kept.

    Raises:
        ValueError: a column is missing, of another type, or null where it may not be.
        NoSpaceError, StoreError: the file could not be written.
    """
    unknown = sorted(set(samples.column_names) ^ set(INDEX_SCHEMA.names))
    if unknown:
        raise ValueError(f"index columns are missing or unknown: {unknown}")
    table = samples.select(INDEX_SCHEMA.names)
    for field in INDEX_SCHEMA:
        if not field.nullable and table.column(field.name).null_count:
            raise ValueError(f"index column {field.name!r} has empty values")
    try:
        table = table.cast(INDEX_SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"the index does not fit its schema: {error}") from error
    folder = root.local_path(layout.INDEXES) or Path(tempfile.gettempdir())
    root.check_inside(layout.index_path("0" * 64))
    temp = folder / f"{TEMP_PREFIX}{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, temp, compression="zstd", row_group_size=_ROWS_PER_GROUP)
        with temp.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = temp.stat().st_size
        ref = IndexRef(path=layout.index_path(digest), sha256=digest, nbytes=size, rows=table.num_rows)
        root.put_file(temp, ref.path)
    except OSError as error:
        raise failure(error, "write index", str(temp)) from error
    finally:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
    return ref


def _with_empty_values(table: pa.Table) -> list[str]:
    """Columns that hold lists with nulls in them, which a schema cannot forbid without changing it."""
    found = []
    for field in INDEX_SCHEMA:
        if pa.types.is_list(field.type):
            values = pc.list_flatten(table.column(field.name))
            parts = [values, *values.flatten()] if pa.types.is_struct(values.type) else [values]
            if any(part.null_count for part in parts):
                found.append(field.name)
    return found


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
    if empty := _with_empty_values(table):
        raise CorruptDataError(f"index {where} has empty values inside {empty}; it is not an index of ours")
    if table.num_rows != ref.rows:
        raise CorruptDataError(f"index {where} has {table.num_rows} samples, the manifest says {ref.rows}")
    return table
