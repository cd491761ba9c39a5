"""Something that gives ranges of bytes, as a file that seeks."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


class RangeFile(io.RawIOBase):
    """Read only.

    Args:
        size: bytes in all.
        give: returns the bytes from a first one to before another.
    """

    def __init__(self, size: int, give: Callable[[int, int], bytes | memoryview]):
        self._size, self._give, self._at = size, give, 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position; returns it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; returns how many bytes came."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """The next bytes, all that are left by default."""
        stop = self._size if size < 0 else min(self._at + size, self._size)
        data = bytes(self._give(min(self._at, stop), stop))
        self._at = stop
        return data
