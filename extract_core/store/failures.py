"""What a failure of an operating system or of a store's client means: one classification for every caller."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from typing import Any

from extract_core.errors import NoSpaceError, RootError, StoreError, StoreUnavailableError, UploadMismatchError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
_TRANSIENT_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest",  # the bytes changed on their way
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentSHA256Mismatch",
    }
)
"""Codes that S3 sends with status 400 or 200 although the same request may succeed."""
_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"})
_CREDENTIAL_CODES = {
    "ExpiredToken": "the credentials have expired: renew them",
    "InvalidAccessKeyId": "the store does not know this access key: check the credentials",
    "RequestTimeTooSkewed": "the clocks of this machine and of the store differ too much: set them",
    "SignatureDoesNotMatch": "the secret key does not fit the access key: check the credentials",
}
_CLIENTS = frozenset({"aiohttp", "botocore", "aiobotocore", "urllib3"})
_OWN_MISTAKES = frozenset(
    {
        "ParamValidationError",
        "NoRegionError",
        "DataNotFoundError",
        "UnsupportedSignatureVersionError",
        "ConfigParseError",
    }
)
_CODE_IN_TEXT = re.compile(r"<Code>(\w+)</Code>")
_STATUS_IN_TEXT = re.compile(r"status code: (\d{3})\b")


def failure(error: BaseException, action: str, path: str) -> StoreError:
    """The StoreError that says what failed where, and what to do about it.

    Args:
        error: what the operating system or the store's client raised.
        action: what was tried, as an infinitive: "write", "read", "list".
        path: the full path or URL.
    """
    if isinstance(error, StoreError):
        return error
    number = getattr(error, "errno", None)
    text = f"cannot {action} {path}: {reason(error)}"
    if number in FULL:
        if number == errno.EFBIG:
            return NoSpaceError(f"{text}; raise the file size limit (ulimit -f), then run the same command again")
        return NoSpaceError(
            f"{text}; free space or raise the quota, then run the same command again (finished shards are kept)"
        )
    if isinstance(error, FileNotFoundError):
        kind = StoreError if action == "store" else RootError  # storing may also miss its local source
        return kind(f"{text}; create the bucket or folder, or correct the root")
    code = error_code(error)
    if code in _CREDENTIAL_CODES:
        return RootError(f"{text}; {_CREDENTIAL_CODES[code]}, then run the same command again")
    if isinstance(error, PermissionError) or number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return RootError(f"{text}; check the permissions and credentials for this root, or give another root")
    if isinstance(error, ImportError):
        return StoreError(f"{text}; install the package it names")
    if type(error).__name__ in _NO_CREDENTIALS:
        return RootError(f"{text}; give credentials through the environment or a profile")
    if _may_pass(error, code):
        return StoreUnavailableError(f"{text}; the store did not answer, try again later")
    return StoreError(text)


def mismatch(path: str, expected: str, came: str) -> UploadMismatchError:
    """Says that a store holds other bytes than were sent, so that the upload was undone."""
    return UploadMismatchError(
        f"upload of {path} was damaged on its way: {expected} was sent, the store holds {came}; nothing stays under "
        "this name and the upload can be tried again. If it happens often, look for a faulty proxy or network card"
    )


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    return failure(error, "do", "it").retryable


def _may_pass(error: BaseException, code: str | None) -> bool:
    if code in _TRANSIENT_CODES:
        return True
    status = http_status(error)
    if status is not None and status >= 400:
        return status in _TRANSIENT_STATUS
    if isinstance(error, TimeoutError | ConnectionError) or type(error).__name__ == "FSTimeoutError":
        return True
    if getattr(error, "errno", None) in _TRANSIENT:
        return True
    origin = type(error).__module__.partition(".")[0]
    return origin in _CLIENTS and type(error).__name__ not in _OWN_MISTAKES


def reason(error: BaseException) -> str:
    """What an exception says, in one line where its client adds a dump of itself."""
    if isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    return str(error).partition("\n\nDebug source")[0] or type(error).__name__


def _responses(error: BaseException) -> Iterator[Mapping[str, Any]]:
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, Mapping):
            yield response
        seen = seen.__cause__


def http_status(error: BaseException) -> int | None:
    """HTTP status behind a client's exception, where one is attached."""
    for response in _responses(error):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status, int):
            return status
    if type(error).__module__.startswith("obstore") and (match := _STATUS_IN_TEXT.search(str(error))):
        return int(match[1])
    return None


def error_code(error: BaseException) -> str | None:
    """S3's name of an error behind a client's exception, where one is attached."""
    for response in _responses(error):
        code = response.get("Error", {}).get("Code")
        if isinstance(code, str):
            return code
    if type(error).__module__.startswith("obstore") and (match := _CODE_IN_TEXT.search(str(error))):
        return match[1]
    return None
