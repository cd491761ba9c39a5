"""As much of HTTP/1.1 as a proxy needs: heads, and bodies as streams of pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

PIECE = 64 * 1024
MOST_HEAD = 256 * 1024


@dataclass
class Head:
    """First line and headers of a request or response; names are kept as they were sent."""

    first: str
    headers: list[tuple[str, str]]

    def get(self, name: str) -> str:
        """Value of a header, empty when it is absent."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def dump(self, *, drop: tuple[str, ...] = (), add: tuple[tuple[str, str], ...] = ()) -> bytes:
        """As bytes, without some headers and with others."""
        lines = [self.first, *(f"{k}: {v}" for k, v in (*self.headers, *add) if (k, v) in add or k.lower() not in drop)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    @property
    def method(self) -> str:
        """Of a request."""
        return self.first.split(" ", 1)[0]

    @property
    def target(self) -> str:
        """Path and query of a request."""
        return self.first.split(" ")[1]

    @property
    def status(self) -> int:
        """Of a response."""
        return int(self.first.split(" ")[1])

    @property
    def length(self) -> int:
        """Content-Length; -1 when there is none."""
        return int(self.get("content-length") or -1)

    @property
    def chunked(self) -> bool:
        """Whether the body comes in chunks."""
        return "chunked" in self.get("transfer-encoding").lower()


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head; None when the other side closed before it."""
    try:
        data = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ConnectionError("a head was cut short") from None
        return None
    first, *lines = data.decode("latin-1").rstrip("\r\n").split("\r\n")
    return Head(first, [(k.strip(), v.strip()) for k, _, v in (line.partition(":") for line in lines)])


async def body(reader: asyncio.StreamReader, head: Head, *, until_closed: bool) -> AsyncIterator[bytes]:
    """The body's pieces as they are on the wire, chunk headers included.

    Args:
        reader: right after the head.
        head: says how long the body is.
        until_closed: without a length it lasts until the other side closes (a response) or is empty (a request).
    """
    if head.chunked:
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line
            if size == 0:
                while (trailer := await reader.readuntil(b"\r\n")) != b"\r\n":
                    yield trailer
                yield b"\r\n"
                return
            async for piece in _exactly(reader, size + 2):
                yield piece
    elif head.length >= 0:
        async for piece in _exactly(reader, head.length):
            yield piece
    elif until_closed:
        while piece := await reader.read(PIECE):
            yield piece


async def _exactly(reader: asyncio.StreamReader, count: int) -> AsyncIterator[bytes]:
    while count:
        piece = await reader.read(min(count, PIECE))
        if not piece:
            raise ConnectionError("a body was cut short")
        count -= len(piece)
        yield piece
