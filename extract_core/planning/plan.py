"""The plan: every sample, its shard and its first row, fixed before the model runs.

A plan is a pure function of the job, the input bytes and the model files. It streams: samples are written as they
are rendered, a Parquet row group per shard, and only their ids stay in memory.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from extract_core.chat import Dropped, Sample, Tally
from extract_core.errors import AlreadyExistsError, CorruptDataError
from extract_core.planning.fingerprint import JobSpec
from extract_core.planning.model import canonical_digest
from extract_core.store import layout
from extract_core.store.records import Digest
from extract_core.store.root import Root
from extract_core.store.shard import HEADER_BYTES

_CHECKSUM = "checksum"
_MOST_META = 2**30

_REMEDY = "run the job with --repair: it is planned again, and commit records beside it stay good"

MOST_SAMPLES = 20_000
"""Samples of one shard at most: its commit record lists each of them and is one small object."""

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


class PlanMeta(BaseModel):
    """What is known about a plan without reading its samples (``plan.json``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 2
    """2 added a checksum to the file."""
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

    @property
    def bytes(self) -> int:
        """Bytes of the shard files the plan will store: rows, token ids, headers."""
        return self.tokens * (self.row_bytes + 4) + len(self.shards) * HEADER_BYTES


@dataclass(slots=True)
class _Layout:
    """Shards filled in input order up to a byte target; a sample is never split."""

    rows_per_shard: int
    rows: int = 0
    shards: list[PlannedShard] = field(default_factory=list)
    samples: int = 0

    def place(self, n_tokens: int) -> tuple[int, int, bool]:
        """(shard, first row, whether this sample opens a new shard)."""
        full = self.rows + n_tokens > self.rows_per_shard or self.samples >= MOST_SAMPLES
        opened = self.samples > 0 and full
        if opened:
            self.close()
        first = self.rows
        self.rows += n_tokens
        self.samples += 1
        return len(self.shards), first, opened

    def close(self) -> None:
        if self.samples:
            self.shards.append(PlannedShard(index=len(self.shards), rows=self.rows, samples=self.samples))
        self.rows = self.samples = 0


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
        checksum = tree.pop(_CHECKSUM, None) if isinstance(tree, dict) else None
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
        digest = _sha256(local) if local is not None else hashlib.sha256(data or b"").hexdigest()
    except FileNotFoundError:
        raise CorruptDataError(f"{root.url}/{name}, which plan.json names, is missing; {_REMEDY}") from None
    if digest != meta.plan_sha256:
        raise CorruptDataError(f"{root.url}/{name}: sha256 {digest}, plan.json says {meta.plan_sha256}; {_REMEDY}")
    return local if local is not None else pa.BufferReader(data)


def make_plan(
    root: Root,
    spec: JobSpec,
    items: Iterator[Sample | Dropped],
    *,
    shard_bytes: int,
) -> Plan:
    """Lay out every sample and write the plan under the root; ``plan.json`` last, by exclusive create.

    Args:
        root: where the plan goes.
        spec: everything the fingerprint covers.
        items: rendered samples and drops, in input order.
        shard_bytes: target of one shard's hidden states.

    Raises:
        InputDataError: no usable sample; names the first row and the counts by reason.
    """
    row_bytes = spec.row_bytes
    plan_layout = _Layout(max(1, shard_bytes // row_bytes))
    counts, tally = _Counts(), Tally()
    with tempfile.TemporaryDirectory(prefix="coresample-plan-") as folder:
        parquet, dropped = Path(folder) / "plan.parquet", Path(folder) / "dropped.jsonl"
        with (
            pq.ParquetWriter(parquet, PLAN_SCHEMA, compression="zstd") as writer,
            dropped.open("w", encoding="utf-8") as drops,
        ):
            pending: list[dict[str, Any]] = []
            for item in items:
                tally.add(item)
                if isinstance(item, Dropped):
                    drops.write(_drop_line(item))
                    continue
                if item.sample_id in counts.ids:
                    drops.write(_duplicate_line(item))
                    continue
                shard, first_row, opened = plan_layout.place(len(item.token_ids))
                if opened:
                    writer.write_table(pa.Table.from_pylist(pending, PLAN_SCHEMA))
                    pending = []
                pending.append(_plan_row(item, shard, first_row))
                counts.add(item)
            plan_layout.close()
            if pending:
                writer.write_table(pa.Table.from_pylist(pending, PLAN_SCHEMA))
        tally.raise_if_unusable()
        meta = counts.meta(spec, tally, plan_layout.shards, _sha256(parquet))
        _publish_plan(root, meta, parquet, dropped)
    plan = load_plan(root, meta.fingerprint)
    assert plan is not None
    return plan


def _publish_plan(root: Root, meta: PlanMeta, parquet: Path, dropped: Path) -> None:
    fingerprint = meta.fingerprint
    root.put_bytes(layout.dropped_path(fingerprint), dropped.read_bytes())
    root.put_file(parquet, layout.plan_path(fingerprint, meta.plan_sha256))
    tree = json.loads(json.dumps(meta.model_dump(mode="json")))
    text = json.dumps({**tree, _CHECKSUM: canonical_digest(tree)}, sort_keys=True, indent=1) + "\n"
    try:
        root.create_exclusive(layout.plan_meta_path(fingerprint), text.encode())
    except AlreadyExistsError as taken:
        # Another run of the same job planned at the same time. Plans of one fingerprint are equal by construction, but
        # their files may differ (paths as the job writes them): each has its own name, the first plan.json stands.
        if json.loads(taken.existing)["shards"] != json.loads(text)["shards"]:
            raise CorruptDataError(
                f"{root.url}/{taken.path}: two plans of fingerprint {fingerprint} differ; please report this defect"
            ) from taken


def _plan_row(sample: Sample, shard: int, first_row: int) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "shard": shard,
        "first_row": first_row,
        "n_tokens": len(sample.token_ids),
        "token_ids": sample.token_ids,
        "loss_mask": sample.loss_mask,
        "source_file": sample.source.file,
        "source_row": sample.source.row,
        "source_turn": sample.source.turn,
        "split": sample.split,
        "mask_method": sample.mask_method,
        "truncated": sample.truncated,
    }


class _Counts:
    """What the plan knows of its distinct samples, beyond the tally of everything read."""

    def __init__(self) -> None:
        self.tokens = self.supervised = self.truncated = self.longest = 0
        self.ids: set[str] = set()
        self.methods: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()

    def add(self, sample: Sample) -> None:
        n = len(sample.token_ids)
        self.ids.add(sample.sample_id)
        self.tokens += n
        self.supervised += int(sample.loss_mask.sum())
        self.truncated += sample.truncated
        self.methods[sample.mask_method] += 1
        self.lengths[(n - 1).bit_length()] += 1
        self.longest = max(self.longest, n)

    def meta(self, spec: JobSpec, tally: Tally, shards: list[PlannedShard], digest: str) -> PlanMeta:
        return PlanMeta(
            fingerprint=spec.fingerprint,
            spec=spec.document,
            plan_sha256=digest,
            row_bytes=spec.row_bytes,
            shards=shards,
            input=tally.candidates,
            samples=len(self.ids),
            tokens=self.tokens,
            supervised_tokens=self.supervised,
            truncated=self.truncated,
            duplicates=tally.samples - len(self.ids),
            dropped={reason.value: count for reason, count in sorted(tally.dropped.items())},
            malformed=tally.malformed,
            mask_methods=dict(sorted(self.methods.items())),
            length_histogram={str(2**power): count for power, count in sorted(self.lengths.items())},
            longest=self.longest,
        )


def _drop_line(item: Dropped) -> str:
    return _line(item.source, item.reason.value, item.detail, item.field)


def _duplicate_line(sample: Sample) -> str:
    return _line(sample.source, "duplicate", f"same tokens and mask as sample {sample.sample_id}", None)


def _line(source: Any, reason: str, detail: str, name: str | None) -> str:
    entry = {
        "file": source.file,
        "row": source.row,
        "turn": source.turn,
        "reason": reason,
        "field": name,
        "detail": detail,
    }
    return json.dumps(entry) + "\n"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
