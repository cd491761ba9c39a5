"""What differs between two versions, of one root or of two: from manifests and a few columns of their indexes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from extract_core.errors import CorruptDataError
from extract_core.store.columns import index_columns
from extract_core.store.records import Manifest
from extract_core.store.root import Root

NAMES = 10
"""Samples that are named, of each kind of difference."""

_COLUMNS = ["sample_id", "source_file", "source_row", "source_turn", "split", "token_ids", "loss_mask", "segments"]
_SLIM = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("tokens", pa.uint64()),
        ("mask", pa.uint64()),
        ("cut", pa.uint64()),  # how the rows are cut into segments
        ("values", pa.uint64()),  # their checksums
    ]
)
_NOT_FIELDS = frozenset({"index", "shards", "totals", "accounting", "checks", "provenance", "timings", "spec"})


@dataclass
class Group:
    """Samples with one kind of difference: how many, and the first of them by id."""

    count: int = 0
    first: list[str] = field(default_factory=list)


@dataclass
class VersionDiff:
    """From one version to another.

    ``samples`` has the groups added, removed, changed (one row of the input that gives another sample, named
    ``old id -> new id``) and, for samples with the same id, values, tokens, mask, split, source. Values are compared
    only where both versions hold the same layers in the same dtype and width, cut into the same segments;
    ``not_compared`` counts the other common samples.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    fields: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    samples: dict[str, Group] = field(default_factory=dict)
    unchanged: int = 0
    not_compared: int = 0
    shards: dict[str, int] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether a reader gets the same samples with the same rows from both."""
        return not self.fields and not self.not_compared and not any(group.count for group in self.samples.values())

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "same": self.same,
            **asdict(self),
            "fields": {name: {"before": old, "after": new} for name, (old, new) in self.fields.items()},
        }


def diff(before: tuple[Root, Manifest], after: tuple[Root, Manifest]) -> VersionDiff:
    """Compare two versions.

    Raises:
        CorruptDataError: an index is missing or damaged.
        StoreError: a root cannot be read.
    """
    (_, old), (_, new) = before, after
    result = VersionDiff(_summary(*before), _summary(*after), fields=_fields(old, new))
    ours, theirs = ({shard.sha256: shard.nbytes for shard in m.shards} for m in (old, new))
    shared = ours.keys() & theirs.keys()
    result.shards = {
        "shared": len(shared),
        "shared_bytes": sum(ours[digest] for digest in shared),
        "only_before": len(ours) - len(shared),
        "only_after": len(theirs) - len(shared),
    }
    groups = ("added", "removed", "changed", "values", "tokens", "mask", "split", "source")
    result.samples = {name: Group() for name in groups}
    if old.index.sha256 == new.index.sha256:
        result.unchanged = old.index.rows
        return result
    comparable = (old.layer_ids, old.dtype, old.hidden_size, old.encoding) == (
        new.layer_ids,
        new.dtype,
        new.hidden_size,
        new.encoding,
    )
    _samples(_slim(*before), _slim(*after), result, comparable)
    return result


def _summary(root: Root, manifest: Manifest) -> dict[str, Any]:
    return {
        "root": root.url,
        "version": manifest.version,
        "created": manifest.created,
        "fingerprint": manifest.fingerprint,
        "samples": manifest.totals.samples,
        "tokens": manifest.totals.tokens,
        "bytes": manifest.totals.bytes,
    }


def _fields(old: Manifest, new: Manifest) -> dict[str, tuple[Any, Any]]:
    """What is said once for a version: layers, dtype, norm, and every field of the spec, by its path."""
    own = {"version", "attempt", "created", "fingerprint", "schema_version", "coresample_version", "layer_meaning"}
    left, right = (
        {name: value for name, value in m.model_dump(mode="json").items() if name not in _NOT_FIELDS | own}
        for m in (old, new)
    )
    found: dict[str, tuple[Any, Any]] = {}
    _compare("", left, right, found)
    _compare("spec", old.spec, new.spec, found)
    for name in ("layer_ids", "dtype", "encoding"):  # said already
        if name in found:
            found.pop(f"spec.{name}", None)
    return found


def _compare(path: str, old: Any, new: Any, found: dict[str, tuple[Any, Any]]) -> None:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted(old.keys() | new.keys()):
            _compare(f"{path}.{name}" if path else name, old.get(name), new.get(name), found)
    elif old != new:
        found[path] = (old, new)


def _slim(root: Root, manifest: Manifest) -> pa.Table:
    """A row of checksums per sample."""
    batches = []
    try:
        for batch in index_columns(root, manifest.index.path, manifest.index.nbytes, _COLUMNS):
            turns = pc.coalesce(batch.column("source_turn").cast(pa.string()), pa.scalar(""))
            rows = batch.column("source_row").cast(pa.string())
            source = pc.binary_join_element_wise(batch.column("source_file"), rows, turns, pa.scalar("\0"))
            cut, values = _segment_sums(batch.column("segments"))
            columns = [
                batch.column("sample_id"),
                source,
                batch.column("split"),
                _list_sums(batch.column("token_ids")),
                _list_sums(batch.column("loss_mask")),
                cut,
                values,
            ]
            batches.append(pa.record_batch(columns, schema=_SLIM))
    except FileNotFoundError:
        raise CorruptDataError(
            f"index {root.describe(manifest.index.path)} of version {manifest.version} is missing"
        ) from None
    except pa.ArrowException as error:
        raise CorruptDataError(
            f"index {root.describe(manifest.index.path)} of version {manifest.version} is damaged: {error}"
        ) from error
    return pa.Table.from_batches(batches, schema=_SLIM)


def _list_sums(column: pa.ListArray) -> pa.Array:
    """xxh3 of the values of every list."""
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy(zero_copy_only=False)
    sums = [xxhash.xxh3_64_intdigest(values[a:b].tobytes()) for a, b in pairwise(offsets)]
    return pa.array(sums, pa.uint64())


def _segment_sums(column: pa.ListArray) -> tuple[pa.Array, pa.Array]:
    offsets = column.offsets.to_pylist()
    rows = column.values.field("rows").to_pylist()
    checksums = column.values.field("xxh3").to_pylist()
    spans = list(pairwise(offsets))
    cut = [xxhash.xxh3_64_intdigest(repr(rows[a:b]).encode()) for a, b in spans]
    values = [xxhash.xxh3_64_intdigest(repr(checksums[a:b]).encode()) for a, b in spans]
    return pa.array(cut, pa.uint64()), pa.array(values, pa.uint64())


def _samples(old: pa.Table, new: pa.Table, result: VersionDiff, comparable: bool) -> None:
    both = _join(old, new, ["sample_id"])
    differs = {
        name: pc.not_equal(both.column(name), both.column(f"{name}_after"))
        for name in ("tokens", "mask", "split", "source")
    }
    same_cut = pc.equal(both.column("cut"), both.column("cut_after"))
    if not comparable:
        same_cut = pc.and_(same_cut, pa.scalar(False))
    differs["values"] = pc.and_(same_cut, pc.not_equal(both.column("values"), both.column("values_after")))
    anything = pc.invert(same_cut)
    for name, mask in differs.items():
        result.samples[name] = _group(both.filter(mask).column("sample_id"))
        anything = pc.or_(anything, mask)
    result.not_compared = both.num_rows - int(pc.sum(same_cut).as_py() or 0)
    result.unchanged = both.num_rows - int(pc.sum(anything).as_py() or 0)

    gone, come = _without(old, both), _without(new, both)
    changed = _join(gone, come, ["source"])
    result.samples["changed"] = _group(
        pc.binary_join_element_wise(changed.column("sample_id"), changed.column("sample_id_after"), " -> ")
    )
    result.samples["removed"] = _group(_without(gone, changed).column("sample_id"))
    after = changed.column("sample_id_after")
    result.samples["added"] = _group(
        come.filter(pc.invert(pc.is_in(come.column("sample_id"), after))).column("sample_id")
    )


def _join(old: pa.Table, new: pa.Table, keys: list[str]) -> pa.Table:
    return old.join(new, keys=keys, join_type="inner", right_suffix="_after", use_threads=False)


def _without(table: pa.Table, other: pa.Table) -> pa.Table:
    return table.filter(pc.invert(pc.is_in(table.column("sample_id"), other.column("sample_id"))))


def _group(names: Any) -> Group:
    first = names.sort() if len(names) <= NAMES else names.take(pc.select_k_unstable(names, NAMES, [("", "ascending")]))
    return Group(len(names), first.to_pylist())
