"""Faults of S3 servers, as WSGI layers over moto: what the server behind them gets and answers is real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import botocore.session
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Headers = list[tuple[str, str]]


@dataclass
class Request:
    """A request on its way to the server."""

    environ: dict[str, Any]

    @property
    def method(self) -> str:
        return self.environ["REQUEST_METHOD"]

    @property
    def path(self) -> str:
        return self.environ["PATH_INFO"]

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.environ.get("QUERY_STRING", ""), keep_blank_values=True)

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber" in self.query


@dataclass
class Faulty:
    """moto behind ``before`` (may answer with a status, or change the request) and ``after`` (changes the answer)."""

    before: Callable[[Request], int | None] | None = None
    after: Callable[[Request, str, list[tuple[str, str]], bytes], tuple[str, list[tuple[str, str]], bytes]] | None = (
        None
    )
    seen: list[str] = field(default_factory=list)
    app: Any = field(default_factory=lambda: DomainDispatcherApplication(create_backend_app))
    lock: Any = field(default_factory=threading.Lock)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        request = Request(environ)
        with self.lock:
            self.seen.append(f"{request.method} {request.path} {environ.get('QUERY_STRING', '')}".strip())
            status = self.before(request) if self.before else None
        if status is not None:
            _drain(environ)
            name = {403: "AccessDenied", 404: "NoSuchKey", 503: "SlowDown"}.get(status, "InternalError")
            body = f"<?xml version='1.0'?><Error><Code>{name}</Code><Message>made up</Message></Error>".encode()
            start_response(f"{status} Fault", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if self.after is None:
            return self.app(environ, start_response)
        held: list[Any] = []
        body = b"".join(self.app(environ, lambda *given: held.append(given)))
        with self.lock:
            line, headers, body = self.after(request, held[0][0], held[0][1], body)
        start_response(line, headers)
        return [body]


def _drain(environ: dict[str, Any]) -> None:
    left = int(environ.get("CONTENT_LENGTH") or 0)
    while left > 0 and (data := environ["wsgi.input"].read(min(left, 2**20))):
        left -= len(data)


@contextmanager
def serving(app: Any) -> Iterator[dict[str, Any]]:
    """Storage options of a server on loopback with a bucket named ``bucket``."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        options = {"key": "testing", "secret": "testing", "endpoint_url": endpoint}
        client(options).create_bucket(Bucket="bucket")
        yield options | {"client_kwargs": {"region_name": "us-east-1"}}
    finally:
        server.shutdown()
        thread.join(10)


def client(options: dict[str, Any]) -> Any:
    """botocore's own client of a server, which looks behind the store's back."""
    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=options.get("endpoint_url") or options["client_kwargs"]["endpoint_url"],
        region_name="us-east-1",
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
    )
