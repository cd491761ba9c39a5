"""Verify a published version against its stored bytes: every checksum, count and invariant, all problems at once."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import xxhash

from extract_core.errors import CorruptDataError
from extract_core.planning.plan import read_plan_meta, sound_layout
from extract_core.store import layout
from extract_core.store.commits import DamagedRecord, read_commits
from extract_core.store.encoding import NONE
from extract_core.store.index import read_index
from extract_core.store.norms import read_norm
from extract_core.store.records import Manifest, ShardRef
from extract_core.store.root import Root
from extract_core.store.shard import ShardHeader, read_header
from extract_core.store.versions import latest_version, read_manifest

_CHUNK = 8 * 2**20
_NAMED = 5


@dataclass(frozen=True)
class Problem:
    """Something that is not as it must be: in which object, for which sample, and what was expected instead.

    ``samples`` are all that the object holds, where all of them may be affected.
    """

    object: str
    what: str
    expected: str = ""
    found: str = ""
    sample: str | None = None
    samples: tuple[str, ...] = ()

    def __str__(self) -> str:
        sample = f", sample {self.sample}" if self.sample is not None else ""
        values = f": expected {self.expected}, found {self.found}" if self.expected or self.found else ""
        more = f" and {len(self.samples) - _NAMED:,} more" if len(self.samples) > _NAMED else ""
        held = f" (samples in it: {', '.join(self.samples[:_NAMED])}{more})" if self.samples else ""
        return f"{self.object}{sample}: {self.what}{values}{held}"


@dataclass
class VerifyReport:
    """What was read and what is wrong with it."""

    root: str
    version: int | None = None
    problems: list[Problem] = field(default_factory=list)
    shards: int = 0
    samples: int = 0
    tokens: int = 0
    segments: int = 0
    bytes_read: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"ok": self.ok, **asdict(self)}

    def add(
        self,
        object: str,
        what: str,
        expected: object = "",
        found: object = "",
        sample: str | None = None,
        samples: tuple[str, ...] = (),
    ) -> None:
        """Note a problem."""
        self.problems.append(Problem(object, what, str(expected), str(found), sample, samples))


@dataclass(frozen=True)
class _Use:
    """A segment as a sample uses it; ``token_ids`` is what the index says about its positions."""

    sample: str
    first_row: int
    rows: int
    byte_offset: int
    byte_length: int
    xxh3: str
    token_ids: np.ndarray[Any, Any]


Progress = Callable[[int, int, str], None]


def verify(root: Root, version: int | None = None, *, on_progress: Progress | None = None) -> VerifyReport:
    """Read all bytes of a version and hold them against manifest, index and shard headers.

    Args:
        root: local or remote; each shard is read once, a few MiB at a time.
        version: the latest when None.
        on_progress: called with bytes done, bytes in all and the object being read.

    Raises:
        StoreError: there is no such version, or the store cannot be read. Damage is never raised, always reported.
    """
    report = VerifyReport(root.url)
    wanted = version if version is not None else latest_version(root)
    try:
        manifest = read_manifest(root, wanted)
    except CorruptDataError as error:
        report.version = wanted
        report.add(layout.manifest_path(wanted or 1), str(error))
        return report
    report.version = manifest.version
    _verify_norm(root, manifest, report)
    _verify_plan(root, manifest, report)
    uses = _read_samples(root, manifest, report)
    total, done = sum(shard.nbytes for shard in manifest.shards), 0
    for shard in manifest.shards:

        def advance(count: int, name: str = shard.path) -> None:
            nonlocal done
            done += count
            report.bytes_read += count
            if on_progress is not None:
                on_progress(done, total, name)

        _verify_shard(root, manifest, shard, uses.pop(shard.sha256, []), report, advance)
        report.shards += 1
    for digest, lost in uses.items():
        for use in lost:
            report.add(
                manifest.index.path, f"refers to shard {digest}, which the manifest does not list", sample=use.sample
            )
    return report


def _verify_norm(root: Root, manifest: Manifest, report: VerifyReport) -> None:
    norm = manifest.final_norm
    if norm is None or norm.path is None:
        return
    try:
        read_norm(root, norm, manifest.hidden_size)
    except CorruptDataError as error:
        report.add(norm.path, str(error))


def _verify_plan(root: Root, manifest: Manifest, report: VerifyReport) -> None:
    """The plan and commit records that the version was made from, as far as they are there."""
    fingerprint = manifest.fingerprint
    name = layout.plan_meta_path(fingerprint)
    try:
        meta = read_plan_meta(root, fingerprint)
        if meta is not None:
            name = layout.plan_path(fingerprint, meta.plan_sha256)
            sound_layout(root, meta)
    except CorruptDataError as error:
        report.add(name, str(error))
    damaged: list[DamagedRecord] = []
    read_commits(root, fingerprint, damaged=damaged)
    for item in damaged:
        report.add(item.path, str(item.error))


def _read_samples(root: Root, manifest: Manifest, report: VerifyReport) -> dict[str, list[_Use]]:
    """Check the index; what each shard must hold, by digest."""
    name = manifest.index.path
    uses: dict[str, list[_Use]] = defaultdict(list)
    try:
        table = read_index(root, manifest)
    except CorruptDataError as error:
        report.add(name, str(error))
        return uses
    seen: set[str] = set()
    layers = len(manifest.layer_ids)
    columns = ["sample_id", "n_tokens", "token_ids", "loss_mask", "segments", "norm_mean", "norm_max"]
    for batch in table.select(columns).to_batches(max_chunksize=1024):
        ids, masks = batch.column("token_ids"), batch.column("loss_mask")
        for i, row in enumerate(
            batch.select(["sample_id", "n_tokens", "segments", "norm_mean", "norm_max"]).to_pylist()
        ):
            sample, count = row["sample_id"], row["n_tokens"]
            # As they lie in the index, not copied: a million samples have a billion tokens.
            tokens, mask = (column[i].values.to_numpy(zero_copy_only=False) for column in (ids, masks))
            report.samples += 1
            report.tokens += count
            if sample in seen:
                report.add(name, "sample is listed twice", sample=sample)
            seen.add(sample)
            lengths = {"token_ids": len(tokens), "loss_mask": len(mask)}
            lengths["rows"] = sum(segment["rows"] for segment in row["segments"])
            for what, length in lengths.items():
                if length != count:
                    report.add(name, f"wrong number of {what}", count, length, sample)
            if count < 1 or not np.isin(mask, (0, 1)).all():
                report.add(
                    name, "loss mask has values other than 0 and 1", "0 or 1", sorted(set(mask.tolist())), sample
                )
            for what in ("norm_mean", "norm_max"):
                if len(row[what]) != layers or not np.isfinite(row[what]).all():
                    report.add(name, f"{what} is not one finite number per layer", layers, row[what], sample)
            at = 0
            for segment in row["segments"]:
                digest = segment.pop("shard")
                uses[digest].append(_Use(sample, **segment, token_ids=tokens[at : at + segment["rows"]]))
                at += segment["rows"]
                report.segments += 1
    totals = manifest.totals
    for what, expected, found in (
        ("samples", totals.samples, report.samples),
        ("tokens", totals.tokens, report.tokens),
        ("published samples", manifest.accounting.published, report.samples),
    ):
        if expected != found:
            report.add(layout.manifest_path(manifest.version), f"wrong number of {what}", expected, found)
    return uses


def _verify_shard(
    root: Root,
    manifest: Manifest,
    shard: ShardRef,
    uses: Sequence[_Use],
    report: VerifyReport,
    advance: Callable[[int], None],
) -> None:
    name = shard.path
    held = tuple(dict.fromkeys(use.sample for use in uses))
    try:
        size = root.size(name)
    except FileNotFoundError:
        report.add(name, "shard is missing", f"{shard.nbytes} bytes", "nothing", samples=held)
        return
    if size != shard.nbytes:
        report.add(name, "wrong size in bytes", shard.nbytes, size)
    header: ShardHeader | None = None
    try:
        header = read_header(lambda start, stop: root.read_range(name, start, stop), size, root.describe(name))
    except CorruptDataError as error:
        report.add(name, str(error))
    if header is not None:
        for what, expected, found in (
            ("rows", shard.rows, header.rows),
            ("layer ids", manifest.layer_ids, list(header.layer_ids)),
            ("hidden size", manifest.hidden_size, header.hidden_size),
            ("dtype", manifest.dtype, header.dtype),
            ("encoding", manifest.encoding, header.encoding),
        ):
            if expected != found:
                report.add(name, f"header has other {what} than the manifest", expected, found)

    scan = _Scan({(use.byte_offset, use.byte_length): use.rows for use in uses}, header, name)
    for chunk in _chunks(root, name, size):
        scan.feed(chunk)
        advance(len(chunk))
    digest, sums, tokens = scan.sha256, scan.sums, scan.token_ids
    places: dict[tuple[int, int], tuple[int, int]] = {}
    if header is not None:
        places = _places(header, scan.table, uses, name, report)
    if digest != shard.sha256:
        report.add(name, "sha256 differs", shard.sha256, digest, samples=held)
    _verify_apart(uses, name, report)
    for use in uses:
        rows = f"rows {use.first_row}..{use.first_row + use.rows}"
        checksum = sums.get((use.byte_offset, use.byte_length))
        if checksum is None:
            report.add(name, f"{rows} lie outside the file", f"{use.byte_length} bytes", f"{size} bytes", use.sample)
        elif checksum != use.xxh3:
            report.add(name, f"xxh3 of {rows} differs", use.xxh3, checksum, use.sample)
        if header is None:
            continue
        place = places.get((use.first_row, use.rows), "no such segment")
        if place != (use.byte_offset, use.byte_length) or use.first_row + use.rows > header.rows:
            report.add(name, f"byte range of {rows}", place, (use.byte_offset, use.byte_length), use.sample)
        elif checksum == use.xxh3 and (use.byte_offset, use.byte_length) in scan.undecodable:
            report.add(name, scan.undecodable[use.byte_offset, use.byte_length], sample=use.sample)
        stored = tokens[use.first_row : use.first_row + use.rows]
        if not np.array_equal(stored, use.token_ids):
            at = next((i for i, (a, b) in enumerate(zip(stored, use.token_ids, strict=False)) if a != b), len(stored))
            wanted, got = (int(values[at]) if at < len(values) else "nothing" for values in (use.token_ids, stored))
            report.add(name, f"token id of row {use.first_row + at} differs from the index", wanted, got, use.sample)


def _verify_apart(uses: Sequence[_Use], name: str, report: VerifyReport) -> None:
    """Samples use a segment as a whole or not at all."""
    owners = {(use.first_row, use.rows): use.sample for use in reversed(uses)}
    furthest, before = 0, (0, 0)
    for first, rows in sorted(owners):
        if first < furthest:
            report.add(
                name,
                f"rows {first}..{first + rows} are a segment that overlaps another",
                "segments that are the same or apart",
                f"rows {before[0]}..{sum(before)} of sample {owners[before]}",
                owners[first, rows],
            )
        if first + rows > furthest:
            furthest, before = first + rows, (first, rows)


def _chunks(root: Root, name: str, size: int) -> Iterator[memoryview]:
    for start in range(0, size, _CHUNK):
        yield memoryview(root.read_range(name, start, min(start + _CHUNK, size)))


def _places(
    header: ShardHeader, table: bytes, uses: Sequence[_Use], name: str, report: VerifyReport
) -> dict[tuple[int, int], tuple[int, int]]:
    """Byte ranges of the segments: first row and rows to offset and length."""
    if header.encoding == NONE:
        width = header.row_bytes
        return {(u.first_row, u.rows): (header.data_offset + u.first_row * width, u.rows * width) for u in uses}
    try:
        rows = header.parse_table(table, name).tolist()
    except CorruptDataError as error:
        report.add(name, str(error))
        return {}
    return {(first, count): (header.data_offset + offset, length) for first, count, offset, length, _ in rows}


class _Scan:
    """One pass over an object: its sha256, the xxh3_64 of every span that it holds whole, frame table and token ids.

    Encoded spans are decoded as well, one at a time: a checksum only says that they are as they were written.
    """

    def __init__(self, rows: Mapping[tuple[int, int], int], header: ShardHeader | None, name: str) -> None:
        self._rows, self._spans = rows, sorted(rows)
        self._header, self._name = header, name
        self._decodes = header is not None and header.encoding != NONE
        self._whole = hashlib.sha256()
        self._at = self._waiting = 0
        self._active: list[tuple[tuple[int, int], xxhash.xxh3_64, bytearray]] = []
        self._tail = bytearray()
        self.sums: dict[tuple[int, int], str] = {}
        self.undecodable: dict[tuple[int, int], str] = {}

    def feed(self, chunk: memoryview) -> None:
        """The next bytes."""
        start, stop = self._at, self._at + len(chunk)
        self._at = stop
        self._whole.update(chunk)
        while self._waiting < len(self._spans) and self._spans[self._waiting][0] < stop:
            self._active.append((self._spans[self._waiting], xxhash.xxh3_64(), bytearray()))
            self._waiting += 1
        still = []
        for span, checksum, frame in self._active:
            first, end = span[0], span[0] + span[1]
            part = chunk[max(first - start, 0) : max(min(end, stop) - start, 0)]
            checksum.update(part)
            if self._decodes:
                frame += part
            if end <= stop:
                self.sums[span] = checksum.hexdigest()
                if self._decodes:
                    self._decode(span, frame)
            else:
                still.append((span, checksum, frame))
        self._active = still
        if self._header is not None and stop > self._header.table_offset:
            self._tail += chunk[max(self._header.table_offset - start, 0) :]

    def _decode(self, span: tuple[int, int], frame: bytearray) -> None:
        assert self._header is not None
        try:
            self._header.format.decode(frame, self._rows[span], self._name)
        except CorruptDataError as error:
            self.undecodable[span] = str(error)

    @property
    def sha256(self) -> str:
        """Of everything fed."""
        return self._whole.hexdigest()

    @property
    def table(self) -> bytes:
        """Bytes of the frame table."""
        return bytes(self._tail[: self._header.table_bytes]) if self._header is not None else b""

    @property
    def token_ids(self) -> np.ndarray[Any, Any]:
        """Token ids of all rows, int32."""
        if self._header is None:
            return np.empty(0, "<i4")
        return np.frombuffer(bytes(self._tail[self._header.table_bytes :]), dtype="<i4")
