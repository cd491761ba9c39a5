"""Planning: every sample gets its shard and its rows there, fixed before the model runs.

A plan is a pure function of the job, the input bytes, the model files and what the root holds already. It streams:
token ids and masks lie on the local disk until the last sample is read; the rest, some hundred bytes a sample, stays in
memory.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from extract_core.chat import Dropped, Sample, Tally
from extract_core.errors import AlreadyExistsError, CorruptDataError
from extract_core.planning.base import FREE, NOTHING, Base, Pins
from extract_core.planning.fingerprint import JobSpec
from extract_core.planning.model import canonical_digest
from extract_core.planning.plan import (
    CHECKSUM,
    PLAN_SCHEMA,
    Plan,
    PlanMeta,
    PlannedShard,
    file_digest,
    load_plan,
    segments_array,
    segments_column,
)
from extract_core.planning.prefixes import (
    FlatLayout,
    Ints,
    along_trie,
    into_shards,
    lay_out,
    one_after_another,
    trie_order,
)
from extract_core.planning.samples import SampleSpool
from extract_core.store import layout
from extract_core.store.records import ShardSource
from extract_core.store.root import Root

MOST_SAMPLES = 20_000
"""Samples of one shard at most: its commit record lists each of them and is one small object."""
MOST_TOKENS = 2**26
"""Tokens of all samples of one shard at most, shared ones counted for each: they are in memory at once."""
# Row groups are small: dictionaries, statistics and a strong compression of the small columns would cost more than they
# save, and dictionaries of token ids would hide from zstd that shared prefixes are repeated.
_LARGE = ("token_ids.list.element", "loss_mask.list.element")
_LEAVES = [f"segments.list.element.{part}" for part in ("first_row", "rows")]
_COMPRESSION = dict.fromkeys([*PLAN_SCHEMA.names, *_LEAVES], "snappy") | dict.fromkeys(_LARGE, "zstd")
_WAITING = 2  # tables of shards that wait for the thread that writes them


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

    Shards that refer to stored rows come first, each with the samples of one commit record in the order of its file.
    Samples that are new follow in the order of the input; where prefixes are shared, families of samples that share
    one stand where their first sample is, in the order of ``planning.prefixes``.

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
    tally, seen, supervised = Tally(), set[str](), 0
    grouping = _Grouping(base, pinned)
    with tempfile.TemporaryDirectory(prefix="coresample-plan-") as name:
        folder = Path(name)
        parquet, dropped = folder / "plan.parquet", folder / "dropped.jsonl"
        with SampleSpool(folder) as spool:
            with dropped.open("w", encoding="utf-8") as drops:
                for item in items:
                    tally.add(item)
                    if isinstance(item, Dropped):
                        drops.write(_drop_line(item))
                    elif (sample_id := item.sample_id) in seen:
                        drops.write(_duplicate_line(item))
                    else:
                        seen.add(sample_id)
                        grouping.add(sample_id, spool.add(item))
                        supervised += int(np.count_nonzero(item.loss_mask))
            del seen
            spool.close()
            tally.raise_if_unusable()
            new = _new_shards(spool, grouping.new, max(1, shard_bytes // spec.row_bytes), share=spec.shares)
            pieces = grouping.pieces(new, f"{root.url}/{layout.commits_dir(spec.fingerprint)}")
            shards, computed = _write(parquet, spool, pieces, share=spec.shares)
            digest = file_digest(parquet)
            meta = _meta(
                spec, tally, spool, shards, computed=computed, supervised=supervised, digest=digest, base=base.digest
            )
        _publish_plan(root, meta, parquet, dropped, exact=not pinned.places)
    plan = load_plan(root, meta.fingerprint)
    assert plan is not None
    return plan


class _Piece(NamedTuple):
    """Samples of one shard of the plan, by number and in its order.

    ``common`` is what each has in common with the one before it, where they are in the order of the trie.
    """

    samples: Ints
    common: Ints | None = None
    source: ShardSource | None = None

    def part(self, start: int, stop: int) -> _Piece:
        return _Piece(self.samples[start:stop], None if self.common is None else self.common[start:stop], self.source)


def _new_shards(spool: SampleSpool, numbers: Ints, most_rows: int, *, share: bool) -> list[_Piece]:
    """Shards of the samples that nothing holds yet."""
    common = np.zeros(len(numbers), dtype=np.int64)
    if share:
        order, common = trie_order(spool.token_ids, spool.offsets[numbers], spool.lengths[numbers], spool.release)
        numbers = numbers[order]
    lengths = spool.lengths[numbers].tolist()
    cuts = into_shards(
        lengths, common.tolist(), most_rows=most_rows, most_samples=MOST_SAMPLES, most_tokens=MOST_TOKENS
    )
    whole = _Piece(numbers, common if share else None)
    return [whole.part(start, stop) for start, stop in cuts]


class _Grouping:
    """Says which samples share a shard because something holds them already; the others are ``new``."""

    def __init__(self, base: Base, pinned: Pins):
        self._base, self._pinned = base, pinned
        self._fixed: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._stored: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._new: list[int] = []

    def add(self, sample_id: str, number: int) -> None:
        """One sample; in its shard it stands by its place in the file, then by arrival."""
        if (pin := self._pinned.places.get(sample_id)) is not None:
            self._fixed[pin[0]].append((pin[1], number))
        elif (stored := self._base.places.get(sample_id)) is not None:
            self._stored[stored[0]].append((stored[1], number))
        else:
            self._new.append(number)

    @property
    def new(self) -> Ints:
        """Numbers of the samples that nothing holds."""
        return np.array(self._new, dtype=np.int64)

    def pieces(self, new: list[_Piece], where: str) -> list[_Piece]:
        """What each shard consists of; pinned ones have the index of their commit record, the others what is free."""
        fixed = {n: _Piece(_by_place(m), source=self._pinned.sources.get(n)) for n, m in self._fixed.items()}
        rest = [_Piece(_by_place(m), source=self._base.sources[n]) for n, m in sorted(self._stored.items())]
        rest += new
        gaps = max(self._pinned.sources, default=-1) + 1 - len(fixed)
        while len(rest) < gaps:
            _split(rest, where)
        left = iter(rest)
        return [fixed[n] if n in fixed else next(left) for n in range(len(fixed) + len(rest))]


def _by_place(members: list[tuple[int, int]]) -> Ints:
    return np.array([number for _, number in sorted(members)], dtype=np.int64)


def _split(rest: list[_Piece], where: str) -> None:
    """Shards are numbered without gaps, so commit records of later shards may ask for smaller ones before them."""
    at = max(range(len(rest)), key=lambda n: len(rest[n].samples), default=None)
    if at is None or len(rest[at].samples) < 2:
        raise CorruptDataError(
            f"{where} has commit records of more shards than the data has samples for; they are of another job. "
            "Restore plan.json from a backup, or remove that folder: its samples are then extracted again"
        )
    piece = rest[at]
    half, whole = len(piece.samples) // 2, len(piece.samples)
    rest[at : at + 1] = [piece.part(0, half), piece.part(half, whole)]


def _laid_out(spool: SampleSpool, piece: _Piece, *, share: bool) -> tuple[pa.ListArray, int, int]:
    """The column of segments of a shard, its rows, and how many tokens an engine computes for it."""
    made: FlatLayout
    if not share:
        made = one_after_another(spool.lengths[piece.samples])
    elif piece.common is not None:
        made = along_trie(spool.lengths[piece.samples].tolist(), piece.common.tolist())
    else:
        whole = lay_out(spool.sequences(piece.samples), share=True)
        return segments_array(whole.segments), whole.rows, whole.computed
    return segments_column(made.firsts, made.counts, made.sizes), made.rows, made.computed


def _write(parquet: Path, spool: SampleSpool, pieces: list[_Piece], *, share: bool) -> tuple[list[PlannedShard], int]:
    """One row group per shard, written beside the work on the next ones; also how many tokens an engine computes."""
    shards, computed = [], 0
    with (
        pq.ParquetWriter(
            parquet, PLAN_SCHEMA, compression=_COMPRESSION, use_dictionary=False, write_statistics=False
        ) as writer,
        ThreadPoolExecutor(1, "plan-writer") as beside,
    ):
        waiting: deque[Future[None]] = deque()
        for index, piece in enumerate(pieces):
            segments, rows, tokens = _laid_out(spool, piece, share=share)
            table = spool.table(piece.samples, index, segments)
            if len(waiting) == _WAITING:
                waiting.popleft().result()
            waiting.append(beside.submit(writer.write_table, table))
            shards.append(PlannedShard(index=index, rows=rows, samples=len(piece.samples), source=piece.source))
            computed += tokens
        spool.release()
        for one in waiting:
            one.result()
    return shards, computed


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


def _meta(
    spec: JobSpec,
    tally: Tally,
    spool: SampleSpool,
    shards: list[PlannedShard],
    *,
    computed: int,
    supervised: int,
    digest: str,
    base: str,
) -> PlanMeta:
    """What the plan says of its distinct samples, and of everything that was read."""
    powers, counts = np.unique(np.ceil(np.log2(spool.lengths)).astype(int), return_counts=True)
    return PlanMeta(
        fingerprint=spec.fingerprint,
        spec=spec.document,
        plan_sha256=digest,
        row_bytes=spec.row_bytes,
        shards=shards,
        input=tally.candidates,
        samples=len(spool.lengths),
        tokens=int(spool.lengths.sum()),
        rows=sum(shard.rows for shard in shards),
        computed=computed,
        supervised_tokens=supervised,
        truncated=spool.truncated,
        duplicates=tally.samples - len(spool.lengths),
        dropped={reason.value: count for reason, count in sorted(tally.dropped.items())},
        malformed=tally.malformed,
        mask_methods=dict(sorted(spool.methods.items())),
        length_histogram={str(2**power): count for power, count in zip(powers.tolist(), counts.tolist(), strict=True)},
        longest=int(spool.lengths.max()),
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
