"""Shard files: what a safetensors file with the rows of many samples looks like, and how to read it.

Layout: 8 bytes header length, JSON header padded with spaces to ``HEADER_BYTES``, then the tensors without holes. With
encoding ``none``:

* ``hidden_states`` ``[rows, L, H]``,
* ``token_ids`` ``[rows]`` int32.

With any other encoding the rows are frames, one per segment, end to end in the order of their rows:

* ``frames`` uint8 ``[bytes]``,
* ``frame_table`` uint64 ``[segments, 5]``: first row, rows, first byte in ``frames``, bytes, xxh3_64 of these,
* ``token_ids`` ``[rows]`` int32,

and the header's metadata has ``shape`` ``[rows, L, H]`` and ``dtype``. safetensors allows neither holes nor tensors off
their natural alignment, so bytes of ``padding`` come in between where they are needed. Because the header has a fixed
size, the body can be written before anything about the header is known, and rows start on a page boundary.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from extract_core.errors import CorruptDataError
from extract_core.store.encoding import BF16_SPLIT_ZSTD, ENCODINGS, NONE, Encoding, decode_frame
from extract_core.store.failures import failure
from extract_core.store.localfiles import open_regular

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 64 * 2**10
"""Size of the reserved header with its length field: where the first row starts."""

DTYPES: Mapping[str, tuple[str, int]] = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
"""Names of row dtypes: safetensors name and bytes per value."""

HIDDEN_STATES, TOKEN_IDS, PADDING = "hidden_states", "token_ids", "padding"
FRAMES, FRAME_TABLE = "frames", "frame_table"
FRAME_COLUMNS = 5
RESERVED_METADATA = frozenset({"format", "layer_ids", "encoding", "schema_version", "shape", "dtype"})

_MAX_HEADER = 4 * 2**20  # ours have 64 KiB; what is parsed takes many times its bytes


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
    """A finished shard file, still under its temporary name; both digests are of the whole file, in hex."""

    path: Path
    sha256: str
    xxh3_128: str
    nbytes: int
    rows: int
    segments: list[SealedSegment]


class Shape:
    """Sizes and offsets that follow from the shape of a shard.

    Args:
        rows: rows.
        layers: L.
        hidden_size: H.
        dtype: a key of ``DTYPES``.
        frames: bytes of all frames and number of segments; None for encoding ``none``.
    """

    def __init__(
        self, rows: int, layers: int, hidden_size: int, dtype: str, frames: tuple[int, int] | None = None
    ) -> None:
        self.rows, self.layers, self.hidden_size, self.dtype = rows, layers, hidden_size, dtype
        self.frames = frames
        self.row_bytes = layers * hidden_size * DTYPES[dtype][1]
        self.data_bytes = rows * self.row_bytes if frames is None else frames[0]
        self.table_bytes = 0 if frames is None else frames[1] * FRAME_COLUMNS * 8
        self.padding = -self.data_bytes % (4 if frames is None else 8)
        self.table_offset = HEADER_BYTES + self.data_bytes + self.padding
        self.tokens_offset = self.table_offset + self.table_bytes
        self.nbytes = self.tokens_offset + 4 * rows

    def tensors(self) -> dict[str, Any]:
        """Header entries; offsets there count from the end of the header."""
        end = self.data_bytes + self.padding
        tokens = end + self.table_bytes
        whole = [self.rows, self.layers, self.hidden_size]
        entries: dict[str, Any] = {}
        if self.frames is None:
            entries[HIDDEN_STATES] = _entry(DTYPES[self.dtype][0], whole, 0, self.data_bytes)
        else:
            entries[FRAMES] = _entry("U8", [self.data_bytes], 0, self.data_bytes)
            entries[FRAME_TABLE] = _entry("U64", [self.frames[1], FRAME_COLUMNS], end, tokens)
        entries[TOKEN_IDS] = _entry("I32", [self.rows], tokens, tokens + 4 * self.rows)
        if self.padding:
            entries[PADDING] = _entry("U8", [self.padding], self.data_bytes, end)
        return entries


def _entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@dataclass(frozen=True)
class RowFormat:
    """How the rows of a shard are stored: L, H, dtype (a key of ``DTYPES``) and encoding."""

    layers: int
    hidden_size: int
    dtype: str
    encoding: Encoding

    @property
    def row_bytes(self) -> int:
        """Bytes of one row once decoded."""
        return self.layers * self.hidden_size * DTYPES[self.dtype][1]

    def decode(self, data: bytes | bytearray | memoryview, rows: int, where: str) -> torch.Tensor:
        """The rows of a segment ``[rows, L, H]`` from its bytes in the file; for encoding ``none`` they share memory.

        Args:
            data: the bytes; writable.
            rows: rows of the segment.
            where: shard and rows, for messages.

        Raises:
            CorruptDataError: these are not that many rows.
        """
        import torch

        dtype = getattr(torch, self.dtype)
        if self.encoding == BF16_SPLIT_ZSTD:
            values = decode_frame(data, rows, self.layers, self.hidden_size, where)
            return torch.from_numpy(values.view(np.int16)).view(dtype)
        if len(data) != rows * self.row_bytes:
            raise CorruptDataError(f"{where}: {len(data)} bytes, expected {rows} rows of {self.row_bytes} bytes")
        return torch.frombuffer(data, dtype=dtype).view(rows, self.layers, self.hidden_size)


@dataclass(frozen=True)
class ShardHeader:
    """What the header of a shard says; offsets are absolute in the file.

    ``data_offset`` is where the first row, or the first frame, lies; ``segments`` the number of frames, 0 where rows
    are stored as they are.
    """

    rows: int
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    encoding: Encoding
    segments: int
    data_offset: int
    table_offset: int
    tokens_offset: int
    nbytes: int
    metadata: Mapping[str, str]

    @property
    def format(self) -> RowFormat:
        """How its rows are stored."""
        return RowFormat(len(self.layer_ids), self.hidden_size, self.dtype, self.encoding)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row once decoded."""
        return self.format.row_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the frame table."""
        return self.segments * FRAME_COLUMNS * 8

    def parse_table(self, data: bytes, where: str) -> NDArray[np.uint64]:
        """The frame table ``[segments, 5]`` from its bytes, in the order of rows.

        Raises:
            CorruptDataError: the frames do not follow each other, or not to the end.
        """
        if len(data) != self.table_bytes:
            raise CorruptDataError(f"shard {where}: its frame table has {len(data)} of {self.table_bytes} bytes")
        table = np.frombuffer(data, "<u8").reshape(self.segments, FRAME_COLUMNS)
        for start, length, total in ((0, 1, self.rows), (2, 3, self.table_offset - self.data_offset)):
            # in Python's integers: sums of damaged values would wrap around
            at = 0
            for first, count in zip(table[:, start].tolist(), table[:, length].tolist(), strict=True):
                if first != at or not count:
                    raise CorruptDataError(f"shard {where}: its frame table is damaged")
                at += count
            if not 0 <= total - at < (1 if start == 0 else 8):
                raise CorruptDataError(f"shard {where}: its frame table does not cover the file")
        return table


class ShardReader:
    """A finished shard on a local disk, memory-mapped: tensors share the file's pages where rows are not encoded.

    Writing to a returned tensor changes this process's copy of the page, never the file.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptDataError: not a whole shard.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
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
        self._bytes = memoryview(self._map)
        header = self.header
        self._table: NDArray[np.uint64] | None = None
        if header.segments:
            table = self._bytes[header.table_offset : header.table_offset + header.table_bytes]
            self._table = header.parse_table(bytes(table), str(path))

    @property
    def metadata(self) -> Mapping[str, str]:
        """Strings in the file's header."""
        return self.header.metadata

    def segment_bytes(self, offset: int, length: int) -> memoryview:
        """The bytes of a segment as they lie in the file, without a copy.

        Raises:
            CorruptDataError: they are outside the file's rows.
        """
        if not self.header.data_offset <= offset <= offset + length <= self.header.table_offset:
            raise CorruptDataError(
                f"{self.path} has its rows in bytes {self.header.data_offset}..{self.header.table_offset}; bytes "
                f"{offset}..{offset + length} were asked for"
            )
        return self._bytes[offset : offset + length]

    def rows(self, first_row: int, rows: int) -> torch.Tensor:
        """Rows as ``[rows, L, H]`` in the stored dtype; without a copy for encoding ``none``."""
        import torch

        self._check(first_row, rows)
        header = self.header
        if not rows:
            return torch.empty(0, len(header.layer_ids), header.hidden_size, dtype=getattr(torch, header.dtype))
        if self._table is None:
            data = self.segment_bytes(header.data_offset + first_row * header.row_bytes, rows * header.row_bytes)
            return header.format.decode(data, rows, str(self.path))
        starts = self._table[:, 0].astype(np.int64)
        first = max(0, int(np.searchsorted(starts, first_row, "right")) - 1)
        last = max(first + 1, int(np.searchsorted(starts, first_row + rows)))
        parts = [
            header.format.decode(
                self.segment_bytes(header.data_offset + offset, length), count, f"{self.path}, segment {number}"
            )
            for number, (_, count, offset, length, _) in enumerate(self._table[first:last].tolist(), first)
        ]
        skip = first_row - int(starts[first])
        return torch.cat(parts)[skip : skip + rows]

    def token_ids(self, first_row: int, rows: int) -> torch.Tensor:
        """Token ids as int32 ``[rows]``, without a copy."""
        import torch

        self._check(first_row, rows)
        start = self.header.tokens_offset + 4 * first_row
        if not rows:
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer(self._bytes[start : start + 4 * rows], dtype=torch.int32)

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
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        metadata = entries.pop("__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise corrupt("its metadata has values that are no text")
        encoding = metadata["encoding"]
        if encoding not in ENCODINGS:
            raise corrupt(f"encoding {encoding!r} is unknown to this version of Coresample")
        shape = _stored_shape(entries, metadata)
        layer_ids = tuple(json.loads(metadata["layer_ids"]))
        if len(layer_ids) != shape.layers or not all(type(k) is int and k >= 0 for k in layer_ids):
            raise corrupt(f"{shape.layers} layers but layer ids {list(layer_ids)}")
        if entries != shape.tensors():
            raise corrupt(f"tensors {entries} are not laid out as a shard's")
    except CorruptDataError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise corrupt(f"its header cannot be read ({type(error).__name__}: {error})") from error
    shift = 8 + length - HEADER_BYTES
    if size != shape.nbytes + shift:
        raise corrupt(f"{shape.nbytes + shift} bytes are expected from its header, the file has {size}")
    return ShardHeader(
        rows=shape.rows,
        layer_ids=layer_ids,
        hidden_size=shape.hidden_size,
        dtype=shape.dtype,
        encoding=cast("Encoding", encoding),
        segments=0 if shape.frames is None else shape.frames[1],
        data_offset=8 + length,
        table_offset=shape.table_offset + shift,
        tokens_offset=shape.tokens_offset + shift,
        nbytes=shape.nbytes + shift,
        metadata=metadata,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two equal keys they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _positive(values: Any) -> list[int]:
    """A list of whole numbers above 0; true and 2.0 are none."""
    if not isinstance(values, list) or not all(type(value) is int and value > 0 for value in values):
        raise ValueError(f"{values} are not whole numbers above 0")
    return values


def _stored_shape(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> Shape:
    if metadata["encoding"] == NONE:
        rows, layers, hidden_size = _positive(entries[HIDDEN_STATES]["shape"])
        dtype = {short: name for name, (short, _) in DTYPES.items()}[entries[HIDDEN_STATES]["dtype"]]
        return Shape(rows, layers, hidden_size, dtype)
    rows, layers, hidden_size = _positive(json.loads(metadata["shape"]))
    nbytes, segments = _positive([entries[FRAMES]["shape"][0], entries[FRAME_TABLE]["shape"][0]])
    return Shape(rows, layers, hidden_size, metadata["dtype"], (nbytes, segments))


def encode_header(shape: Shape, layer_ids: Sequence[int], metadata: Mapping[str, str], encoding: str = NONE) -> bytes:
    """The first ``HEADER_BYTES`` of a finished shard.

    Raises:
        ValueError: the metadata names a reserved key, or does not fit.
    """
    taken = RESERVED_METADATA.intersection(metadata)
    if taken:
        raise ValueError(f"metadata keys {sorted(taken)} are written by the shard itself")
    own = {"format": "pt", "encoding": encoding, "schema_version": "1", "layer_ids": json.dumps(list(layer_ids))}
    if shape.frames is not None:
        own |= {"shape": json.dumps([shape.rows, shape.layers, shape.hidden_size]), "dtype": shape.dtype}
    entries = {"__metadata__": dict(sorted({**metadata, **own}.items())), **shape.tensors()}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    room = HEADER_BYTES - 8
    if len(text) > room:
        raise ValueError(f"metadata makes a header of {len(text)} bytes; {room} are reserved, store a digest instead")
    return room.to_bytes(8, "little") + text.ljust(room)
