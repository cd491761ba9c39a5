"""Writes the rows of a shard that is being made: in any order, each at its final place.

Until ``seal_shard`` has run, the header length is 0 (no reader opens such a file) and the header space holds a note of
the shape, so that a process other than the writer can check and seal the file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from extract_core.errors import CorruptDataError, StoreError
from extract_core.hardware import in_memory
from extract_core.store.failures import failure
from extract_core.store.shard import DTYPES, HEADER_BYTES, Segment, Shape

_WRITE_CHUNK = 2**20  # larger buffered writes to a disk are slower (measured, see the storage notes)
_MEMORY_CHUNK = 2**26  # to memory they are not, and each call waits for the interpreter's lock afterwards
_NOTE_BYTES = 4096
COMPACTING = "compacting"
"""In place of the note while a file's rows move: what is left of an interrupted sealing is no shard."""


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
        self._shape = Shape(rows, len(layer_ids), hidden_size, dtype)
        self.rows, self.row_bytes = rows, self._shape.row_bytes
        self._written = np.zeros(rows, dtype=bool)
        note = {"rows": rows, "layer_ids": [int(k) for k in layer_ids], "hidden_size": hidden_size, "dtype": dtype}
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise failure(error, "create shard", str(self.path)) from error
        memory = in_memory(self.path.parent)
        self._chunk = _MEMORY_CHUNK if memory else _WRITE_CHUNK
        try:
            _reserve(self._fd, self._shape.nbytes, memory=memory)
            write_note(self._fd, note)
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
            pwrite_all(fd, offset, view, self._chunk)
        except OSError as error:
            raise failure(error, "write shard", str(self.path)) from error


def write_note(fd: int, note: Mapping[str, Any] | str) -> None:
    """Say in the header space what an unsealed file holds."""
    text = json.dumps(note).encode().ljust(_NOTE_BYTES - 8)
    pwrite_all(fd, 0, memoryview(bytes(8) + text))


def read_note(fd: int, path: Path) -> tuple[Shape, list[int]]:
    """Shape and layer ids of an unsealed file.

    Raises:
        CorruptDataError: it is none, or of the wrong size.
    """
    try:
        start = os.pread(fd, _NOTE_BYTES, 0)
        if int.from_bytes(start[:8], "little") != 0:
            raise ValueError("it is sealed already")
        note = json.loads(start[8:])
        if note == COMPACTING:
            raise ValueError("an earlier sealing was interrupted; remove it and extract the shard again")
        shape = Shape(note["rows"], len(note["layer_ids"]), note["hidden_size"], note["dtype"])
        size = os.fstat(fd).st_size
        if size != shape.nbytes:
            raise ValueError(f"it has {size} bytes, {shape.nbytes} are expected")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(f"{path} is no unsealed shard: {error}") from error
    return shape, note["layer_ids"]


def _reserve(fd: int, size: int, *, memory: bool) -> None:
    """Give a file its size and, where the file system can, its blocks: a full disk shows now, not in mid-shard.

    In memory (tmpfs) reserving would clear every page just before it is written, which takes as long as writing it;
    there only the room is looked at.
    """
    if memory:
        free = os.fstatvfs(fd)
        if free.f_blocks and free.f_bavail * free.f_frsize < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, size)
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)


def pwrite_all(fd: int, offset: int, view: memoryview, chunk: int = _WRITE_CHUNK) -> None:
    """Write every byte at a place, ``chunk`` of them in one call."""
    at = 0
    while at < view.nbytes:
        at += os.pwrite(fd, view[at : at + chunk], offset + at)


def pread_all(fd: int, offset: int, size: int) -> bytearray:
    """Every byte of a range.

    Raises:
        OSError: the file ends before.
    """
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        got = os.preadv(fd, [view[done : done + 2**26]], offset + done)
        if not got:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}, {offset + size} were expected")
        done += got
    return data
