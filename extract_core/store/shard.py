"""Shard files: safetensors files whose rows are written in any order, each at its final place.

Layout of a shard: 8 bytes header length, JSON header padded with spaces to ``HEADER_BYTES``, then ``hidden_states``
``[rows, L, H]``, then ``token_ids`` ``[rows]`` int32. Because the header has a fixed size, the body can be written
before anything about the header is known, and rows start on a page boundary. safetensors allows neither holes nor
tensors off their natural alignment, so two bytes of ``padding`` come in between where an odd number of 16-bit values
needs them.

Until ``seal_shard`` has run, the header length is 0 (no reader opens such a file) and the header space holds a note of
the shape, so that a process other than the writer can seal the file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from extract_core.errors import CorruptDataError, StoreError
from extract_core.store.root import failure

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 64 * 2**10
"""Size of the reserved header with its length field: where the first row starts."""

DTYPES: Mapping[str, tuple[str, int]] = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
"""Names of row dtypes: safetensors name and bytes per value."""

HIDDEN_STATES, TOKEN_IDS, PADDING = "hidden_states", "token_ids", "padding"
RESERVED_METADATA = frozenset({"format", "layer_ids", "encoding", "schema_version"})

_WRITE_CHUNK = 2**20  # larger buffered writes are slower (measured, see the storage notes)
_READ_CHUNK = 4 * 2**20
_MAX_HEADER = 100 * 2**20  # the limit of the safetensors format


@dataclass(frozen=True)
class Segment:
    """Rows ``first_row`` to ``first_row + rows``, excluded."""

    first_row: int
    rows: int


@dataclass(frozen=True)
class SealedSegment:
    """A segment of a finished shard: its rows, its bytes in the file, and the xxh3_64 of these bytes in hex."""

    first_row: int
    rows: int
    byte_offset: int
    byte_length: int
    xxh3: str


@dataclass(frozen=True)
class SealedShard:
    """A finished shard file, still under its temporary name."""

    path: Path
    sha256: str
    nbytes: int
    rows: int
    segments: list[SealedSegment]


@dataclass(frozen=True)
class ShardHeader:
    """What the header of a shard says; offsets are absolute in the file."""

    rows: int
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    data_offset: int
    tokens_offset: int
    nbytes: int
    metadata: Mapping[str, str]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return len(self.layer_ids) * self.hidden_size * DTYPES[self.dtype][1]


class _Shape:
    """Sizes and offsets that follow from the shape of a shard."""

    def __init__(self, rows: int, layers: int, hidden_size: int, dtype: str) -> None:
        self.rows, self.layers, self.hidden_size, self.dtype = rows, layers, hidden_size, dtype
        self.row_bytes = layers * hidden_size * DTYPES[dtype][1]
        self.data_bytes = rows * self.row_bytes
        self.padding = -self.data_bytes % 4
        self.tokens_offset = HEADER_BYTES + self.data_bytes + self.padding
        self.nbytes = self.tokens_offset + 4 * rows

    def tensors(self) -> dict[str, Any]:
        """Header entries; offsets there count from the end of the header."""
        end = self.data_bytes + self.padding
        entries: dict[str, Any] = {
            HIDDEN_STATES: {
                "dtype": DTYPES[self.dtype][0],
                "shape": [self.rows, self.layers, self.hidden_size],
                "data_offsets": [0, self.data_bytes],
            },
            TOKEN_IDS: {"dtype": "I32", "shape": [self.rows], "data_offsets": [end, end + 4 * self.rows]},
        }
        if self.padding:
            entries[PADDING] = {"dtype": "U8", "shape": [self.padding], "data_offsets": [self.data_bytes, end]}
        return entries


class ShardWriter:
    """Writes rows of one shard at their final places; every method may be called from many threads.

    Args:
        path: file to create, under a temporary name; the folder must exist.
        rows: number of rows.
        layer_ids: ascending layer ids; their number is L.
        hidden_size: H.
        dtype: "bfloat16", "float16" or "float32".

    Raises:
        NoSpaceError: the whole file does not fit on the disk; nothing is left behind.
        StoreError: the file cannot be created.
    """

    row_bytes: int
    """Bytes of one row: L * H * itemsize."""

    def __init__(self, path: Path, *, rows: int, layer_ids: Sequence[int], hidden_size: int, dtype: str) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} cannot be stored; one of {', '.join(DTYPES)}")
        if rows < 1 or hidden_size < 1:
            raise ValueError(f"a shard needs rows and channels, got rows={rows}, hidden_size={hidden_size}")
        if not layer_ids or list(layer_ids) != sorted(set(layer_ids)) or layer_ids[0] < 0:
            raise ValueError(f"layer ids must be distinct, ascending and not negative, got {list(layer_ids)}")
        self.path = Path(path)
        self._shape = _Shape(rows, len(layer_ids), hidden_size, dtype)
        self.rows, self.row_bytes = rows, self._shape.row_bytes
        self._written = np.zeros(rows, dtype=bool)
        note = {"rows": rows, "layer_ids": [int(k) for k in layer_ids], "hidden_size": hidden_size, "dtype": dtype}
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise failure(error, "create shard", str(self.path)) from error
        try:
            _reserve(self._fd, self._shape.nbytes)
            _write_note(self._fd, note)
        except OSError as error:
            self.abort()
            raise failure(error, f"reserve {self._shape.nbytes} bytes for shard", str(self.path)) from error

    def write_rows(self, first_row: int, data: memoryview) -> None:
        """Put whole rows at their place.

        Args:
            first_row: row number of the first one.
            data: contiguous bytes of rows ``[n, L, H]`` in the shard's dtype.

        Raises:
            ValueError: not whole rows, or outside the shard.
            NoSpaceError, StoreError: the bytes could not be written.
        """
        view = memoryview(data).cast("B")
        rows, rest = divmod(view.nbytes, self.row_bytes)
        if rest:
            raise ValueError(f"{view.nbytes} bytes are not whole rows of {self.row_bytes} bytes")
        self._check(first_row, rows)
        self._write(HEADER_BYTES + first_row * self.row_bytes, view)
        self._written[first_row : first_row + rows] = True

    def write_token_ids(self, first_row: int, token_ids: np.ndarray[Any, Any]) -> None:
        """Put the token ids (any integer type that int32 holds) of rows from ``first_row`` on at their place."""
        if token_ids.ndim != 1 or not np.issubdtype(token_ids.dtype, np.integer):
            raise ValueError(f"token ids must be one row of integers, got {token_ids.dtype}{list(token_ids.shape)}")
        if token_ids.size and (token_ids.min() < 0 or token_ids.max() > np.iinfo(np.int32).max):
            raise ValueError("token ids must be from 0 to 2**31 - 1")
        self._check(first_row, token_ids.size)
        values = np.ascontiguousarray(token_ids, dtype="<i4")
        self._write(self._shape.tokens_offset + 4 * first_row, memoryview(values.tobytes()))

    def missing(self) -> list[Segment]:
        """Ranges of rows that ``write_rows`` has not been given yet, ascending."""
        edges = np.flatnonzero(np.diff(np.concatenate(([True], self._written, [True])).astype(np.int8)))
        return [Segment(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def close(self) -> None:
        """Close the file; no thread may be writing. ``seal_shard`` makes it durable and readable."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError as error:
                raise failure(error, "close shard", str(self.path)) from error

    def abort(self) -> None:
        """Close and remove the file."""
        with contextlib.suppress(StoreError):
            self.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _check(self, first_row: int, rows: int) -> None:
        if first_row < 0 or first_row + rows > self.rows:
            raise ValueError(f"rows {first_row}..{first_row + rows} are outside the shard of {self.rows} rows")

    def _write(self, offset: int, view: memoryview) -> None:
        fd = self._fd
        if fd < 0:
            raise StoreError(f"shard {self.path} is closed; rows cannot be added any more")
        try:
            _pwrite(fd, offset, view)
        except OSError as error:
            raise failure(error, "write shard", str(self.path)) from error


def seal_shard(path: Path, *, keep: Sequence[Segment] | None, metadata: Mapping[str, str]) -> SealedShard:
    """Finish a shard whose rows are all in: header, compaction, fsync, digests.

    Args:
        path: the file that a ShardWriter wrote and closed.
        keep: segments to keep, in any order, none overlapping another; other rows are removed and the rest moves
            together in file order. None keeps everything as one segment.
        metadata: provenance strings for the header. The digest covers them, so what differs between attempts (times,
            host names) belongs into the commit record.

    Returns:
        the digest and size of the file, and for every entry of ``keep``, in its order, the new place and xxh3_64.

    Raises:
        CorruptDataError: not an unsealed shard, or of the wrong size, or an earlier sealing was interrupted.
        ValueError: ``keep`` overlaps, is empty or outside; the metadata does not fit into the header.
        NoSpaceError, StoreError: the file cannot be written.
    """
    path = Path(path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise failure(error, "open shard", str(path)) from error
    try:
        old, layer_ids = _read_note(fd, path)
        wanted = [Segment(0, old.rows)] if keep is None else list(keep)
        order = _file_order(wanted, old.rows)
        new = _Shape(sum(segment.rows for segment in wanted), old.layers, old.hidden_size, old.dtype)
        header = _encode_header(new, layer_ids, metadata)
        place = dict(zip(order, accumulate((wanted[i].rows for i in order), initial=0), strict=False))
        if new.rows != old.rows:
            _compact(fd, old, new, [(wanted[i], place[i]) for i in order])
        _pwrite(fd, 0, memoryview(header))
        os.fsync(fd)
        spans = [(HEADER_BYTES + place[i] * new.row_bytes, wanted[i].rows * new.row_bytes) for i in order]
        sha256, sums = _digests(fd, new.nbytes, spans)
    except OSError as error:
        raise failure(error, "seal shard", str(path)) from error
    finally:
        os.close(fd)
    checksum = dict(zip(order, sums, strict=True))
    segments = [
        SealedSegment(
            place[i], segment.rows, HEADER_BYTES + place[i] * new.row_bytes, segment.rows * new.row_bytes, checksum[i]
        )
        for i, segment in enumerate(wanted)
    ]
    return SealedShard(path, sha256, new.nbytes, new.rows, segments)


class ShardReader:
    """A finished shard on a local disk, memory-mapped: tensors share the file's pages.

    Writing to a returned tensor changes this process's copy of the page, never the file.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptDataError: not a whole shard.
    """

    def __init__(self, path: Path) -> None:
        import torch

        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.header = read_header(
                    lambda start, stop: os.pread(file.fileno(), stop - start, start), size, str(path)
                )
                self._map = mmap.mmap(
                    file.fileno(),
                    self.header.nbytes,
                    flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000),
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
        except FileNotFoundError:
            raise
        except OSError as error:
            raise failure(error, "read shard", str(path)) from error
        header = self.header
        layers = len(header.layer_ids)
        self._rows: torch.Tensor = torch.frombuffer(
            self._map,
            dtype=getattr(torch, header.dtype),
            count=header.rows * layers * header.hidden_size,
            offset=header.data_offset,
        ).view(header.rows, layers, header.hidden_size)
        self._tokens: torch.Tensor = torch.frombuffer(
            self._map, dtype=torch.int32, count=header.rows, offset=header.tokens_offset
        )

    @property
    def metadata(self) -> Mapping[str, str]:
        """Strings in the file's header."""
        return self.header.metadata

    def rows(self, first_row: int, rows: int) -> torch.Tensor:
        """Rows as ``[rows, L, H]`` in the stored dtype, without a copy."""
        self._check(first_row, rows)
        return self._rows[first_row : first_row + rows]

    def token_ids(self, first_row: int, rows: int) -> torch.Tensor:
        """Token ids as int32 ``[rows]``, without a copy."""
        self._check(first_row, rows)
        return self._tokens[first_row : first_row + rows]

    def _check(self, first_row: int, rows: int) -> None:
        if first_row < 0 or rows < 0 or first_row + rows > self.header.rows:
            raise CorruptDataError(
                f"{self.path} has {self.header.rows} rows; rows {first_row}..{first_row + rows} were asked for"
            )


def read_header(read: Callable[[int, int], bytes], size: int, where: str) -> ShardHeader:
    """Parse and check the header of a finished shard.

    Args:
        read: gives the bytes from start (included) to stop (excluded) of the file.
        size: size of the file in bytes.
        where: the shard's path or URL, for messages.

    Raises:
        CorruptDataError: says what is wrong with the header.
    """

    def corrupt(problem: str) -> CorruptDataError:
        return CorruptDataError(f"shard {where}: {problem}; the file is damaged or no finished shard")

    if size < 8:
        raise corrupt(f"{size} bytes are too few for a safetensors file")
    start = read(0, min(size, HEADER_BYTES))
    length = int.from_bytes(start[:8], "little")
    if not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise corrupt(f"header length {length} is impossible in a file of {size} bytes")
    text = start[8 : 8 + length] if 8 + length <= len(start) else read(8, 8 + length)
    try:
        entries = json.loads(text.decode("utf-8"))
        metadata = entries.pop("__metadata__")
        rows, layers, hidden_size = entries[HIDDEN_STATES]["shape"]
        dtype = {short: name for name, (short, _) in DTYPES.items()}[entries[HIDDEN_STATES]["dtype"]]
        layer_ids = tuple(json.loads(metadata["layer_ids"]))
        if metadata["encoding"] != "none":
            raise corrupt(f"encoding {metadata['encoding']!r} is unknown to this version of Coresample")
        if len(layer_ids) != layers or not all(isinstance(k, int) for k in layer_ids):
            raise corrupt(f"{layers} layers but layer ids {list(layer_ids)}")
        shape = _Shape(rows, layers, hidden_size, dtype)
        if entries != shape.tensors():
            raise corrupt(f"tensors {entries} are not laid out as a shard's")
    except CorruptDataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt(f"its header cannot be read ({type(error).__name__}: {error})") from error
    shift = 8 + length - HEADER_BYTES
    if size != shape.nbytes + shift:
        raise corrupt(f"{shape.nbytes + shift} bytes are expected from its header, the file has {size}")
    return ShardHeader(
        rows, layer_ids, hidden_size, dtype, 8 + length, shape.tokens_offset + shift, shape.nbytes + shift, metadata
    )


def _encode_header(shape: _Shape, layer_ids: Sequence[int], metadata: Mapping[str, str]) -> bytes:
    taken = RESERVED_METADATA.intersection(metadata)
    if taken:
        raise ValueError(f"metadata keys {sorted(taken)} are written by the shard itself")
    own = {"format": "pt", "encoding": "none", "schema_version": "1", "layer_ids": json.dumps(list(layer_ids))}
    entries = {"__metadata__": dict(sorted({**metadata, **own}.items())), **shape.tensors()}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    room = HEADER_BYTES - 8
    if len(text) > room:
        raise ValueError(f"metadata makes a header of {len(text)} bytes; {room} are reserved, store a digest instead")
    return room.to_bytes(8, "little") + text.ljust(room)


def _write_note(fd: int, note: Mapping[str, Any]) -> None:
    text = json.dumps(note).encode().ljust(4096 - 8)
    _pwrite(fd, 0, memoryview(bytes(8) + text))


def _read_note(fd: int, path: Path) -> tuple[_Shape, list[int]]:
    try:
        start = os.pread(fd, 4096, 0)
        if int.from_bytes(start[:8], "little") != 0:
            raise ValueError("it is sealed already")
        note = json.loads(start[8:])
        if note == "compacting":
            raise ValueError("an earlier sealing was interrupted; remove it and extract the shard again")
        shape = _Shape(note["rows"], len(note["layer_ids"]), note["hidden_size"], note["dtype"])
        size = os.fstat(fd).st_size
        if size != shape.nbytes:
            raise ValueError(f"it has {size} bytes, {shape.nbytes} are expected")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(f"{path} is no unsealed shard: {error}") from error
    return shape, note["layer_ids"]


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


def _compact(fd: int, old: _Shape, new: _Shape, moves: Sequence[tuple[Segment, int]]) -> None:
    """Move kept rows together, in place and front to back, so that nothing is overwritten before it has been read."""
    _pwrite(fd, 8, memoryview(json.dumps("compacting").encode().ljust(4096 - 8)))
    os.fsync(fd)
    tokens = b"".join(
        _pread_all(fd, old.tokens_offset + 4 * segment.first_row, 4 * segment.rows) for segment, _ in moves
    )
    for segment, place in moves:
        source = HEADER_BYTES + segment.first_row * old.row_bytes
        target = HEADER_BYTES + place * new.row_bytes
        if source == target:
            continue
        for done in range(0, segment.rows * old.row_bytes, _WRITE_CHUNK):
            size = min(_WRITE_CHUNK, segment.rows * old.row_bytes - done)
            _pwrite(fd, target + done, memoryview(_pread_all(fd, source + done, size)))
    _pwrite(fd, HEADER_BYTES + new.data_bytes, memoryview(bytes(new.padding) + tokens))
    os.ftruncate(fd, new.nbytes)


def _digests(fd: int, size: int, spans: Sequence[tuple[int, int]]) -> tuple[str, list[str]]:
    """sha256 of a file and xxh3_64 of byte spans in it (ascending, not overlapping), reading every byte once."""
    whole, sums = hashlib.sha256(), []
    buffer = memoryview(bytearray(_READ_CHUNK))

    def feed(start: int, stop: int, extra: xxhash.xxh3_64 | None) -> None:
        while start < stop:
            got = os.preadv(fd, [buffer[: min(_READ_CHUNK, stop - start)]], start)
            if not got:
                raise OSError(errno.EIO, "the file ends too early")
            whole.update(buffer[:got])
            if extra is not None:
                extra.update(buffer[:got])
            start += got

    at = 0
    for start, length in spans:
        feed(at, start, None)
        one = xxhash.xxh3_64()
        feed(start, start + length, one)
        sums.append(one.hexdigest())
        at = start + length
    feed(at, size, None)
    return whole.hexdigest(), sums


def _reserve(fd: int, size: int) -> None:
    """Give a file its size and, where the file system can, its blocks: a full disk shows now, not in mid-shard."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)


def _pwrite(fd: int, offset: int, view: memoryview) -> None:
    at = 0
    while at < view.nbytes:
        at += os.pwrite(fd, view[at : at + _WRITE_CHUNK], offset + at)


def _pread_all(fd: int, offset: int, size: int) -> bytes:
    data = os.pread(fd, size, offset)
    while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            raise OSError(errno.EIO, "the file ends too early")
        data += more
    return data
