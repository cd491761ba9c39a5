"""The bulk client: obstore carries the bytes of large files where it can do so exactly as s3fs would.

Endpoint, addressing style, region and credentials are those of the s3fs file system, asked of its own client; what
obstore has no counterpart for is refused with the reason, and s3fs carries the bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from extract_core.errors import SettingsError
from extract_core.store.failures import reason

Choice = Literal["auto", "s3fs", "obstore"]

_PROBE_KEY = "coresample"
_MOST_FAILURES = 3
_CARRIED = frozenset({"ServerSideEncryption", "SSEKMSKeyId"})
_TIMEOUT = timedelta(minutes=5)
"""Of one part, sending it included: parts of 8 MiB, eight at once, at 0.25 MB/s in all."""


class CannotCarryError(Exception):
    """obstore cannot do what this s3fs is set to do; the text says what."""


class BulkError(Exception):
    """An upload through obstore failed; s3fs is to make another."""


class BulkClient:
    """Uploads through obstore to one bucket.

    Args:
        store: obstore's view of the bucket.
        on_give_up: told the reason when the client is not used any more.
    """

    def __init__(self, store: Any, on_give_up: Callable[[str], None]):
        self._store, self._on_give_up = store, on_give_up
        self._failures, self._lock = 0, threading.Lock()
        self.usable = True

    def put(self, key: str, feed: Iterator[bytes], *, part_bytes: int, parallel: int) -> str:
        """Upload an object in parts; returns its ETag. What ``feed`` raises ends the upload and is raised here.

        Raises:
            BulkError: obstore failed, after tries of its own.
        """
        import obstore

        broken: list[BaseException] = []

        def guarded() -> Iterator[bytes]:
            try:
                yield from feed
            except BaseException as error:
                broken.append(error)
                raise

        try:
            answer = obstore.put(
                self._store, key, guarded(), use_multipart=True, chunk_size=part_bytes, max_concurrency=parallel
            )
        except Exception as error:
            if broken:
                raise broken[0] from None
            raise BulkError(reason(error)) from error
        return str(answer["e_tag"] or "").strip('"').lower()

    def failed(self, why: str) -> None:
        """Count a failure; a client that fails again and again is given up."""
        with self._lock:
            self._failures += 1
            often = self._failures >= _MOST_FAILURES
        if often:
            self.give_up(f"obstore failed {self._failures} times, last: {why}")

    def give_up(self, why: str) -> None:
        """Leave the rest to s3fs."""
        with self._lock:
            if not self.usable:
                return
            self.usable = False
        self._on_give_up(why)


def bulk_client(fs: Any, bucket: str, on_give_up: Callable[[str], None]) -> BulkClient:
    """An obstore client that talks to a bucket as an s3fs file system does.

    Raises:
        CannotCarryError: obstore is not installed or lacks a setting that is in use.
        Exception: what the s3fs client raised when it was asked (no credentials, say).
    """
    try:
        from obstore.store import S3Store
    except ImportError:
        raise CannotCarryError("obstore is not installed (pip install 'coresample[obstore]')") from None
    config: Any = _config(fs, bucket)
    credentials: Any = {} if _is_anonymous(fs) else {"credential_provider": _credentials(fs)}
    http = str(config["endpoint"]).startswith("http:")
    try:
        store = S3Store(
            bucket,
            config=config,
            client_options={"allow_http": http, "connect_timeout": timedelta(seconds=10), "timeout": _TIMEOUT},
            retry_config={
                "max_retries": 5,
                "retry_timeout": timedelta(seconds=60),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=250),
                    "max_backoff": timedelta(seconds=8),
                    "base": 2,
                },
            },
            **credentials,
        )
    except Exception as error:
        raise CannotCarryError(f"obstore refuses the settings: {reason(error)}") from error
    return BulkClient(store, on_give_up)


def _config(fs: Any, bucket: str) -> dict[str, Any]:
    from fsspec.asyn import sync

    if ":" in bucket or bucket.endswith("--x-s3"):
        raise CannotCarryError("access points and directory buckets are left to s3fs")
    client = sync(fs.loop, _client, fs, bucket)
    meta = client.meta
    _refuse_transport(client)
    if meta.config.signature_version not in ("s3v4", "v4", None) and not _is_anonymous(fs):
        raise CannotCarryError(f"signature version {meta.config.signature_version} is left to s3fs")
    extra = dict(fs.s3_additional_kwargs)
    if unknown := sorted(extra.keys() - _CARRIED):
        raise CannotCarryError(f"s3_additional_kwargs {', '.join(unknown)} are left to s3fs")
    endpoint, virtual = _addressing(fs, client, bucket)
    region = meta.region_name or "us-east-1"
    config: dict[str, Any] = {
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,  # else a variable of the environment would win over the job's own endpoint
        "region": "us-east-1" if region == "aws-global" else region,
        "virtual_hosted_style_request": virtual,
        "skip_signature": _is_anonymous(fs),
        # Damage is found by our comparison of ETags in any case; a sha256 more, here and in the store, costs a third of
        # the throughput where both share cores.
        "unsigned_payload": True,
        "request_payer": bool(fs.requester_pays),
    }
    if "ServerSideEncryption" in extra:
        config["server_side_encryption"] = extra["ServerSideEncryption"]
    if "SSEKMSKeyId" in extra:
        config["sse_kms_key_id"] = extra["SSEKMSKeyId"]
    return config


async def _client(fs: Any, bucket: str) -> Any:
    await fs.set_session()
    return await fs.get_s3(bucket)


def _refuse_transport(client: Any) -> None:
    """Proxies and certificates that were set for botocore and that obstore would not see."""
    session = client._endpoint.http_session
    proxies = getattr(getattr(session, "_proxy_config", None), "_proxies", None)
    if proxies:
        raise CannotCarryError("proxies are left to s3fs")
    if not str(client.meta.endpoint_url).startswith("https"):
        return
    verify = getattr(session, "_verify", True)
    if verify is False:
        raise CannotCarryError("unverified certificates (verify: false) are left to s3fs")
    if isinstance(verify, str | os.PathLike):
        raise CannotCarryError(f"a certificate bundle of its own ({os.fspath(verify)}) is left to s3fs")


def _addressing(fs: Any, client: Any, bucket: str) -> tuple[str, bool]:
    """Endpoint for obstore and whether the bucket is in the host name, as botocore itself addresses an object."""
    from fsspec.asyn import sync

    async def presign() -> str:
        url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": _PROBE_KEY})
        return str(await url if hasattr(url, "__await__") else url)

    parts = urlsplit(sync(fs.loop, presign))
    path = unquote(parts.path)
    if path.endswith(f"/{bucket}/{_PROBE_KEY}"):
        return f"{parts.scheme}://{parts.netloc}{path.removesuffix(f'/{bucket}/{_PROBE_KEY}')}", False
    if parts.netloc.startswith(f"{bucket}.") and path == f"/{_PROBE_KEY}":
        return f"{parts.scheme}://{parts.netloc}", True
    raise CannotCarryError(f"the address of objects ({parts.scheme}://{parts.netloc}{path}) is of an unknown form")


def _is_anonymous(fs: Any) -> bool:
    return bool(fs.anon)


def _credentials(fs: Any) -> Callable[[], dict[str, Any]]:
    """A provider that asks s3fs's own session, which renews what expires."""
    from fsspec.asyn import sync

    source = fs.s3._request_signer._credentials
    if source is None:
        raise CannotCarryError("s3fs has no credentials to hand on")

    def provide() -> dict[str, Any]:
        frozen = sync(fs.loop, source.get_frozen_credentials)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": getattr(source, "_expiry_time", None),
        }

    return provide


def choose(
    choice: Choice, fs: Any, bucket: str, on_give_up: Callable[[str], None]
) -> tuple[BulkClient | None, str | None]:
    """The bulk client that a job asks for, and why there is none.

    Raises:
        SettingsError: ``obstore`` was asked for and cannot be had; says why.
    """
    if choice == "s3fs":
        return None, None
    try:
        return bulk_client(fs, bucket, on_give_up), None
    except CannotCarryError as error:
        why = str(error)
    if choice == "obstore":
        raise SettingsError(f"store.client is obstore, but {why}; set it to auto or s3fs")
    return None, why
