"""A proxy in front of an S3 server that fails on purpose: real sockets, seeded, each kind of fault counted.

It changes nothing that a signature covers (the Host header passes through), so what it lets through is what the client
sent. Each kind has a probability per request that it can happen to.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from urllib.parse import parse_qs, urlsplit

from tests.faults.http1 import Head, body, read_head

S3_ERRORS = {
    "500": (500, "Internal Server Error", "InternalError", "We encountered an internal error. Please try again."),
    "503": (503, "Slow Down", "SlowDown", "Please reduce your request rate."),
    "404": (404, "Not Found", "NoSuchKey", "The specified key does not exist."),
    "skew": (403, "Forbidden", "RequestTimeTooSkewed", "The difference between the request time and the current time"),
    "expired": (400, "Bad Request", "ExpiredToken", "The provided token has expired."),
}
KINDS = (*S3_ERRORS, "500 after", "hang", "reset", "reset after", "truncated", "flip response", "flip request")
"""Besides the error answers (404 only for objects that were written): the request took effect and the answer says 500,
or is lost; no answer; a reset in the request's body; a response cut short; a bit of a response's or request's body."""

Trap = Callable[[str, str], None]


class FaultProxy:
    """Listens on loopback from ``start`` to ``stop``; everything may be changed while it runs.

    Args:
        upstream: endpoint of the server.
        seed: of the choice which requests fail.

    Attributes:
        endpoint: the proxy's own.
        rates: kind to probability.
        counts: kind to faults injected.
        requests: requests seen.
        bytes_per_s: limit of all traffic together; 0 for none.
        hang_s: how long a hanging request is kept.
        choose: instead of the rates: the kind for a method and target, "" for none.
        on_request: called with method and target before a request goes to the server.
        hold: which requests are kept from the server until ``release`` is set; ``holding`` says that one is.
        on_answer: the same when its answer has come and was not sent on yet.
    """

    def __init__(self, upstream: str, seed: int = 0):
        parts = urlsplit(upstream)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._random = random.Random(seed)
        self.endpoint = ""
        self.rates: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        self.requests = 0
        self.bytes_per_s = 0.0
        self.hang_s = 8.0
        self.choose: Callable[[str, str], str] | None = None
        self.on_request: Trap | None = None
        self.on_answer: Trap | None = None
        self.hold: Callable[[str, str], bool] | None = None
        self.holding = threading.Event()
        self.release = threading.Event()
        self._gone_until = 0.0
        self._written: set[str] = set()
        self._free_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.StreamWriter] = set()

    # -- from the test -------------------------------------------------------------------------------------------

    def start(self) -> FaultProxy:
        """Listen."""
        listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        ready = threading.Event()

        async def serve() -> None:
            self._server = await asyncio.start_server(self._client, sock=listening)
            ready.set()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(serve())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, name="fault-proxy", daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def stop(self) -> None:
        """Close everything."""

        async def end() -> None:
            self._server.close()
            self._drop()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.call_soon(self._loop.stop)

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(end(), self._loop)
            self._thread.join(10)

    def __enter__(self) -> FaultProxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def quiet(self) -> None:
        """No more faults."""
        self.rates, self.bytes_per_s, self._gone_until = {}, 0.0, 0.0
        self.choose = self.on_request = self.on_answer = None

    def gone(self, seconds: float) -> None:
        """The server is gone: connections are reset, old and new, for so long."""
        self.counts["gone"] += 1
        self._gone_until = time.monotonic() + seconds
        self._loop.call_soon_threadsafe(self._drop)

    @property
    def injected(self) -> int:
        """All faults so far."""
        return sum(self.counts.values())

    # -- in the loop ---------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        for writer in list(self._connections):
            _reset(writer)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while True:
                head = await read_head(reader)
                if head is None or time.monotonic() < self._gone_until:
                    _reset(writer)
                    return
                self.requests += 1
                if not await self._request(head, reader, writer):
                    return
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _reset(writer)
        except asyncio.CancelledError:
            pass  # stop(); asyncio would print it
        finally:
            self._connections.discard(writer)
            writer.close()

    def _choose(self, head: Head) -> str:
        if self.choose is not None:
            return self.choose(head.method, head.target)
        target = head.target.split("?")[0]
        for kind, rate in self.rates.items():
            possible = {
                "404": head.method in ("GET", "HEAD") and target in self._written,
                "reset": head.length > 0,
                "truncated": head.method == "GET",
                "flip response": head.method == "GET",
                "flip request": head.method in ("PUT", "POST") and head.length > 0,
            }.get(kind, True)
            if possible and self._random.random() < rate:
                return kind
        return ""

    async def _request(self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        fault = self._choose(head)
        if head.method == "PUT":
            self._written.add(head.target.split("?")[0])
        if head.get("expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.on_request is not None:
            self.on_request(head.method, head.target)
        sent = self._slowly(body(reader, head, until_closed=False))
        if self.hold is not None and self.hold(head.method, head.target):
            self.holding.set()
            while not self.release.is_set():
                await asyncio.sleep(0.02)
        if fault in S3_ERRORS:
            async for _ in sent:
                pass
            self.counts[fault] += 1
            writer.write(_answer(fault, head))
            await writer.drain()
            return True
        if fault == "hang":
            self.counts[fault] += 1
            await asyncio.sleep(self.hang_s)
            _reset(writer)
            return False
        from_server, to_server = await asyncio.open_connection(self._host, self._port)
        try:
            to_server.write(head.dump(drop=("expect", "connection"), add=(("Connection", "close"),)))
            if fault == "flip request":
                sent = self._flipped(sent, fault, head.length)
            left = head.length // 2
            async for piece in sent:
                to_server.write(piece)
                await to_server.drain()
                left -= len(piece)
                if fault == "reset" and left <= 0:
                    self.counts[fault] += 1
                    _reset(to_server)
                    _reset(writer)
                    return False
            answer = await read_head(from_server)
            if answer is None:
                raise ConnectionError("the server closed without an answer")
            return await self._answer(fault, head, answer, from_server, writer)
        finally:
            to_server.close()

    async def _answer(
        self, fault: str, head: Head, answer: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if self.on_answer is not None:
            self.on_answer(head.method, head.target)
        pieces = body(reader, answer, until_closed=True)
        empty = head.method == "HEAD" or answer.status in (204, 304)
        if fault in ("500 after", "reset after"):
            if not empty:
                async for _ in pieces:
                    pass
            self.counts[fault] += 1
            if fault == "reset after":
                _reset(writer)
                return False
            writer.write(_answer("500", head))
            await writer.drain()
            return True
        unknown = not empty and answer.length < 0 and not answer.chunked
        writer.write(answer.dump(drop=("connection",), add=(("Connection", "close" if unknown else "keep-alive"),)))
        if not empty:
            if fault == "flip response":
                pieces = self._flipped(pieces, fault, answer.length)
            left = answer.length // 2
            async for piece in self._slowly(pieces):
                if fault == "truncated" and answer.length > 1 and left <= len(piece):
                    self.counts[fault] += 1
                    writer.write(piece[:left])
                    await writer.drain()
                    return False
                left -= len(piece)
                writer.write(piece)
                await writer.drain()
        await writer.drain()
        return not unknown

    async def _flipped(self, pieces: AsyncIterator[bytes], kind: str, length: int) -> AsyncIterator[bytes]:
        at = self._random.randrange(length) if length > 0 else -1
        async for piece in pieces:
            if 0 <= at < len(piece):
                changed = bytearray(piece)
                changed[at] ^= 1 << self._random.randrange(8)
                self.counts[kind] += 1
                piece = bytes(changed)
            at -= len(piece)
            yield piece

    async def _slowly(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            if self.bytes_per_s:
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + len(piece) / self.bytes_per_s
                await asyncio.sleep(self._free_at - now)
            yield piece


def _answer(kind: str, head: Head) -> bytes:
    status, reason, code, message = S3_ERRORS[kind]
    text = f"<?xml version='1.0' encoding='UTF-8'?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    data = b"" if head.method == "HEAD" else text.encode()
    first = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(data)}\r\n\r\n"
    return first.encode() + data


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a machine that went down does."""
    with contextlib.suppress(OSError):
        raw = writer.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def is_commit(method: str, target: str) -> bool:
    """Whether a request writes a commit record."""
    return method == "PUT" and "/commits/" in target


def is_manifest(method: str, target: str) -> bool:
    """Whether a request publishes a version."""
    return method == "PUT" and "/versions/" in target


def is_part(method: str, target: str) -> bool:
    """Whether a request carries bytes of a shard: a part of an upload, or a whole object."""
    return method == "PUT" and ("/shards/" in target or "partNumber" in parse_qs(urlsplit(target).query))
