"""Uploads to a real server over HTTP: sizes, checks, faults, clients."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
from moto.s3.models import s3_backends

from extract_core.errors import CorruptDataError, SettingsError, StoreError, UploadMismatchError
from extract_core.progress import Silent, set_reporter
from extract_core.store import upload
from extract_core.store.root import Root
from tests.integration.store.servers import Faulty, client, serving

pytestmark = pytest.mark.integration

MIB = 2**20
CLIENTS = ("s3fs", "obstore")


@pytest.fixture(scope="module")
def server():
    """One moto for the module; its faults are set per test."""
    app = Faulty()
    with serving(app) as options:
        yield app, options


@pytest.fixture
def faulty(server, monkeypatch):
    app, options = server
    app.before = app.after = None
    app.seen.clear()
    monkeypatch.setattr(upload, "PART_BYTES", 5 * MIB)  # S3's least; moto is slow
    yield app, options
    app.before = app.after = None


def make_file(path: Path, nbytes: int) -> tuple[Path, bytes]:
    data = os.urandom(min(nbytes, 3 * MIB)) * (nbytes // min(nbytes, 3 * MIB) + 1) if nbytes else b""
    path.write_bytes(data[:nbytes])
    return path, data[:nbytes]


def open_root(options, client_name="s3fs", **changed):
    return Root.open(f"s3://bucket/{uuid.uuid4().hex}", {**options, **changed}, client_name)


def quick(options, tries=4):
    return {**options, "config_kwargs": {"retries": {"total_max_attempts": tries}}}


def leftovers(options, root):
    prefix = root.url.removeprefix("s3://bucket/")
    listed = client(options).list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
    return [item["Key"].removeprefix(prefix + "/") for item in listed], list(root.unfinished_uploads())


def name_of(data):
    return f"shards/{hashlib.sha256(data).hexdigest()}.safetensors"


@pytest.mark.parametrize("client_name", CLIENTS)
@pytest.mark.parametrize("nbytes", [0, 1, 5 * MIB, 5 * MIB + 1, 23 * MIB])
def test_sizes(faulty, tmp_path, client_name, nbytes):
    app, options = faulty
    root = open_root(options, client_name)
    path, data = make_file(tmp_path / "file", nbytes)
    told = []
    root.put_file(path, name_of(data), on_bytes=told.append)
    assert not path.exists()
    assert sum(told) == nbytes
    assert root.read_bytes(name_of(data)) == data
    parts = [line for line in app.seen if "partNumber" in line]
    assert len(parts) == (0 if nbytes <= 5 * MIB else -(-nbytes // (5 * MIB)))
    assert leftovers(options, root) == ([name_of(data)], [])


UPLOAD = """
import json, resource, sys
from extract_core.progress import Silent, set_reporter
from extract_core.store import upload
from extract_core.store.root import Root

upload.PART_BYTES, upload.PARALLEL = 5 * 2**20, 3
options, client_name, path = json.loads(sys.argv[1])
root = Root.open("s3://bucket/memory", options, client_name)
root.put_bytes("first", b"")
root.bulk_client()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from pathlib import Path
root.put_file(Path(path), "shards/x")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("client_name", CLIENTS)
def test_memory_is_bounded_by_parts_not_by_the_file(faulty, tmp_path, client_name):
    _, options = faulty
    path, _ = make_file(tmp_path / "file", 200 * MIB)
    arguments = json.dumps([options, client_name, str(path)])
    done = subprocess.run([sys.executable, "-c", UPLOAD, arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 90  # MiB: 3 parts of 5 MiB, the client's copies, and what the clients load


@pytest.mark.parametrize("client_name", CLIENTS)
def test_a_file_that_is_not_what_its_name_says_is_not_stored(faulty, tmp_path, client_name):
    _, options = faulty
    root = open_root(options, client_name)
    for nbytes in (1000, 12 * MIB):
        path, data = make_file(tmp_path / "file", nbytes)
        with path.open("r+b") as file:
            file.seek(nbytes // 2)
            file.write(bytes([data[nbytes // 2] ^ 1]))
        with pytest.raises(CorruptDataError, match=r"lost .*bits"):
            root.put_file(path, name_of(data))
        assert path.exists()
        assert leftovers(options, root) == ([], [])


def test_parts_are_tried_again_one_by_one(faulty, tmp_path):
    app, options = faulty
    failed: dict[str, int] = {}

    def before(request):
        if request.is_part:
            number = request.query["partNumber"][0]
            failed[number] = failed.get(number, 0) + 1
            if failed[number] <= 2:
                return (500, 503)[failed[number] % 2]
        return None

    app.before = before
    root = open_root(options)
    path, data = make_file(tmp_path / "file", 14 * MIB)
    root.put_file(path, name_of(data))
    assert failed == {"1": 3, "2": 3, "3": 3}
    assert sum("uploads" in line for line in app.seen) == 1  # one upload, not three
    assert root.read_bytes(name_of(data)) == data


def flip(request, times):
    """Flip a bit of a body on its way to the server, a few times."""
    if times and request.method == "PUT" and int(request.environ.get("CONTENT_LENGTH") or 0) > 500:
        times.pop()
        body = bytearray(request.environ["wsgi.input"].read(int(request.environ["CONTENT_LENGTH"])))
        body[len(body) // 2] ^= 4
        request.environ["wsgi.input"] = io.BytesIO(bytes(body))


@pytest.mark.parametrize("client_name", CLIENTS)
@pytest.mark.parametrize("nbytes", [1000, 12 * MIB])
def test_flipped_bits_are_seen_and_sent_again(faulty, tmp_path, client_name, nbytes):
    """moto checks no digest of what it gets, so only the comparison of ETags can see this."""
    app, options = faulty
    times = [1]
    app.before = lambda request: flip(request, times)
    root = open_root(options, client_name)
    path, data = make_file(tmp_path / "file", nbytes)
    told = []
    root.put_file(path, name_of(data), on_bytes=told.append)
    assert times == []
    assert sum(told) == nbytes
    assert root.read_bytes(name_of(data)) == data
    assert leftovers(options, root)[1] == []


@pytest.mark.parametrize("client_name", CLIENTS)
@pytest.mark.parametrize("nbytes", [1000, 12 * MIB])
def test_bits_that_flip_for_ever(faulty, tmp_path, client_name, nbytes):
    app, options = faulty
    root = open_root(quick(options, 3), client_name)
    app.before = lambda request: flip(request, [1])
    path, data = make_file(tmp_path / "file", nbytes)
    with pytest.raises(UploadMismatchError, match=r"damaged on its way.*nothing stays") as caught:
        root.put_file(path, name_of(data))
    assert caught.value.retryable
    assert path.read_bytes() == data
    app.before = None
    assert leftovers(options, root) == ([], [])


def test_flipped_record(faulty):
    app, options = faulty
    root = open_root(options)
    for write in (root.put_bytes, root.create_exclusive):
        times = [1]
        app.before = lambda request, times=times: flip(request, times)
        write(f"plans/{write.__name__}", bytes(range(256)) * 4)
        assert times == []
        assert root.read_bytes(f"plans/{write.__name__}") == bytes(range(256)) * 4


def once(spoil):
    """Spoil the next answer to a GET; the second value is empty when that has happened."""
    times = [1]

    def after(request, line, headers, body):
        if times and request.method == "GET":
            times.pop()
            body = spoil(body)
            headers = [(k, v) for k, v in headers if k.lower() != "content-length"]
            headers.append(("Content-Length", str(len(body))))
        return line, headers, body

    return after, times


def test_damaged_and_truncated_answers_are_read_again(faulty):
    app, options = faulty
    root, data = open_root(options), bytes(range(200)) * 20
    root.put_bytes("a", data)
    for spoil in (lambda body: bytes([body[0] ^ 1]) + body[1:], lambda body: body[:-7]):
        app.after, times = once(spoil)
        assert root.read_bytes("a") == data
        assert times == []
    # of a range only the length is known here; its rows have an xxh3 of their own
    app.after, times = once(lambda body: body[:-7])
    assert root.read_range("a", 10, 300) == data[10:300]
    assert times == []


def test_complete_whose_answer_is_lost(faulty, tmp_path):
    app, options = faulty
    lost = []

    def after(request, line, headers, body):
        if request.method == "POST" and "uploadId" in request.query and not lost:
            lost.append(1)
            return "500 Lost", [("Content-Length", "0")], b""
        return line, headers, body

    app.after = after
    root = open_root(options)
    path, data = make_file(tmp_path / "file", 11 * MIB)
    root.put_file(path, name_of(data))
    assert lost == [1]
    assert root.read_bytes(name_of(data)) == data


def test_lost_upload_is_retryable(faulty, tmp_path):
    """Somebody aborts the upload: told as what it is, and the step above may start it again."""
    app, options = faulty
    app.before = lambda request: 404 if request.method == "POST" and "uploadId" in request.query else None
    path, data = make_file(tmp_path / "file", 11 * MIB)
    with pytest.raises(StoreError, match="ended by somebody else") as caught:
        open_root(options).put_file(path, name_of(data))
    assert caught.value.retryable


def test_store_that_hides_what_it_just_took(faulty, tmp_path):
    app, options = faulty
    hidden = [1, 1]
    app.before = lambda request: hidden.pop() and 404 if hidden and request.method == "HEAD" else None
    root = open_root(options)
    path, data = make_file(tmp_path / "file", 1000)
    root.put_file(path, name_of(data))
    assert hidden == []


def test_store_whose_etags_are_no_md5(faulty, tmp_path):
    """With a key of the user's: the checksums of the answers decide; without them the object is read back."""
    app, options = faulty

    def hide(*names):
        def after(request, line, headers, body):
            headers = [(k, v) for k, v in headers if k.lower() not in names]
            if request.method in ("PUT", "HEAD"):
                headers = [(k, '"' + "e" * 32 + '"' if k.lower() == "etag" else v) for k, v in headers]
                headers = [*headers, ("x-amz-server-side-encryption", "aws:kms")]
            if request.method == "POST" and b"ETag" in body:
                body = body.replace(body[body.index(b"<ETag>") : body.index(b"</ETag>")], b'<ETag>"' + b"e" * 34 + b'"')
                headers = [(k, str(len(body)) if k.lower() == "content-length" else v) for k, v in headers]
            return line, headers, body

        return after

    for client_name, hidden, reads in (("s3fs", (), 0), ("s3fs", ("x-amz-checksum-crc32",), 1), ("auto", (), 0)):
        for nbytes in (1000, 11 * MIB):
            root = open_root(options, client_name)
            path, data = make_file(tmp_path / "file", nbytes)
            # moto's own check of part ETags must not see the made-up ones
            app.before = _true_etags
            app.after = hide(*hidden)
            app.seen.clear()
            root.put_file(path, name_of(data))
            gets = [line for line in app.seen if line.startswith("GET /bucket") and "list-type" not in line]
            assert (len(gets) > 0) == bool(reads), (client_name, hidden, nbytes)
            app.before = app.after = None
            assert root.read_bytes(name_of(data)) == data


def _true_etags(request):
    """Complete with the ETags that moto knows, whatever the client was told."""
    if request.method == "POST" and "uploadId" in request.query:
        body = request.environ["wsgi.input"].read(int(request.environ["CONTENT_LENGTH"]))
        uploads = next(iter(s3_backends.values()))["aws"].buckets["bucket"].multiparts
        parts = uploads[request.query["uploadId"][0]].parts

        text = body.decode()
        for number, part in parts.items():
            text = re.sub(
                rf"<Part>(?:(?!</Part>).)*<PartNumber>{number}</PartNumber>(?:(?!</Part>).)*</Part>",
                f"<Part><PartNumber>{number}</PartNumber><ETag>{part.etag}</ETag></Part>",
                text,
                flags=re.S,
            )
        request.environ["wsgi.input"] = io.BytesIO(text.encode())
        request.environ["CONTENT_LENGTH"] = str(len(text))


@pytest.mark.parametrize("client_name", CLIENTS)
def test_answer_without_etag(faulty, tmp_path, client_name):
    """Ceph's answer to the last request of an upload has none that obstore reads: the object itself is asked."""
    app, options = faulty

    def after(request, line, headers, body):
        if request.method == "POST" and b"<ETag>" in body:
            body = re.sub(rb"<ETag>.*</ETag>", b"<ETag></ETag>", body)
            headers = [(k, str(len(body)) if k.lower() == "content-length" else v) for k, v in headers]
        return line, headers, body

    app.after = after
    root = open_root(options, client_name)
    path, data = make_file(tmp_path / "file", 11 * MIB)
    root.put_file(path, name_of(data))
    assert sum("partNumber" in line for line in app.seen) == 3
    bulk, _ = root.bulk_client()
    assert bulk is None or bulk._failures == 0
    assert root.size(name_of(data)) == 11 * MIB


class Notes(Silent):
    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


def test_obstore_that_fails_leaves_the_rest_to_s3fs(faulty, tmp_path):
    app, options = faulty
    notes = Notes()
    set_reporter(notes)
    # a store that takes nothing from obstore
    app.before = lambda request: 403 if "object_store" in request.environ.get("HTTP_USER_AGENT", "") else None
    root = open_root(options, "auto")
    for number in range(4):
        path, data = make_file(tmp_path / "file", 11 * MIB)
        root.put_file(path, name_of(data))
        assert root.size(name_of(data)) == 11 * MIB, number
    set_reporter(Silent())
    assert len(notes.lines) == 1
    assert "uploads go on through s3fs: obstore failed 3 times" in notes.lines[0]
    assert "403" in notes.lines[0]
    assert leftovers(options, root)[1] == []


def test_client_that_cannot_be_had_is_refused_by_name(faulty):
    _, options = faulty
    root = open_root(options, "obstore", s3_additional_kwargs={"ACL": "private"})
    with pytest.raises(SettingsError, match=r"store.client is obstore, but s3_additional_kwargs ACL.*auto or s3fs"):
        root.bulk_client()
    bulk, why = open_root(options, "auto", s3_additional_kwargs={"ACL": "private"}).bulk_client()
    assert bulk is None
    assert "ACL" in why


def test_two_uploads_of_the_same_bytes_at_once(faulty, tmp_path):
    _, options = faulty
    root = open_root(options, "auto")
    files = [make_file(tmp_path / f"file{i}", 11 * MIB)[0] for i in range(2)]
    files[1].write_bytes(files[0].read_bytes())
    rel = name_of(files[0].read_bytes())
    errors = []

    def put(path):
        try:
            root.put_file(path, rel)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=put, args=(path,)) for path in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert leftovers(options, root) == ([rel], [])
