"""Single columns of an index, by range reads: nothing else of it is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from extract_core.errors import CorruptDataError
from extract_core.store.rangefile import RangeFile
from extract_core.store.root import Root

_ROWS = 4096


def index_columns(root: Root, rel: str, nbytes: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Some columns of an index, some thousand samples at a time. Its digest is not checked; ``verify`` does that.

    Args:
        root: the dataset root.
        rel: path of the index.
        nbytes: its size.
        columns: names of ``INDEX_SCHEMA``.

    Raises:
        FileNotFoundError: it is missing.
        CorruptDataError: it is not an index.
    """
    try:
        source = root.local_path(rel)
        file = pq.ParquetFile(
            source if source is not None else pa.PythonFile(RangeFile(nbytes, partial(root.read_range, rel)), mode="r"),
            pre_buffer=True,
        )
        with file:
            missing = sorted(set(columns) - set(file.schema_arrow.names))
            if missing:
                raise CorruptDataError(
                    f"index {root.describe(rel)} has no columns {missing}; it is not an index of ours"
                )
            yield from file.iter_batches(batch_size=_ROWS, columns=columns)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise CorruptDataError(
            f"index {root.describe(rel)} cannot be read: {error}; run 'coresample verify' on its version"
        ) from error


def referenced_shards(root: Root, rel: str, nbytes: int) -> set[str]:
    """Digests of the shards that the samples of an index lie in."""
    found: set[str] = set()
    for batch in index_columns(root, rel, nbytes, ["segments"]):
        shards = pc.struct_field(pc.list_flatten(batch.column("segments")), "shard")
        found |= set(pc.unique(shards).to_pylist())
    return found - {None}
