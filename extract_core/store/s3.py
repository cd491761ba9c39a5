"""Single S3 requests through s3fs's own client, each checked end to end: digest sent, digest compared.

S3's ETag of an object written in one request is its md5, unless a key of the user encrypts it (SSE-KMS, SSE-C);
there a checksum of the answer is compared instead, where the store sends one.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Mapping
from typing import Any

from extract_core.errors import StoreUnavailableError
from extract_core.store.failures import http_status, mismatch

_MD5_ETAG = re.compile(r"[0-9a-f]{32}(-\d+)?")
WHOLE_BYTES = 32 * 2**20
"""Objects up to this size are read in one request, and their md5 compared."""


def is_s3(fs: Any) -> bool:
    """Whether a file system is s3fs."""
    return hasattr(fs, "call_s3")


def md5_of(data: bytes) -> bytes:
    """The digest that S3 calls Content-MD5; guards against damage on the way, not against attackers."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def etag_of(answer: Mapping[str, Any]) -> str:
    """An answer's ETag without its quotes."""
    return str(answer.get("ETag") or "").strip('"').lower()


def has_own_key(answer: Mapping[str, Any]) -> bool:
    """Whether the store says that it encrypts with a key of the user's: ETags are then no md5."""
    return str(answer.get("ServerSideEncryption") or "").startswith("aws:kms") or bool(
        answer.get("SSECustomerAlgorithm")
    )


def verdict(answer: Mapping[str, Any], data: bytes, md5: bytes) -> bool | None:
    """Whether the store holds ``data``, by the answer to its upload; None where the answer does not tell."""
    etag = etag_of(answer)
    if etag == md5.hex():
        return True
    plain = _MD5_ETAG.fullmatch(etag) is not None and not has_own_key(answer)
    if plain:
        return False
    if came := answer.get("ChecksumCRC32"):
        return bool(came == base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode())
    if came := answer.get("ChecksumSHA256"):
        return bool(came == base64.b64encode(hashlib.sha256(data).digest()).decode())
    return None


def is_md5_etag(answer: Mapping[str, Any]) -> bool:
    """Whether an answer's ETag is an md5, or the md5 of md5s of a multipart upload."""
    return _MD5_ETAG.fullmatch(etag_of(answer)) is not None and not has_own_key(answer)


def put(fs: Any, target: str, data: bytes, *, create: bool = False) -> bool | None:
    """Store a small object in one request.

    Args:
        fs: s3fs.
        target: bucket and key.
        data: the whole object.
        create: only if there is no object of this name (``If-None-Match: *``).

    Returns:
        True: the store holds these bytes; None: its answer does not tell.

    Raises:
        UploadMismatchError: other bytes arrived; they are removed.
    """
    bucket, key, _ = fs.split_path(target)
    md5 = md5_of(data)
    condition = {"IfNoneMatch": "*"} if create else {}
    answer = fs.call_s3(
        "put_object", Bucket=bucket, Key=key, Body=data, ContentMD5=base64.b64encode(md5).decode(), **condition
    )
    fs.invalidate_cache(target)
    same = verdict(answer, data, md5)
    if same is False:
        fs.call_s3("delete_object", Bucket=bucket, Key=key)
        raise mismatch(f"s3://{target}", f"md5 {md5.hex()}", f"ETag {etag_of(answer)}")
    return same


def get(fs: Any, target: str) -> bytes | None:
    """A whole object whose bytes are those that its ETag names; None if it is too large for one request.

    Raises:
        FileNotFoundError: there is none.
        StoreUnavailableError: other bytes came.
    """
    from fsspec.asyn import sync

    bucket, key, version = fs.split_path(target)
    which = {"VersionId": version} if version else {}
    answer, data = sync(fs.loop, _get, fs, {"Bucket": bucket, "Key": key, **which}, WHOLE_BYTES)
    if data is None:
        return None
    if is_md5_etag(answer) and "-" not in etag_of(answer) and md5_of(data).hex() != etag_of(answer):
        raise StoreUnavailableError(
            f"s3://{target} came damaged: its ETag is {etag_of(answer)}, the md5 of the {len(data)} bytes that came is "
            f"{md5_of(data).hex()}; read it again, and look for a faulty proxy or network card if it goes on"
        )
    return bytes(data)


def get_range(fs: Any, target: str, start: int, stop: int) -> bytes:
    """Bytes of an object; fewer only where the object ends before ``stop``.

    Raises:
        FileNotFoundError: there is none.
        StoreUnavailableError: fewer bytes came than the store announced.
    """
    from fsspec.asyn import sync

    bucket, key, version = fs.split_path(target)
    which = {"VersionId": version} if version else {}
    wanted = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{stop - 1}", **which}
    try:
        answer, data = sync(fs.loop, _get, fs, wanted, None)
    except OSError as error:
        if http_status(error) != 416:
            raise
        return b""
    total = str(answer.get("ContentRange") or "").rpartition("/")[2]
    if total.isdecimal() and len(data) != max(0, min(stop, int(total)) - start):
        raise StoreUnavailableError(
            f"s3://{target}: bytes {start}..{stop} of {total} were asked for, {len(data)} bytes came; read them again"
        )
    return bytes(data)


async def _get(fs: Any, wanted: dict[str, Any], most: int | None) -> tuple[Mapping[str, Any], bytes | None]:
    answer = await fs._call_s3("get_object", **wanted)
    body = answer["Body"]
    try:
        if most is not None and int(answer.get("ContentLength") or 0) > most:
            return answer, None
        return answer, await body.read()
    finally:
        body.close()
