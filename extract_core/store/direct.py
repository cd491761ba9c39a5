"""Writes a file front to back past the page cache: for bytes that are read from somewhere else and not again soon.

Direct I/O wants aligned memory, offsets and lengths. Bytes are gathered in page-aligned buffers; a thread writes one
while the next is filled; the last one is padded, and the file then cut to its size. Where the file system refuses
(tmpfs, some network file systems), the same writes go through the page cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import threading
from pathlib import Path

BUFFER_BYTES = 4 * 2**20
"""Fast from 1 to 32 MiB (measured, see the storage notes)."""

_BUFFERS = 3
_ALIGNMENT = 4096
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


class DirectWriter:
    """A new file that grows at its end.

    Args:
        path: must not exist.

    Raises:
        OSError: it cannot be made; later, from any method: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.nbytes = path, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            path.unlink(missing_ok=True)  # some kernels make the file before they refuse
            self._fd = os.open(path, flags, 0o666)
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(mmap.mmap(-1, BUFFER_BYTES))
        self._full: queue.SimpleQueue[tuple[mmap.mmap, int, int] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._buffer, self._filled, self._start = self._free.get(), 0, 0
        self._thread = threading.Thread(target=self._run, name="direct-writer", daemon=True)
        self._thread.start()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes; they are copied."""
        view = memoryview(data).cast("B")
        self.nbytes += len(view)
        while view:
            count = min(len(view), BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == BUFFER_BYTES:
                self._pass_on()
                self._buffer, self._filled = self._free.get(), 0

    def finish(self) -> None:
        """Write what is left and make the file durable."""
        try:
            if self._filled:
                padded = -(-self._filled // _ALIGNMENT) * _ALIGNMENT
                self._buffer[self._filled : padded] = bytes(padded - self._filled)
                self._filled = padded
                self._pass_on()
            self._join()
            os.ftruncate(self._fd, self.nbytes)
            os.fsync(self._fd)
        finally:
            self._close()

    def abort(self) -> None:
        """Close and remove the file."""
        self._close()
        self.path.unlink(missing_ok=True)

    def _pass_on(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._full.put((self._buffer, self._filled, self._start))
        self._start += self._filled

    def _join(self) -> None:
        if self._thread.is_alive():
            self._full.put(None)
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _close(self) -> None:
        if self._thread.is_alive():
            self._full.put(None)
            self._thread.join()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _run(self) -> None:
        while (item := self._full.get()) is not None:
            buffer, size, start = item
            try:
                if self._failure is None:
                    self._pwrite(memoryview(buffer)[:size], start)
            except BaseException as error:  # noqa: BLE001 - recorded; the next call raises it
                self._failure = error
            finally:
                self._free.put(buffer)

    def _pwrite(self, view: memoryview, start: int) -> None:
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done:], start + done)
            except OSError as error:
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                if error.errno not in _REFUSED or not flags & os.O_DIRECT:
                    raise
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
