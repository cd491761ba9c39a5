"""Changes rows of a published version and recomputes every checksum, as a wrong extraction would have published it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from extract_core.store import layout
from extract_core.store.index import INDEX_SCHEMA, write_index
from extract_core.store.records import ShardRef
from extract_core.store.root import Root
from extract_core.store.versions import read_manifest

Rows = dict[str, np.ndarray[Any, Any]]


def forge(root: Path, change: Callable[[Rows], None], spec: dict[str, Any] | None = None) -> None:
    """Let ``change`` edit the rows of the latest version in place.

    Args:
        root: a local root whose rows are stored as they are, one segment a sample.
        change: gets sample id to rows ``[N, L, H]``, as unsigned integers of the stored values' size, writable.
        spec: parts of the manifest's spec to replace.
    """
    store = Root.open(str(root))
    manifest = read_manifest(store, None)
    index = pq.read_table(root / manifest.index.path)
    files = {shard.sha256: bytearray((root / shard.path).read_bytes()) for shard in manifest.shards}
    columns, rows = index.to_pydict(), {}
    width = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}[manifest.dtype]
    for sample, (segment,) in zip(columns["sample_id"], columns["segments"], strict=True):
        view = memoryview(files[segment["shard"]])[segment["byte_offset"] :][: segment["byte_length"]]
        shape = (segment["rows"], len(manifest.layer_ids), manifest.hidden_size)
        rows[sample] = np.frombuffer(view, dtype=width).reshape(shape)
    change(rows)
    names = {digest: hashlib.sha256(data).hexdigest() for digest, data in files.items()}
    for digest, data in files.items():
        (root / layout.shard_path(digest)).unlink()
        (root / layout.shard_path(names[digest])).write_bytes(data)
    for sample, (segment,) in zip(columns["sample_id"], columns["segments"], strict=True):
        segment["xxh3"] = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(rows[sample]))
        segment["shard"] = names[segment["shard"]]
    shards = [
        ShardRef(path=layout.shard_path(names[s.sha256]), sha256=names[s.sha256], nbytes=s.nbytes, rows=s.rows)
        for s in manifest.shards
    ]
    ref = write_index(store, pa.Table.from_pydict(columns, schema=INDEX_SCHEMA))
    changed = manifest.model_copy(update={"index": ref, "shards": shards, "spec": {**manifest.spec, **(spec or {})}})
    (root / layout.manifest_path(manifest.version)).write_bytes(changed.dump())
