"""Turns a file full of rows into a finished shard: compaction, encoding, header, digests, fsync.

Three ways, by what the bytes need:

* rows stay as they are and where they are: sealed in place, only the header is new;
* rows stay as they are but go to another file system (a spool in memory): copied past the page cache, digests on the
  way;
* rows are encoded: frames are written to a new file, and its digest is taken when the header is in.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash

from extract_core.store.direct import DirectWriter
from extract_core.store.encoding import NONE, Encoding, FrameEncoder
from extract_core.store.failures import failure
from extract_core.store.layout import SHARDS, TEMP_PREFIX
from extract_core.store.root import Root
from extract_core.store.shard import (
    HEADER_BYTES,
    SealedSegment,
    SealedShard,
    Segment,
    Shape,
    encode_header,
)
from extract_core.store.writer import COMPACTING, pread_all, pwrite_all, read_note, write_note

_COPY_CHUNK = 2**20
_READ_CHUNK = 4 * 2**20

Digests = tuple[str, str]
"""sha256 and xxh3_128 of a file."""


def seal_shard(
    path: Path,
    *,
    keep: Sequence[Segment] | None,
    metadata: Mapping[str, str],
    encoding: Encoding = NONE,
    target: Path | None = None,
    durable: bool = True,
) -> SealedShard:
    """Finish a shard whose rows are all in.

    Args:
        path: the file that a ShardWriter wrote and closed.
        keep: segments to keep, in any order, none overlapping another; other rows are removed and the rest moves
            together in file order. None keeps everything as one segment.
        metadata: provenance strings for the header. The digest covers them, so what differs between attempts (times,
            host names) belongs into the commit record.
        encoding: how rows are stored.
        target: new file to make; ``path`` is then left as it is. None seals in place, which only encoding ``none`` can.
        durable: fsync; without it the bytes may still be on their way to the disk.

    Returns:
        the digest and size of the file, and for every entry of ``keep``, in its order, the new place and xxh3_64.

    Raises:
        CorruptDataError: not an unsealed shard, or of the wrong size, or an earlier sealing was interrupted.
        ValueError: ``keep`` overlaps, is empty or outside; the metadata does not fit into the header.
        NoSpaceError, StoreError: the file cannot be written; a target is removed.
    """
    path = Path(path)
    if encoding != NONE and target is None:
        raise ValueError(f"encoding {encoding} needs a target: rows cannot be encoded in place")
    try:
        fd = os.open(path, (os.O_RDWR if target is None else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise failure(error, "open shard", str(path)) from error
    try:
        source = _Source(fd, path, keep)
        if target is None:
            return source.in_place(metadata, durable)
        if encoding == NONE:
            return source.copied(target, metadata)
        return source.encoded(target, metadata, encoding, durable)
    except OSError as error:
        raise failure(error, "seal shard", str(target or path)) from error
    finally:
        os.close(fd)


def seal_target(root: Root, path: Path, encoding: Encoding) -> Path | None:
    """Where to seal a spool file to; None where it is best sealed in place.

    A file that must be written anew goes beside the shards of a local root at once where the spool is on another file
    system, so that storing it is a rename; else into the spool.
    """
    shards = root.local_path(SHARDS)
    if shards is not None:
        shards.mkdir(parents=True, exist_ok=True)
        if shards.stat().st_dev != path.stat().st_dev:
            return shards / f"{TEMP_PREFIX}{uuid.uuid4().hex}"
    return None if encoding == NONE else path.with_name(f"{path.stem}-sealed{path.suffix}")


class _Source:
    """An unsealed file and what is kept of it, in file order: ``moves`` are (old place, new first row)."""

    def __init__(self, fd: int, path: Path, keep: Sequence[Segment] | None) -> None:
        self.fd, self.path = fd, path
        self.old, self.layer_ids = read_note(fd, path)
        self.wanted = [Segment(0, self.old.rows)] if keep is None else list(keep)
        self.order = _file_order(self.wanted, self.old.rows)
        places = accumulate((self.wanted[i].rows for i in self.order), initial=0)
        self.moves = [(self.wanted[i], place) for i, place in zip(self.order, places, strict=False)]
        self.rows = sum(segment.rows for segment in self.wanted)

    def in_place(self, metadata: Mapping[str, str], durable: bool) -> SealedShard:
        new = self._shape()
        header = encode_header(new, self.layer_ids, metadata)
        if new.rows != self.old.rows:
            _compact(self.fd, self.old, new, self.moves)
        pwrite_all(self.fd, 0, memoryview(header))
        spans = [(HEADER_BYTES + place * new.row_bytes, old.rows * new.row_bytes) for old, place in self.moves]
        digests, sums = _synced(self.fd, new.nbytes, spans, durable)
        return self._sealed(self.path, digests, new, spans, sums)

    def copied(self, target: Path, metadata: Mapping[str, str]) -> SealedShard:
        new = self._shape()
        header = encode_header(new, self.layer_ids, metadata)
        whole, sums, spans = _Whole(), [], []
        whole.update(header)
        out = DirectWriter(target)
        try:
            out.write(header)
            for old, _ in self.moves:
                spans.append((out.nbytes, old.rows * new.row_bytes))
                one = xxhash.xxh3_64()
                for chunk in self._chunks(old, max(1, _READ_CHUNK // new.row_bytes)):
                    one.update(chunk)
                    whole.update(chunk)
                    out.write(chunk)
                sums.append(one.hexdigest())
            rest = bytes(new.padding) + self._tokens()
            whole.update(rest)
            out.write(rest)
            out.finish()
        except BaseException:
            out.abort()
            raise
        return self._sealed(target, whole.digests, new, spans, sums)

    def encoded(self, target: Path, metadata: Mapping[str, str], encoding: Encoding, durable: bool) -> SealedShard:
        encoder = FrameEncoder(self.old.layers, self.old.hidden_size)
        spans, sums, at = [], [], HEADER_BYTES
        fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with open(fd, "wb", buffering=_COPY_CHUNK, closefd=False) as file:
                file.seek(at)
                for old, _ in self.moves:
                    one, size = xxhash.xxh3_64(), 0
                    for chunk in self._chunks(old, encoder.block_rows):
                        bits = np.frombuffer(chunk, "<u2").reshape(-1, self.old.layers, self.old.hidden_size)
                        for piece in encoder.blocks(bits):
                            one.update(piece)
                            size += file.write(piece)
                    spans.append((at, size))
                    sums.append(one.hexdigest())
                    at += size
                new = self._shape((at - HEADER_BYTES, len(spans)))
                file.write(bytes(new.padding) + self._frame_table(spans, sums) + self._tokens())
            pwrite_all(fd, 0, memoryview(encode_header(new, self.layer_ids, metadata, encoding)))
            digests, _ = _synced(fd, new.nbytes, [], durable)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return self._sealed(target, digests, new, spans, sums)

    def _shape(self, frames: tuple[int, int] | None = None) -> Shape:
        return Shape(self.rows, self.old.layers, self.old.hidden_size, self.old.dtype, frames)

    def _chunks(self, segment: Segment, most_rows: int) -> Iterator[bytearray]:
        width = self.old.row_bytes
        for first in range(segment.first_row, segment.first_row + segment.rows, most_rows):
            rows = min(most_rows, segment.first_row + segment.rows - first)
            yield pread_all(self.fd, HEADER_BYTES + first * width, rows * width)

    def _tokens(self) -> bytes:
        start = self.old.tokens_offset
        return b"".join(pread_all(self.fd, start + 4 * old.first_row, 4 * old.rows) for old, _ in self.moves)

    def _frame_table(self, spans: Sequence[tuple[int, int]], sums: Sequence[str]) -> bytes:
        table = [
            (place, old.rows, offset - HEADER_BYTES, size, int(checksum, 16))
            for (old, place), (offset, size), checksum in zip(self.moves, spans, sums, strict=True)
        ]
        return np.array(table, "<u8").tobytes()

    def _sealed(
        self, path: Path, digests: Digests, new: Shape, spans: Sequence[tuple[int, int]], sums: Sequence[str]
    ) -> SealedShard:
        made = {
            i: SealedSegment(place, old.rows, offset, size, checksum)
            for i, (old, place), (offset, size), checksum in zip(self.order, self.moves, spans, sums, strict=True)
        }
        return SealedShard(path, *digests, new.nbytes, new.rows, [made[i] for i in range(len(self.wanted))])


def _file_order(wanted: Sequence[Segment], rows: int) -> list[int]:
    if not wanted:
        raise ValueError("no rows are kept; a shard without rows is not stored")
    order = sorted(range(len(wanted)), key=lambda i: wanted[i].first_row)
    end = 0
    for i in order:
        if wanted[i].rows < 1 or wanted[i].first_row < end or wanted[i].first_row + wanted[i].rows > rows:
            raise ValueError(f"{wanted[i]} is empty, overlaps another or ends outside the shard of {rows} rows")
        end = wanted[i].first_row + wanted[i].rows
    return order


def _compact(fd: int, old: Shape, new: Shape, moves: Sequence[tuple[Segment, int]]) -> None:
    """Move kept rows together, in place and front to back, so that nothing is overwritten before it has been read."""
    write_note(fd, COMPACTING)
    os.fsync(fd)
    tokens = b"".join(
        pread_all(fd, old.tokens_offset + 4 * segment.first_row, 4 * segment.rows) for segment, _ in moves
    )
    for segment, place in moves:
        source = HEADER_BYTES + segment.first_row * old.row_bytes
        target = HEADER_BYTES + place * new.row_bytes
        if source == target:
            continue
        for done in range(0, segment.rows * old.row_bytes, _COPY_CHUNK):
            size = min(_COPY_CHUNK, segment.rows * old.row_bytes - done)
            pwrite_all(fd, target + done, memoryview(pread_all(fd, source + done, size)))
    pwrite_all(fd, HEADER_BYTES + new.data_bytes, memoryview(bytes(new.padding) + tokens))
    os.ftruncate(fd, new.nbytes)


class _Whole:
    """Both digests of a file, fed front to back."""

    def __init__(self) -> None:
        self._sha256, self._xxh3 = hashlib.sha256(), xxhash.xxh3_128()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._sha256.update(data)
        self._xxh3.update(data)

    @property
    def digests(self) -> Digests:
        return self._sha256.hexdigest(), self._xxh3.hexdigest()


def _synced(fd: int, size: int, spans: Sequence[tuple[int, int]], durable: bool) -> tuple[Digests, list[str]]:
    """Digests of a file, taken while the system writes it to the disk."""
    if not durable:
        return _digests(fd, size, spans)
    with ThreadPoolExecutor(1, "fsync") as pool:
        written = pool.submit(os.fsync, fd)
        digests = _digests(fd, size, spans)
        written.result()
    return digests


def _digests(fd: int, size: int, spans: Sequence[tuple[int, int]]) -> tuple[Digests, list[str]]:
    """Digests of a file and xxh3_64 of byte spans in it (ascending, not overlapping), looking at every byte once."""
    if os.fstat(fd).st_size != size:
        raise OSError(errno.EIO, f"the file has {os.fstat(fd).st_size} bytes, {size} were written")
    whole, sums = _Whole(), []
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as pages, memoryview(pages) as data:

        def feed(start: int, stop: int, extra: xxhash.xxh3_64 | None = None) -> None:
            for at in range(start, stop, _READ_CHUNK):
                with data[at : min(at + _READ_CHUNK, stop)] as part:
                    whole.update(part)
                    if extra is not None:
                        extra.update(part)

        at = 0
        for start, length in spans:
            feed(at, start)
            one = xxhash.xxh3_64()
            feed(start, start + length, one)
            sums.append(one.hexdigest())
            at = start + length
        feed(at, size)
    return whole.digests, sums
