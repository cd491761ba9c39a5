import hashlib

import pytest
import xxhash

from extract_core.errors import CorruptDataError, SettingsError, StoreUnavailableError, UploadMismatchError
from extract_core.store.failures import failure, is_transient, mismatch
from extract_core.store.protocols import refuse_as_output
from extract_core.store.retry import Retry
from extract_core.store.root import Root
from extract_core.store.upload import Known, Source
from extract_core.store.verify import verify
from tests.unit.store.kit import make_dataset


def client_error(code, status):
    from botocore.exceptions import ClientError

    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


@pytest.mark.parametrize(
    ("code", "status", "passes"),
    [
        ("InternalError", 500, True),
        ("InternalError", 200, True),  # S3 may say so in the body of a success
        ("SlowDown", 503, True),
        ("BadDigest", 400, True),
        ("XAmzContentSHA256Mismatch", 400, True),
        ("RequestTimeout", 400, True),
        ("OperationAborted", 409, True),
        ("TooManyRequests", 429, True),
        ("InvalidArgument", 400, False),
        ("AccessDenied", 403, False),
        ("ExpiredToken", 400, False),
        ("RequestTimeTooSkewed", 403, False),
        ("NotImplemented", 501, False),
    ],
)
def test_what_may_pass(code, status, passes):
    assert is_transient(client_error(code, status)) is passes
    translated = OSError(22, "Invalid")
    translated.__cause__ = client_error(code, status)
    assert is_transient(translated) is passes


def test_client_mistakes_are_not_tried_again():
    from botocore.exceptions import EndpointConnectionError, ParamValidationError

    assert not is_transient(ParamValidationError(report="x"))
    assert is_transient(EndpointConnectionError(endpoint_url="http://x"))
    assert not is_transient(CorruptDataError("x"))
    assert is_transient(mismatch("s3://b/x", "md5 1", "ETag 2"))
    assert isinstance(mismatch("a", "b", "c"), UploadMismatchError)
    assert isinstance(failure(TimeoutError(), "read", "s3://b/x"), StoreUnavailableError)


def test_tries_and_waits():
    waits = list(Retry().waits())
    assert len(waits) == 6
    for wait, most in zip(waits, (0.25, 0.5, 1, 2, 4, 8), strict=True):
        assert most / 2 <= wait <= most
    tried = []

    def fail():
        tried.append(1)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        Retry(tries=3, first_s=0.001).call(fail)
    assert len(tried) == 3
    with pytest.raises(ValueError, match="for good"):
        Retry(tries=3).call(lambda: (_ for _ in ()).throw(ValueError("for good")))


@pytest.mark.parametrize(
    ("retries", "tries"), [({}, 7), ({"max_attempts": 2}, 3), ({"max_attempts": 0}, 1), ({"total_max_attempts": 4}, 4)]
)
def test_tries_of_the_options(retries, tries):
    assert Retry.from_options({"config_kwargs": {"retries": retries}}).tries == tries


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("memory://b/x", "ends with this process"),
        ("http://host/x", "read but not written"),
        ("hf://datasets/x", "commit of a repository"),
        ("webdav://host/x", "nobody has tried"),
    ],
)
def test_roots_that_no_run_may_write_to(url, why):
    with pytest.raises(SettingsError, match=why):
        refuse_as_output(url)
    for fine in ("data", "/data", "file:///data", "s3://b/x", "gs://b/x", "az://b/x", "sftp://h/x"):
        refuse_as_output(fine)


def test_dataset_in_memory(tmp_path):
    """A store that is neither local nor S3, through its own client: exclusive creation and all checks hold."""
    root = Root.open("memory://bucket/x")
    assert root.probe_exclusive()
    make_dataset(root, tmp_path / "spool")
    assert verify(root).problems == []


def test_source_that_shrinks(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(20 * 2**20))
    with Source(path) as source:
        parts = source.parts()
        next(parts)
        path.write_bytes(bytes(100))
        with pytest.raises(CorruptDataError, match="ends at byte"):
            list(parts)


@pytest.mark.parametrize("quick", [True, False])
def test_a_source_that_lost_bits_since_it_was_finished(tmp_path, quick):
    data = bytes(range(256)) * 2**17
    path = tmp_path / "file"
    path.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    known = Known(sha256, xxhash.xxh3_128_hexdigest(data) if quick else None)
    with Source(path, known) as source:
        assert b"".join(part.data for part in source.parts()) == data
        assert source.sha256 == sha256
    path.write_bytes(data[:-1] + b"x")
    with Source(path, known) as source, pytest.raises(CorruptDataError, match="was written"):
        list(source.parts())
