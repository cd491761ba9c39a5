"""Planning: every sample gets its shard and its first row, fixed before the model runs.

A plan is a pure function of the job, the input bytes, the model files and what the root holds already. It streams: rows
lie on the local disk, one file per shard, until the last one is read; only sample ids and places stay in memory.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from extract_core.chat import Dropped, Sample, Tally
from extract_core.errors import AlreadyExistsError, CorruptDataError
from extract_core.planning.base import FREE, NOTHING, Base, Pins
from extract_core.planning.fingerprint import JobSpec
from extract_core.planning.model import canonical_digest
from extract_core.planning.plan import CHECKSUM, PLAN_SCHEMA, Plan, PlanMeta, PlannedShard, file_digest, load_plan
from extract_core.store import layout
from extract_core.store.records import ShardSource
from extract_core.store.root import Root

MOST_SAMPLES = 20_000
"""Samples of one shard at most: its commit record lists each of them and is one small object."""
_IN_MEMORY_TOKENS = 2**21


def make_plan(
    root: Root,
    spec: JobSpec,
    items: Iterator[Sample | Dropped],
    *,
    shard_bytes: int,
    base: Base = NOTHING,
    pinned: Pins = FREE,
) -> Plan:
    """Lay out every sample and write the plan under the root; ``plan.json`` last, by exclusive create.

    Shards that refer to stored rows come first, each with the samples of one commit record in the order of its file;
    samples that are new follow in the order of the input.

    Args:
        root: where the plan goes.
        spec: everything the fingerprint covers.
        items: rendered samples and drops, in input order.
        shard_bytes: target of one shard's hidden states.
        base: samples that are stored already.
        pinned: samples that have commit records of this very plan.

    Raises:
        InputDataError: no usable sample; names the first row and the counts by reason.
        CorruptDataError: the commit records beside the plan are not of these samples.
    """
    counts, tally = _Counts(), Tally()
    grouping = _Grouping(Layout(max(1, shard_bytes // spec.row_bytes)), base, pinned)
    with tempfile.TemporaryDirectory(prefix="coresample-plan-") as name:
        folder = Path(name)
        parquet, dropped = folder / "plan.parquet", folder / "dropped.jsonl"
        rows = _Rows(folder)
        with dropped.open("w", encoding="utf-8") as drops:
            for item in items:
                tally.add(item)
                if isinstance(item, Dropped):
                    drops.write(_drop_line(item))
                elif item.sample_id in counts.ids:
                    drops.write(_duplicate_line(item))
                else:
                    group, place = grouping.place(item.sample_id, len(item.token_ids))
                    rows.add(group, _plan_row(item, place), len(item.token_ids))
                    counts.add(item)
        tally.raise_if_unusable()
        pieces = grouping.shards(f"{root.url}/{layout.commits_dir(spec.fingerprint)}")
        shards = _write(parquet, rows, pieces)
        meta = counts.meta(spec, tally, shards, file_digest(parquet), base.digest)
        _publish_plan(root, meta, parquet, dropped, exact=not pinned.places)
    plan = load_plan(root, meta.fingerprint)
    assert plan is not None
    return plan


@dataclass(slots=True)
class Layout:
    """Shards filled in input order up to a row target; a sample is never split."""

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
        """End the shard at hand."""
        if self.samples:
            self.shards.append(PlannedShard(index=len(self.shards), rows=self.rows, samples=self.samples))
        self.rows = self.samples = 0


Group = tuple[str, int]
"""Samples that share a shard: ("pinned", its index), ("stored", number of the source) or ("new", number)."""


class _Piece(NamedTuple):
    """Samples ``start`` to ``stop`` of a group: one shard of the plan."""

    group: Group
    start: int
    stop: int
    source: ShardSource | None


class _Grouping:
    """Says which samples share a shard, one sample at a time."""

    def __init__(self, free: Layout, base: Base, pinned: Pins):
        self._free, self._base, self._pinned = free, base, pinned
        self._sizes: Counter[Group] = Counter()

    def place(self, sample_id: str, n_tokens: int) -> tuple[Group, int]:
        """Its group, and where it is in there: by this number, then by arrival."""
        group: Group
        if (pin := self._pinned.places.get(sample_id)) is not None:
            group, place = ("pinned", pin[0]), pin[1]
        elif (stored := self._base.places.get(sample_id)) is not None:
            group, place = ("stored", stored[0]), stored[1]
        else:
            group, place = ("new", self._free.place(n_tokens)[0]), 0
        self._sizes[group] += 1
        return group, place

    def shards(self, where: str) -> list[_Piece]:
        """What each shard consists of; pinned ones have the index of their commit record, the others what is free."""
        fixed = {
            number: _Piece((kind, number), 0, count, self._pinned.sources.get(number))
            for (kind, number), count in self._sizes.items()
            if kind == "pinned"
        }
        stored = sorted(group for group in self._sizes if group[0] == "stored")
        new = sorted(group for group in self._sizes if group[0] == "new")
        rest = [_Piece(group, 0, self._sizes[group], self._base.sources[group[1]]) for group in stored]
        rest += [_Piece(group, 0, self._sizes[group], None) for group in new]
        gaps = max(self._pinned.sources, default=-1) + 1 - len(fixed)
        while len(rest) < gaps:
            self._split(rest, where)
        left = iter(rest)
        return [fixed[n] if n in fixed else next(left) for n in range(len(fixed) + len(rest))]

    @staticmethod
    def _split(rest: list[_Piece], where: str) -> None:
        """Shards are numbered without gaps, so commit records of later shards may ask for smaller ones before them."""
        at = max(range(len(rest)), key=lambda n: rest[n].stop - rest[n].start, default=None)
        if at is None or rest[at].stop - rest[at].start < 2:
            raise CorruptDataError(
                f"{where} has commit records of more shards than the data has samples for; they are of another job. "
                "Restore plan.json from a backup, or remove that folder: its samples are then extracted again"
            )
        piece = rest[at]
        half = (piece.start + piece.stop) // 2
        rest[at : at + 1] = [piece._replace(stop=half), piece._replace(start=half)]


class _Rows:
    """Rows of the plan on the local disk, by group, until all are known."""

    def __init__(self, folder: Path):
        self._folder, self._tokens = folder, 0
        self._pending: dict[Group, list[dict[str, Any]]] = {}

    def add(self, group: Group, row: dict[str, Any], n_tokens: int) -> None:
        """One row; what waits in memory is bounded."""
        self._pending.setdefault(group, []).append(row)
        self._tokens += n_tokens + 64  # the other fields
        if self._tokens > _IN_MEMORY_TOKENS:
            self._flush()

    def _path(self, group: Group) -> Path:
        return self._folder / f"{group[0]}-{group[1]}.arrows"

    def _flush(self) -> None:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        for group, rows in self._pending.items():
            with self._path(group).open("ab") as file, pa.ipc.new_stream(file, PLAN_SCHEMA, options=options) as stream:
                stream.write_table(pa.Table.from_pylist(rows, PLAN_SCHEMA))
        self._pending, self._tokens = {}, 0

    def table(self, group: Group) -> pa.Table:
        """All rows of a group, by place, then by arrival."""
        self._flush()
        path = self._path(group)
        tables, size = [], path.stat().st_size
        with path.open("rb") as file:
            while file.tell() < size:
                tables.append(pa.ipc.open_stream(file).read_all())
        whole = pa.concat_tables(tables)
        return whole.take(pc.sort_indices(whole, [("first_row", "ascending")]))  # stable


def _write(parquet: Path, rows: _Rows, pieces: list[_Piece]) -> list[PlannedShard]:
    """One row group per shard."""
    shards = []
    with pq.ParquetWriter(parquet, PLAN_SCHEMA, compression="zstd") as writer:
        for index, piece in enumerate(pieces):
            table = rows.table(piece.group).slice(piece.start, piece.stop - piece.start)
            lengths = table["n_tokens"].to_pylist()
            columns = {"shard": [index] * len(lengths), "first_row": _firsts(lengths)}
            for name, values in columns.items():
                at = PLAN_SCHEMA.get_field_index(name)
                table = table.set_column(at, PLAN_SCHEMA.field(at), pa.array(values, PLAN_SCHEMA.field(at).type))
            writer.write_table(table)
            shards.append(PlannedShard(index=index, rows=sum(lengths), samples=len(lengths), source=piece.source))
    return shards


def _firsts(lengths: list[int]) -> list[int]:
    firsts, at = [], 0
    for length in lengths:
        firsts.append(at)
        at += length
    return firsts


def _publish_plan(root: Root, meta: PlanMeta, parquet: Path, dropped: Path, *, exact: bool) -> None:
    fingerprint = meta.fingerprint
    root.put_bytes(layout.dropped_path(fingerprint), dropped.read_bytes())
    root.put_file(parquet, layout.plan_path(fingerprint, meta.plan_sha256))
    tree = json.loads(json.dumps(meta.model_dump(mode="json")))
    text = json.dumps({**tree, CHECKSUM: canonical_digest(tree)}, sort_keys=True, indent=1) + "\n"
    try:
        root.create_exclusive(layout.plan_meta_path(fingerprint), text.encode())
    except AlreadyExistsError as taken:
        # Another run of the same job planned at the same time. Plans of one fingerprint that found the same rows stored
        # are equal by construction, but their files may differ (paths as the job writes them): each has its own name.
        # The first plan.json stands.
        theirs = json.loads(taken.existing)
        if exact and theirs.get("base", "") == meta.base and theirs["shards"] != tree["shards"]:
            raise CorruptDataError(
                f"{root.url}/{taken.path}: two plans of fingerprint {fingerprint} differ; please report this defect"
            ) from taken


def _plan_row(sample: Sample, place: int) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "shard": 0,
        "first_row": place,
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

    def meta(self, spec: JobSpec, tally: Tally, shards: list[PlannedShard], digest: str, base: str) -> PlanMeta:
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
            base=base,
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
