"""Puts one finished local file into an object store: parallel parts, bounded memory, every byte checked.

Memory: at most ``PARALLEL`` parts and as much again in the client's buffers. The file is read once, in order; what is
hashed is what is sent. Checks, all of them always:

* a digest of the whole file while it is read (xxh3_128 of when it was finished, else the sha256 in its name): a spool
  that lost bits is noticed;
* md5 of each part, sent along (the store refuses other bytes) and compared with the part's ETag;
* the finished object's ETag (the md5 of the parts' md5s) and size;
* where ETags are no md5 (encryption with a key of the user's): the parts' checksums of the store's answers;
* where nothing of that can be had: the object is read back.

A part that fails is sent again, alone. An upload that fails is aborted, and nothing stays under its name.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from extract_core.errors import CorruptDataError, StoreError, StoreUnavailableError
from extract_core.store import s3
from extract_core.store.bulk import BulkClient, BulkError
from extract_core.store.failures import error_code, is_transient, mismatch
from extract_core.store.protocols import renames
from extract_core.store.retry import Retry

PART_BYTES = 8 * 2**20
PARALLEL = 8
MOST_PARTS = 9_900
"""S3 takes 10,000; larger files get larger parts."""

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class Part:
    """Bytes of a file that go in one request; parts count from 1."""

    number: int
    data: bytes


@dataclass(frozen=True)
class Known:
    """Digests that the bytes of a file must have, in hex; None where nothing is known."""

    sha256: str | None = None
    xxh3_128: str | None = None


class Source:
    """A finished local file, read once and in order.

    Args:
        path: the file.
        known: what its bytes must have.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, known: Known = Known()):
        self.path, self._known = path, known
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size
        self.part_bytes = max(PART_BYTES, -(-self.size // MOST_PARTS))
        self.sha256 = ""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    def parts(self) -> Iterator[Part]:
        """All parts; ``sha256`` of the file is known at the end.

        Raises:
            CorruptDataError: the file is shorter than it was, or is not what its digest says.
        """
        # Where the sha256 is known, ten times faster xxh3 proves as well that these are the same bytes.
        quick = self._known.sha256 is not None and self._known.xxh3_128 is not None
        whole = xxhash.xxh3_128() if quick else hashlib.sha256()
        for number, start in enumerate(range(0, self.size, self.part_bytes) if self.size else (0,), 1):
            data = self._read(start, min(self.part_bytes, self.size - start))
            whole.update(data)
            if start + len(data) == self.size:
                self._finish(whole.hexdigest(), self._known.xxh3_128 if quick else self._known.sha256)
            yield Part(number, data)

    def _read(self, start: int, nbytes: int) -> bytes:
        data = os.pread(self._fd, nbytes, start)
        while len(data) < nbytes:
            more = os.pread(self._fd, nbytes - len(data), start + len(data))
            if not more:
                raise CorruptDataError(
                    f"{self.path} ends at byte {start + len(data)} while it is uploaded, {self.size} bytes were "
                    "expected; something cut it short: run the same command again"
                )
            data += more
        return data

    def _finish(self, digest: str, expected: str | None) -> None:
        self.sha256 = self._known.sha256 or digest
        if expected is not None and digest != expected:
            raise CorruptDataError(
                f"{self.path} has digest {digest}, but {expected} was written; the spool's disk or memory lost "
                "bits, or another program wrote to it. Nothing was stored: check the disk and run again"
            )


class S3Upload:
    """An upload to one name.

    Args:
        fs: s3fs; makes all requests that ``bulk`` does not.
        target: bucket and key.
        retry: for each single request.
        bulk: carries the bytes of large files, where there is one.
        on_bytes: told how many bytes more are on their way or stored; a negative number takes some back.
    """

    def __init__(
        self,
        fs: Any,
        target: str,
        *,
        retry: Retry,
        bulk: BulkClient | None = None,
        on_bytes: OnBytes | None = None,
    ):
        self._fs, self._target, self._retry, self._bulk = fs, target, retry, bulk
        bucket, key, _ = fs.split_path(target)
        self._name = {"Bucket": bucket, "Key": key}
        self._url = f"s3://{target}"
        self._on_bytes = on_bytes or (lambda _: None)
        self._failed = threading.Event()

    def run(self, local: Path, known: Known = Known()) -> None:
        """Upload a file; returns when the store holds all of it, checked.

        Raises:
            CorruptDataError: the local file is not what is known of it; nothing is stored.
            UploadMismatchError: the bytes were damaged on their way, again and again; nothing is stored.
            OSError, StoreError: as the client or this machine said.
        """
        with Source(local, known) as source:
            if source.size <= source.part_bytes:
                self._single(source)
                return
            if self._bulk is not None and self._bulk.usable and self._through_bulk(source, self._bulk):
                return
            self._multipart(source)

    # -- one request ---------------------------------------------------------------------------------------------

    def _single(self, source: Source) -> None:
        (part,) = source.parts()
        told = self._retry.call(lambda: s3.put(self._fs, self._target, part.data))
        self._on_bytes(len(part.data))
        self._confirm(source, None if told is None else s3.md5_of(part.data).hex())

    # -- parts through s3fs --------------------------------------------------------------------------------------

    def _multipart(self, source: Source) -> None:
        begun = self._retry.call(lambda: self._fs.call_s3("create_multipart_upload", **self._name))
        upload = {**self._name, "UploadId": begun["UploadId"]}
        try:
            parts, md5s = self._send_parts(source, upload)
            etag = f"{s3.md5_of(b''.join(md5s)).hex()}-{len(md5s)}" if None not in md5s else None  # type: ignore[arg-type]
            self._complete(upload, parts, etag)
        except BaseException:
            # What cannot be aborted now is found by gc, which lists unfinished uploads.
            with contextlib.suppress(OSError, StoreError):
                self._fs.call_s3("abort_multipart_upload", **upload)
            raise
        self._confirm(source, etag)

    def _send_parts(self, source: Source, upload: dict[str, Any]) -> tuple[list[dict[str, Any]], list[bytes | None]]:
        sent: dict[int, tuple[dict[str, Any], bytes | None]] = {}
        waiting: set[Future[tuple[int, dict[str, Any], bytes | None]]] = set()

        def collect(finished: set[Future[tuple[int, dict[str, Any], bytes | None]]]) -> None:
            for future in finished:
                number, entry, md5 = future.result()
                sent[number] = (entry, md5)

        with ThreadPoolExecutor(PARALLEL, "upload") as pool:
            try:
                for part in source.parts():
                    if len(waiting) >= PARALLEL:
                        finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                        collect(finished)
                    waiting.add(pool.submit(self._send, upload, part))
                collect(waiting)
            except BaseException:
                self._failed.set()  # parts under way are not tried again
                raise
        ordered = [sent[number] for number in sorted(sent)]
        return [entry for entry, _ in ordered], [md5 for _, md5 in ordered]

    def _send(self, upload: dict[str, Any], part: Part) -> tuple[int, dict[str, Any], bytes | None]:
        """Send a part until the store holds it; the md5 is None where its answer proves nothing."""
        md5 = s3.md5_of(part.data)
        digest = base64.b64encode(md5).decode()

        def put() -> tuple[int, dict[str, Any], bytes | None]:
            answer = self._fs.call_s3(
                "upload_part", **upload, PartNumber=part.number, Body=part.data, ContentMD5=digest
            )
            told = s3.verdict(answer, part.data, md5)
            if told is False:
                raise mismatch(f"part {part.number} of {self._url}", f"md5 {md5.hex()}", f"ETag {s3.etag_of(answer)}")
            entry = {"PartNumber": part.number, "ETag": answer["ETag"]}
            for name in ("ChecksumCRC32", "ChecksumCRC32C", "ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256"):
                if answer.get(name) and s3.has_own_key(answer):
                    entry[name] = answer[name]
            return part.number, entry, md5 if told else None

        done = self._retry.call(put, transient=self._may_pass)
        self._on_bytes(len(part.data))
        return done

    def _may_pass(self, error: BaseException) -> bool:
        return not self._failed.is_set() and is_transient(error)

    def _complete(self, upload: dict[str, Any], parts: list[dict[str, Any]], etag: str | None) -> None:
        """Make the object of its parts. A lost answer is no failure: the object is there with the right ETag."""
        asked = 0

        def complete() -> None:
            nonlocal asked
            asked += 1
            try:
                answer = self._fs.call_s3("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
            except FileNotFoundError as error:
                if error_code(error) == "NoSuchBucket":
                    raise
                if asked > 1 and etag is not None and self._stored_etag() == etag:
                    return
                raise StoreUnavailableError(
                    f"the upload of {self._url} was ended by somebody else (gc, or a rule of the bucket); try again"
                ) from error
            if etag is not None and s3.is_md5_etag(answer) and s3.etag_of(answer) != etag:
                self._undo()
                raise mismatch(self._url, f"ETag {etag}", f"ETag {s3.etag_of(answer)}")

        self._retry.call(complete, transient=lambda e: is_transient(e) and not isinstance(e, StoreError))

    # -- parts through the bulk client ---------------------------------------------------------------------------

    def _through_bulk(self, source: Source, bulk: BulkClient) -> bool:
        """Whether the bulk client stored the file; where it fails, s3fs sends it again, part by part."""
        told = 0
        md5s: list[Future[bytes]] = []

        def feed(pool: ThreadPoolExecutor) -> Iterator[bytes]:
            nonlocal told
            for part in source.parts():
                md5s.append(pool.submit(s3.md5_of, part.data))
                if len(md5s) > PARALLEL:
                    md5s[-PARALLEL].result()  # else digests that wait would hold the whole file
                yield part.data
                told += len(part.data)
                self._on_bytes(len(part.data))

        try:
            with ThreadPoolExecutor(2, "md5") as pool:
                came = bulk.put(self._name["Key"], feed(pool), part_bytes=source.part_bytes, parallel=PARALLEL)
        except BulkError as error:
            bulk.failed(str(error))
            self._on_bytes(-told)
            return False
        expected = f"{s3.md5_of(b''.join(item.result() for item in md5s)).hex()}-{len(md5s)}"
        if came != expected:
            # Ceph's answer to the last request of an upload names no ETag that obstore can read.
            head = self._seen_head()
            came = s3.etag_of(head)
        if came != expected:
            self._undo()
            if s3.is_md5_etag(head):
                bulk.failed(f"{self._url} arrived damaged (ETag {came}, expected {expected})")
            else:
                bulk.give_up(f"this store's ETags are no md5 (got {came!r}), and obstore shows no other checksum")
            self._on_bytes(-told)
            return False
        self._confirm(source, expected)
        return True

    # -- afterwards ----------------------------------------------------------------------------------------------

    def _confirm(self, source: Source, etag: str | None) -> None:
        """The object is visible, whole and, where no ETag told so before, the bytes that were sent.

        Raises:
            UploadMismatchError: it is not; the object is removed.
        """
        head = self._seen_head()
        size = int(head.get("ContentLength") or 0)
        if size != source.size:
            self._undo()
            raise mismatch(self._url, f"{source.size} bytes", f"{size} bytes")
        if etag is not None and (s3.etag_of(head) == etag or s3.has_own_key(head)):
            return
        if etag is not None and s3.is_md5_etag(head):
            self._undo()
            raise mismatch(self._url, f"ETag {etag}", f"ETag {s3.etag_of(head)}")
        came = read_back(lambda a, b: self._retry.call(lambda: s3.get_range(self._fs, self._target, a, b)), source.size)
        if came != source.sha256:
            self._undo()
            raise mismatch(self._url, f"sha256 {source.sha256}", f"sha256 {came}")

    def _seen_head(self) -> dict[str, Any]:
        """What the store says of an object that was just written; some stores need a moment to see it."""
        return self._retry.call(
            self._head, transient=lambda error: isinstance(error, FileNotFoundError) or is_transient(error)
        )

    def _head(self) -> dict[str, Any]:
        return dict(self._fs.call_s3("head_object", **self._name))

    def _stored_etag(self) -> str | None:
        try:
            return s3.etag_of(self._head())
        except FileNotFoundError:
            return None

    def _undo(self) -> None:
        self._retry.call(lambda: self._fs.call_s3("delete_object", **self._name))


def read_back(read: Callable[[int, int], bytes], size: int) -> str:
    """The sha256 of a stored object.

    Args:
        read: gives bytes start to stop.
        size: of the object.
    """
    whole = hashlib.sha256()
    for start in range(0, size, PART_BYTES):
        whole.update(read(start, min(size, start + PART_BYTES)))
    return whole.hexdigest()


def other_store(
    fs: Any,
    target: str,
    local: Path,
    *,
    retry: Retry,
    known: Known = Known(),
    on_bytes: OnBytes | None = None,
) -> None:
    """Upload to a store that is not S3: by its own client, then the object is read back and compared.

    Raises:
        CorruptDataError: the local file is not what is known of it; nothing is stored.
        UploadMismatchError: the store holds other bytes, after several tries; they are removed.
    """
    with Source(local, known) as source:
        for _ in source.parts():
            pass

        def put() -> None:
            with _under_temporary_name(fs, target) as name:
                fs.put_file(str(local), name)
                came = read_back(lambda a, b: bytes(fs.cat_file(name, start=a, end=b)), source.size)
                stored = int(fs.info(name)["size"])
                if came != source.sha256 or stored != source.size:
                    fs.rm_file(name)
                    raise mismatch(target, f"sha256 {source.sha256}", f"{stored} bytes with sha256 {came}")

        retry.call(put)
        if on_bytes is not None:
            on_bytes(source.size)


def replace(fs: Any, target: str, data: bytes) -> None:
    """Write a small object to a store that is not S3; readers see the old or the new one."""
    with _under_temporary_name(fs, target) as name:
        fs.pipe_file(name, data)


@contextlib.contextmanager
def _under_temporary_name(fs: Any, target: str) -> Iterator[str]:
    """Where to write an object: under its name, or, on stores that show half-written files, beside it and renamed."""
    if not renames(fs):
        yield target
        return
    folder, _, _ = target.rpartition("/")
    temp = f"{folder}/.tmp-{uuid.uuid4().hex}"
    fs.makedirs(folder, exist_ok=True)
    try:
        yield temp
        fs.mv(temp, target)
    except BaseException:
        with contextlib.suppress(OSError):
            fs.rm_file(temp)
        raise
