"""Parts of a large index: checksums in the footer of the Parquet file, and a reader that checks each part with them.

Two entries of the footer's key-value metadata hold them, as hex digits: ``coresample.chunks`` the xxh3_64 of every
column chunk, row group by row group, and ``coresample.footer`` the sha256 of the footer itself, with zeros in place of
these 64 digits. Other readers of Parquet take no notice.
"""

from __future__ import annotations

import bisect
import copy
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from extract_core.errors import CorruptDataError
from extract_core.store.rangefile import RangeFile
from extract_core.store.records import IndexRef
from extract_core.store.root import Root

FOOTER, CHUNKS = "coresample.footer", "coresample.chunks"
_FOOTER_DIGITS, _CHUNK_DIGITS = 64, 16
_END = 8  # length of the footer and the magic number behind it
_MAGIC = b"PAR1"
_GUESS = 2**20  # bytes at the end of the file that are read at once, to have the footer of most in one request
_KEPT = 2**28  # bytes of row groups, decoded, that stay in memory: some 40,000 samples of usual length
_FEW, _TOGETHER = 2, 256  # so few columns are read in one go of so many row groups
_REMOTE_READERS = 8
_BLOCK = 2**24
_PICKLED = ("_root", "_ref", "_footer", "_schema", "_check", "_chosen")

Check = Callable[[pa.Table, str], None]


def with_room_for_checksums(chunks: int) -> dict[str, str]:
    """What to put into the footer of a file of so many column chunks that is being written."""
    return {FOOTER: "0" * _FOOTER_DIGITS, CHUNKS: "0" * (_CHUNK_DIGITS * chunks)}


def add_checksums(path: Path) -> None:
    """Put the checksums into a file that was written with ``with_room_for_checksums``."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        footer = bytearray(_footer(lambda start, stop: _pread(file, start, stop), size))
        meta = _parsed(bytes(footer))
        digits = "".join(_xxh3(file, *span) for spans in _spans(meta) for span in spans).encode()
        _put(footer, CHUNKS, digits)
        _put(footer, FOOTER, hashlib.sha256(footer).hexdigest().encode())
        file.seek(size - _END - len(footer))
        file.write(footer)


def _put(footer: bytearray, key: str, value: bytes) -> None:
    if value:
        at = footer.index(b"0" * len(value), footer.index(key.encode()))
        footer[at : at + len(value)] = value


def _xxh3(file: Any, start: int, stop: int) -> str:
    digest = xxhash.xxh3_64()
    for at in range(start, stop, _BLOCK):
        digest.update(_pread(file, at, min(at + _BLOCK, stop)))
    return digest.hexdigest()


def _pread(file: Any, start: int, stop: int) -> bytes:
    file.seek(start)
    return bytes(file.read(stop - start))


def _footer(read: Callable[[int, int], bytes], size: int) -> bytes:
    """The footer of a Parquet file: its bytes without the length and the magic number behind it."""
    tail = read(max(0, size - _GUESS), size)
    length = int.from_bytes(tail[-_END:-4], "little") if len(tail) > _END and tail[-4:] == _MAGIC else 0
    if not 0 < length <= size - _END - len(_MAGIC):
        raise ValueError("its end is not that of a Parquet file")
    start = size - _END - length
    if length + _END > len(tail):
        tail = read(start, size - len(tail)) + tail
    return tail[len(tail) - _END - length : -_END]


def _parsed(footer: bytes) -> pq.FileMetaData:
    return pq.read_metadata(pa.BufferReader(_MAGIC + footer + len(footer).to_bytes(4, "little") + _MAGIC))


def _spans(meta: pq.FileMetaData) -> Iterator[list[tuple[int, int]]]:
    """Where the column chunks of each row group are."""
    for group in map(meta.row_group, range(meta.num_row_groups)):
        yield [_span(group.column(n)) for n in range(group.num_columns)]


def _span(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    starts = chunk.data_page_offset, chunk.dictionary_page_offset if chunk.has_dictionary_page else None
    start = min(at for at in starts if at is not None)
    return start, start + chunk.total_compressed_size


class IndexParts:
    """A large index of which row groups and columns are read when they are asked for. Threads may share it.

    Use ``open``. Looks like the table that it holds, as far as looking things up needs: ``num_rows``, ``column``,
    ``slice``, ``take``, ``filter``. Row groups that were used last stay in memory, and a pickle has the footer alone.

    Raises (everything that reads):
        CorruptDataError: the part that was read differs from its checksum, or cannot be decoded.
    """

    def __init__(
        self, root: Root, ref: IndexRef, footer: bytes, meta: pq.FileMetaData, schema: pa.Schema, check: Check
    ):
        self._root, self._ref, self._footer, self._schema, self._check = root, ref, footer, schema, check
        self._chosen: np.ndarray[Any, Any] | None = None
        self._start(meta)

    @classmethod
    def open(cls, root: Root, ref: IndexRef, schema: pa.Schema, check: Check, *, owner: str = "") -> IndexParts | None:
        """The index, after checking its footer; None where it has no checksums.

        Args:
            root: the dataset root.
            ref: what the manifest says of it.
            schema: columns that it must have.
            check: raises ``CorruptDataError`` where a table that was read, of the index of this name, is none of ours.
            owner: what it belongs to, e.g. " of version 3".

        Raises:
            CorruptDataError: it is missing, or differs from what the manifest says.
        """
        where = root.describe(ref.path)
        try:
            size = root.size(ref.path)
            if size != ref.nbytes:
                raise CorruptDataError(f"index {where}{owner} is damaged: expected {ref.nbytes} bytes, found {size}")
            footer = _footer(lambda start, stop: root.read_range(ref.path, start, stop), size)
            meta = _parsed(footer)
            digits = (meta.metadata or {}).get(FOOTER.encode())
            if digits is None:
                return None
            if not _is_sound(footer, digits):
                raise CorruptDataError(f"index {where}{owner} is damaged: its footer does not fit its own checksum")
        except FileNotFoundError:
            raise CorruptDataError(f"index {where}{owner} is missing") from None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptDataError(f"index {where}{owner} is not Parquet: {error}") from error
        if not meta.schema.to_arrow_schema().equals(schema):
            raise CorruptDataError(f"index {where} has other columns than this Coresample expects: {meta.schema.names}")
        if meta.num_rows != ref.rows:
            raise CorruptDataError(f"index {where} has {meta.num_rows} samples, the manifest says {ref.rows}")
        return cls(root, ref, footer, meta, schema, check)

    def _start(self, meta: pq.FileMetaData) -> None:
        self._meta = meta
        groups = range(self._meta.num_row_groups)
        self._ends = list(accumulate(self._meta.row_group(group).num_rows for group in groups))
        columns = self._meta.num_columns
        digits = self._meta.metadata.get(CHUNKS.encode(), b"").decode("ascii", "replace")
        if len(digits) != len(groups) * columns * _CHUNK_DIGITS or (self._ends or [0])[-1] != self._ref.rows:
            raise CorruptDataError(f"index {self._where} has a footer that contradicts itself; it is none of ours")
        self._digits = digits
        self._paths = [self._meta.schema.column(n).path for n in range(columns)]
        self._source = _Fetched(self._ref.nbytes)
        self._file = pq.ParquetFile(pa.PythonFile(self._source, mode="r"), metadata=self._meta, pre_buffer=False)
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()
        self._held = 0
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in _PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start(_parsed(self._footer))

    @cached_property
    def _where(self) -> str:
        return self._root.describe(self._ref.path)

    @property
    def num_rows(self) -> int:
        """Number of samples."""
        return self._ref.rows if self._chosen is None else len(self._chosen)

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""
        return list(self._schema.names)

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of all samples."""
        parts = [table.column(name) for table in self.tables([name])]
        whole = pa.chunked_array([chunk for part in parts for chunk in part.chunks], self._schema.field(name).type)
        return whole if self._chosen is None else whole.take(pa.array(self._chosen))

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Some columns of the whole index, whatever ``filter`` chose; all of them (default) a row group at a time."""
        step = 1 if columns is None or len(columns) > _FEW else _TOGETHER
        for group in range(0, len(self._ends), step):
            groups = list(range(group, min(group + step, len(self._ends))))
            yield self._read(groups, list(columns or self._schema.names))

    def filter(self, mask: pa.ChunkedArray) -> IndexParts:
        """The samples for which a column of booleans is true."""
        places = np.flatnonzero(mask.to_numpy())
        chosen = copy.copy(self)
        chosen._chosen = places if self._chosen is None else self._chosen[places]
        return chosen

    def slice(self, position: int, count: int) -> pa.Table:
        """Samples that follow each other, all columns."""
        return self.take(range(position, min(position + count, self.num_rows)))

    def take(self, positions: Sequence[int]) -> pa.Table:
        """Some samples by position, all columns.

        Raises:
            IndexError: there is no such position.
        """
        parts = []
        for position in positions:
            if not 0 <= position < self.num_rows:
                raise IndexError(f"sample {position} of {self.num_rows}")
            place = position if self._chosen is None else int(self._chosen[position])
            group = bisect.bisect_right(self._ends, place)
            table = self._group(group)
            parts.append(table.slice(place - self._ends[group] + table.num_rows, 1))
        return pa.concat_tables(parts) if parts else self._schema.empty_table()

    def _group(self, group: int) -> pa.Table:
        with self._lock:
            table = self._kept.get(group)
            if table is None:
                table = self._kept[group] = self._read([group], self._schema.names)
                self._held += table.nbytes
                while self._held > _KEPT and len(self._kept) > 1:
                    self._held -= self._kept.popitem(last=False)[1].nbytes
            else:
                self._kept.move_to_end(group)
            return table

    def _read(self, groups: list[int], columns: list[str]) -> pa.Table:
        """Columns of some row groups; chunks that lie beside each other are fetched together."""
        wanted = [n for n, path in enumerate(self._paths) if path.partition(".")[0] in columns]
        try:
            chunks = {
                (group, n): _span(meta.column(n))
                for group, meta in ((group, self._meta.row_group(group)) for group in groups)
                for n in wanted
            }
            spans = _joined(sorted(chunks.values()))
            parts = _Parts([start for start, _ in spans], self._fetch(spans))
            for (group, n), span in chunks.items():
                self._hold_against(group, n, parts.within(*span))
            with self._lock:
                self._source.parts = parts
                try:
                    table = self._file.read_row_groups(groups, columns=columns, use_threads=False).select(columns)
                finally:
                    self._source.parts = _Parts([], [])
            table.validate(full=True)
            expected = self._ends[groups[-1]] - (self._ends[groups[0] - 1] if groups[0] else 0)
            if table.num_rows != expected:
                raise ValueError(f"row groups {groups} have {table.num_rows} samples, the footer says {expected}")
        except FileNotFoundError:
            raise CorruptDataError(f"index {self._where} is missing") from None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise CorruptDataError(f"index {self._where} cannot be read: {error}; run 'coresample verify'") from error
        self._check(table, self._where)
        return table

    def _fetch(self, spans: list[tuple[int, int]]) -> list[bytes]:
        def one(span: tuple[int, int]) -> bytes:
            return self._root.read_range(self._ref.path, *span)

        if self._root.is_local or len(spans) == 1:
            return [one(span) for span in spans]
        with ThreadPoolExecutor(_REMOTE_READERS) as pool:
            return list(pool.map(one, spans))

    def _hold_against(self, group: int, number: int, data: memoryview) -> None:
        at = (group * len(self._paths) + number) * _CHUNK_DIGITS
        expected, found = self._digits[at : at + _CHUNK_DIGITS], xxhash.xxh3_64_hexdigest(data)
        if expected != found:
            raise CorruptDataError(
                f"index {self._where} is damaged: column {self._paths[number]} of row group {group} has xxh3 {found}, "
                f"expected {expected}; run 'coresample verify' for the whole extent"
            )


def _is_sound(footer: bytes, digits: bytes) -> bool:
    at = footer.find(digits, footer.find(FOOTER.encode()))
    blank = footer[:at] + b"0" * _FOOTER_DIGITS + footer[at + _FOOTER_DIGITS :]
    return len(digits) == _FOOTER_DIGITS and at >= 0 and hashlib.sha256(blank).hexdigest().encode() == digits


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


class _Parts(NamedTuple):
    """Parts of a file and where they begin, ascending."""

    starts: list[int]
    data: list[bytes]

    def within(self, start: int, stop: int) -> memoryview:
        """Bytes of one of them."""
        at = bisect.bisect_right(self.starts, start) - 1
        if at < 0 or stop > self.starts[at] + len(self.data[at]):
            raise ValueError(f"bytes {start}..{stop} are outside of what its footer says is to be read")
        return memoryview(self.data[at])[start - self.starts[at] : stop - self.starts[at]]


class _Fetched(RangeFile):
    """A file of which only some parts are there."""

    def __init__(self, size: int):
        self.parts = _Parts([], [])
        super().__init__(size, lambda start, stop: self.parts.within(start, stop))
