"""A dataset root: a local folder or any fsspec URL, with the few operations that the store builds on.

Three kinds of object, three ways to write them:

* *records* that decide something (commit records, manifests) are created exclusively: exactly one writer wins;
* *immutable objects* (shards, indexes) are named by their content and appear whole or not at all;
* *small replaceable objects* (hints, plans) are replaced atomically.

All writes are durable when the call returns. On a local root that means fsync of the file and of its folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from extract_core.errors import (
    AlreadyExistsError,
    CoresampleError,
    CorruptDataError,
    NoSpaceError,
    RootError,
    SettingsError,
    StoreError,
    StoreUnavailableError,
)
from extract_core.progress import reporter
from extract_core.store import listing, remote, s3, upload
from extract_core.store.bulk import BulkClient, Choice, choose
from extract_core.store.failures import failure, http_status, is_transient, reason
from extract_core.store.layout import PLANS, PROBES, TEMP_PREFIX, VERSIONS, object_digest
from extract_core.store.localfiles import (
    check_writable,
    copy_durably,
    local_folder,
    make_folder,
    open_regular,
    pread,
    sync_file,
    sync_folder,
    temp_beside,
    write_durably,
)
from extract_core.store.protocols import RENAMED, protocol_of, renames
from extract_core.store.retry import Retry

T = TypeVar("T")

MAX_RECORD_BYTES = 64 * 2**20
"""Records go in ONE put: stores disagree on whether a conditional multipart upload is exclusive."""

_ONE_BY_ONE = threading.RLock()
"""Paramiko's sftp client, which fsspec shares in a process, hangs when two threads ask it at once."""
_S3_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60}
"""Seconds; s3fs's own (5 and 15) give up on servers that are only slow."""
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK})


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether a root, as the user wrote it, is no folder of this machine."""
    protocol, separator, _ = os.fspath(url).strip().partition("://")
    return bool(separator) and protocol not in ("file", "local")


def _tell_given_up(why: str) -> None:
    reporter().note(f"uploads go on through s3fs: {why}")


class Root:
    """A dataset root. Cheap to make, safe to pickle and to use after a fork; opens no connection by itself.

    Attributes:
        url: the folder (absolute) or URL without a trailing slash; names no credentials.
        exclusive: whether the store creates exclusively, once ``probe_exclusive`` has been called; None before.
        guard: called before a record is created in a store without exclusive creation; raises when this run must not.
    """

    def __init__(
        self, url: str, *, local: Path | None, storage_options: Mapping[str, Any], client: Choice = "auto"
    ) -> None:
        self.url = url
        self.exclusive: bool | None = None
        self.guard: Callable[[], None] | None = None
        self._local = local
        self._options = dict(storage_options)
        self._client: Choice = client
        self._retry = Retry.from_options(self._options)
        self._remote: tuple[int, Any, str] | None = None
        self._bulk: tuple[int, BulkClient | None, str | None] | None = None

    @classmethod
    def open(cls, url: str, storage_options: Mapping[str, Any] | None = None, client: Choice = "auto") -> Root:
        """Name a root.

        Args:
            url: a folder (it need not exist yet), ``file://...`` or any URL that fsspec knows, e.g. ``s3://bucket/prefix``.
            storage_options: passed to the fsspec file system.
            client: who carries the bytes of large files to S3: ``s3fs``, ``obstore``, or ``auto``, which is obstore
                where it is installed and can do what the options ask.

        Raises:
            SettingsError: the URL is malformed or of an unknown kind, or the options do not fit it.
            RootConflictError: the path is a file.
            RootError: the path cannot be a folder.
            StoreError: the package for this kind of URL is not installed.
        """
        text = os.fspath(url).strip()
        if not text:
            raise SettingsError("the dataset root is empty; give a folder or a URL such as s3://bucket/prefix")
        if "::" in text:
            raise SettingsError(
                f"dataset root {text!r} chains file systems; give the plain URL (caches would hide commits)"
            )
        protocol, separator, rest = text.partition("://")
        if not is_remote(text):
            path = local_folder(rest if separator else text, "dataset root")
            return cls(str(path), local=path, storage_options={})
        if not rest.strip("/"):
            raise SettingsError(f"dataset root {text!r} names no bucket or folder; write {protocol}://bucket/prefix")
        root = cls(text.rstrip("/"), local=None, storage_options=storage_options or {}, client=client)
        root._open_remote()
        return root

    def check_writable(self) -> None:
        """Refuse a local root that a new dataset cannot be written to; one that holds something is left to the run.

        Raises:
            RootError, NoSpaceError: says where and why.
        """
        if self._local is not None and not any((self._local / name).is_dir() for name in (PLANS, VERSIONS)):
            check_writable(self._local, "dataset root")

    @property
    def is_local(self) -> bool:
        """Whether the root is a folder of this machine."""
        return self._local is not None

    def __repr__(self) -> str:
        return f"Root({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Root.open, (self.url, self._options, self._client), {"exclusive": self.exclusive}

    # -- names ---------------------------------------------------------------------------------------------------

    def describe(self, rel: str) -> str:
        """The full path or URL of an object, for messages."""
        return f"{self.url}/{_checked(rel)}" if rel else self.url

    def local_path(self, rel: str) -> Path | None:
        """The object's path on this machine; None on a remote root."""
        if self._local is None:
            return None
        return self._local / _checked(rel) if rel else self._local

    def _open_remote(self) -> tuple[Any, str]:
        """File system and prefix. Opened anew in a forked process: async file systems do not survive a fork."""
        if self._remote is None or self._remote[0] != os.getpid():
            import fsspec

            try:
                fs, prefix = fsspec.url_to_fs(self.url, **self._fs_options())
            except ImportError as error:
                raise StoreError(f"cannot open {self.url}: {error}") from error
            except (ValueError, TypeError) as error:
                raise SettingsError(
                    f"cannot open dataset root {self.url}: {error}; check the URL and its options"
                ) from error
            except StoreError:
                raise
            except Exception as error:
                raise failure(error, "open", self.url) from error
            if s3.is_s3(fs):
                fs.retries = 1  # tries are counted in one place, Retry
            self._remote = (os.getpid(), fs, prefix.rstrip("/"))
        return self._remote[1], self._remote[2]

    def _fs_options(self) -> dict[str, Any]:
        options = dict(self._options)
        if protocol_of(self.url) not in RENAMED:  # sftp has no such cache, and takes the option for one of its login
            options["use_listings_cache"] = False
        if protocol_of(self.url) in ("s3", "s3a"):
            config = dict(options.get("config_kwargs") or {})
            options["config_kwargs"] = {**_S3_TIMEOUTS, **config, "retries": {"total_max_attempts": 1}}
        return options

    def bulk_client(self) -> tuple[BulkClient | None, str | None]:
        """The client that carries the bytes of large files beside s3fs, and why there is none; asked once.

        Raises:
            SettingsError: the job asks for obstore, which cannot be had.
            StoreError: the store's client cannot be set up.
        """
        fs, prefix = self._open_remote() if self._local is None else (None, "")
        if fs is None or not s3.is_s3(fs):
            return None, None
        if self._bulk is None or self._bulk[0] != os.getpid():
            try:
                bulk, why = choose(self._client, fs, fs.split_path(prefix)[0], _tell_given_up)
            except CoresampleError:
                raise
            except Exception as error:
                raise failure(error, "open", self.url) from error
            self._bulk = (os.getpid(), bulk, why)
        return self._bulk[1], self._bulk[2]

    def _target(self, rel: str) -> tuple[Any, str]:
        fs, prefix = self._open_remote()
        return fs, f"{prefix}/{_checked(rel)}" if rel else prefix

    # -- reading -------------------------------------------------------------------------------------------------

    def read_bytes(self, rel: str, *, most: int | None = None) -> bytes:
        """A whole object.

        Args:
            rel: its name.
            most: bytes that it may have; looked at before anything is read, on a local root.

        Raises:
            FileNotFoundError: there is no such object.
            CorruptDataError: it has more bytes than ``most``.
            StoreError: it cannot be read.
        """
        with self._reading(rel):
            if (path := self.local_path(rel)) is not None:
                with open_regular(path) as file:
                    size = os.fstat(file.fileno()).st_size
                    if most is not None and size > most:
                        raise CorruptDataError(
                            f"{path} has {size} bytes, expected at most {most}; it is no such record"
                        )
                    return file.read()
            return self._remotely(rel, remote.read_whole)

    def read_range(self, rel: str, start: int, stop: int) -> bytes:
        """Bytes ``start`` (included) to ``stop`` (excluded), always all of them, in one request.

        Raises:
            FileNotFoundError: there is no such object.
            CorruptDataError: the object ends before ``stop``.
            StoreError: it cannot be read.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"byte range {start}..{stop} is not a range")
        if start == stop:
            return b""
        with self._reading(rel):
            if (path := self.local_path(rel)) is not None:
                with open_regular(path) as file:
                    size = os.fstat(file.fileno()).st_size  # a read takes memory for what is asked of it
                    data = pread(file.fileno(), start, min(stop, size)) if start < size else b""
            else:
                data = self._remotely(rel, lambda fs, target: remote.read_range(fs, target, start, stop))
        if len(data) != stop - start:
            raise CorruptDataError(
                f"{self.describe(rel)} is cut short: bytes {start}..{stop} were expected, {len(data)} of them came; "
                "run 'coresample verify' on the dataset"
            )
        return data

    def exists(self, rel: str) -> bool:
        """Whether there is such an object (not a folder)."""
        try:
            self.size(rel)
        except FileNotFoundError:
            return False
        return True

    def size(self, rel: str) -> int:
        """Size of an object in bytes.

        Raises:
            FileNotFoundError: there is no such object.
            StoreError: the store cannot say.
        """
        with self._reading(rel):
            if (path := self.local_path(rel)) is not None:
                if path.is_dir():
                    raise FileNotFoundError(errno.ENOENT, "is a folder", str(path))
                return path.stat().st_size
            return self._remotely(rel, remote.size)

    def list(self, rel_dir: str) -> list[str]:
        """Names (not paths) in a folder ("" is the root), sorted, asked anew each time; empty when it is absent."""
        try:
            with self._reading(rel_dir, action="list"):
                if (path := self.local_path(rel_dir)) is not None:
                    names = [item.name for item in path.iterdir()]
                else:
                    names = self._remotely(rel_dir, remote.names)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith(TEMP_PREFIX))

    def entries(self, rel_dir: str) -> Sequence[listing.Entry]:
        """Every object in a folder and below it, temporary files too, with size and time; asked anew each time.

        Links inside the folder are not followed and not listed. Empty when the folder is absent.

        Raises:
            StoreError: it cannot be listed.
        """
        try:
            with self._reading(rel_dir, action="list"):
                if (path := self.local_path(rel_dir)) is not None:
                    return listing.local_entries(path, rel_dir)
                return self._remotely(rel_dir, lambda fs, target: listing.remote_entries(fs, target, rel_dir))
        except FileNotFoundError:
            return []

    def modified(self, rel: str) -> float | None:
        """When an object was written, as the store says (seconds since 1970); None where it is absent or not told.

        Raises:
            StoreError: the store cannot be asked.
        """
        try:
            with self._reading(rel):
                if (path := self.local_path(rel)) is not None:
                    return path.lstat().st_mtime
                return self._remotely(rel, lambda fs, target: listing.time_of(fs, target, fs.info(target)))
        except FileNotFoundError:
            return None

    def unfinished_uploads(self) -> Sequence[listing.Upload]:
        """Multipart uploads that were begun below the root and not completed; empty where the client cannot tell.

        Raises:
            StoreError: the store refuses to list them.
        """
        if self._local is not None:
            return []
        with self._reading("", action="list unfinished uploads of"):
            return self._remotely("", listing.unfinished_uploads)

    def abort_upload(self, unfinished: listing.Upload) -> None:
        """End an unfinished upload and free its parts; one that is gone is no error."""
        try:
            self._remotely("", lambda fs, target: listing.abort_upload(fs, target, unfinished))
        except FileNotFoundError:
            return
        except Exception as error:
            raise failure(error, "abort the upload of", self.describe(unfinished.path)) from error

    def delete_empty_folder(self, rel_dir: str) -> bool:
        """Remove a local folder if nothing is in it; object stores have no folders."""
        path = self.local_path(rel_dir)
        if path is None or not rel_dir or path.is_symlink():
            return False
        try:
            self.check_inside(rel_dir)
            path.rmdir()
        except (OSError, RootError):
            return False
        return True

    def _remotely(self, rel: str, request: Callable[[Any, str], T]) -> T:
        """Make a request that is safe to repeat, again while its failure may pass."""
        fs, target = self._target(rel)

        def once() -> T:
            with self._turn():
                return request(fs, target)

        return self._retry.call(once)

    def _turn(self) -> contextlib.AbstractContextManager[Any]:
        return _ONE_BY_ONE if protocol_of(self.url) in RENAMED else contextlib.nullcontext()

    @contextlib.contextmanager
    def _reading(self, rel: str, action: str = "read") -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "no such object in the dataset root", self.describe(rel)) from error
        except StoreError:
            raise
        except Exception as error:
            raise failure(error, action, self.describe(rel)) from error

    # -- writing -------------------------------------------------------------------------------------------------

    def create_exclusive(self, rel: str, data: bytes) -> None:
        """Create a small object that nobody else may have created: among any number of callers exactly one returns.

        Local: write and fsync a temporary file, hard-link it to its name, fsync the folder. Object stores: one PUT with
        ``If-None-Match: *``. After a lost answer the object is read back, so that a success is not taken for a failure;
        that needs ``data`` to be unique to the caller (records carry an attempt id).
        A root found to lack exclusive creation by ``probe_exclusive`` gets a check followed by a plain write.

        Raises:
            AlreadyExistsError: the name is taken; carries the bytes that are there.
            NoSpaceError: disk or quota is full.
            StoreUnavailableError: the store did not answer; the object is not there.
            StoreError: anything else.
        """
        _checked(rel)
        if len(data) > MAX_RECORD_BYTES:
            raise StoreError(
                f"{self.describe(rel)} would have {len(data)} bytes; records are at most {MAX_RECORD_BYTES}"
            )
        if self.exclusive is False:
            if self.guard is not None:
                self.guard()
            if self.exists(rel):
                raise AlreadyExistsError(self.describe(rel), self.read_bytes(rel))
            self.put_bytes(rel, data)
        elif (path := self.local_path(rel)) is not None:
            self._link_new(rel, path, data)
        else:
            self._put_if_absent(rel, data)

    def check_inside(self, rel: str) -> None:
        """Refuse to write or delete through a link: nothing outside the root is ever touched. Reading follows links.

        Raises:
            RootError: a folder on the way to ``rel`` is a link that leads out of the (local) root.
        """
        path = self.local_path(rel)
        if path is None or self._local is None:
            return
        folder, root = Path(os.path.realpath(path.parent)), Path(os.path.realpath(self._local))
        if not folder.is_relative_to(root):
            raise RootError(
                f"{path.parent} leads out of the dataset root, to {folder}; nothing is written or deleted there. "
                "Replace the link by a folder (or mount the other disk on it)"
            )

    def _link_new(self, rel: str, path: Path, data: bytes) -> None:
        self.check_inside(rel)
        temp = temp_beside(path)
        try:
            make_folder(path.parent)
            write_durably(temp, data)
            try:
                os.link(temp, path)
            except FileExistsError:
                # a network file system may carry out the link, lose the answer and see its own name on the second try
                if not temp.samefile(path):
                    raise AlreadyExistsError(str(path), path.read_bytes()) from None
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise StoreError(
                        f"cannot create {path}: this file system has no hard links ({error.strerror}), which exclusive "
                        "creation needs; put the root on a local file system or an object store"
                    ) from error
                raise
            sync_folder(path.parent)
        except OSError as error:
            raise failure(error, "create", str(path)) from error
        finally:
            with contextlib.suppress(OSError):
                temp.unlink(missing_ok=True)

    def _put_if_absent(self, rel: str, data: bytes) -> None:
        fs, target = self._target(rel)
        waits = self._retry.waits()
        unclear = False
        while True:
            try:
                remote.create(fs, target, data)
                return
            except Exception as error:
                # Stores say it as 412, some clients as FileExistsError, s3fs on Ceph as errno 22 caused by a 412.
                refused = isinstance(error, FileExistsError) or http_status(error) == 412
                existing = self._look(rel)
                if existing is not None:
                    if existing == data and (unclear or not refused):
                        return  # a PUT of this call arrived, only its answer was lost
                    raise AlreadyExistsError(self.describe(rel), existing) from error
                conflict = http_status(error) == 409  # another conditional PUT was in flight: ask again
                may_pass = refused or conflict or is_transient(error)
                if not may_pass and (http_status(error) in (400, 501) or isinstance(error, NotImplementedError)):
                    raise StoreError(
                        f"cannot create {self.describe(rel)}: the store refuses conditional writes ({reason(error)})"
                    ) from error
                wait = next(waits, None) if may_pass else None
                if wait is None:
                    raise failure(error, "create", self.describe(rel)) from error
                unclear = unclear or not conflict
                time.sleep(wait)

    def _look(self, rel: str) -> bytes | None:
        try:
            return self.read_bytes(rel)
        except FileNotFoundError:
            return None

    def put_file(
        self, local: Path, rel: str, *, xxh3_128: str | None = None, on_bytes: upload.OnBytes | None = None
    ) -> None:
        """Move a finished local file into the root as an immutable object, durable on return.

        ``local`` is consumed: it is gone when the call returns, and untouched when the call fails. Local roots: fsync
        and rename, or a copy under a temporary name where ``local`` is on another file system. Remote: an upload whose
        bytes are checked end to end (``store.upload``); nothing is left under the name when it fails.

        Args:
            local: the file.
            rel: the object's name.
            xxh3_128: digest of the file when it was finished, which a remote root compares with what it sends; without
                one it compares the sha256 in ``rel``, which takes ten times as long.
            on_bytes: told how many more bytes are on their way to a remote root; negative to take some back.

        Raises:
            CorruptDataError: the local file is not what its name says.
            UploadMismatchError: the store holds other bytes than were sent, after several tries.
            NoSpaceError, StoreUnavailableError, StoreError: as everywhere.
        """
        local = Path(local)
        path = self.local_path(_checked(rel))
        try:
            if path is None:
                self._upload(local, rel, xxh3_128, on_bytes)
            else:
                self.check_inside(rel)
                make_folder(path.parent)
                sync_file(local)
                try:
                    local.rename(path)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    copy_durably(local, path)
                sync_folder(path.parent)
            local.unlink(missing_ok=True)
        except StoreError:
            raise
        except Exception as error:
            raise failure(error, "store", self.describe(rel)) from error

    def _upload(self, local: Path, rel: str, xxh3_128: str | None, on_bytes: upload.OnBytes | None) -> None:
        fs, target = self._target(rel)
        known = upload.Known(object_digest(rel.rpartition("/")[2]), xxh3_128)
        if s3.is_s3(fs):
            bulk, _ = self.bulk_client()
            upload.S3Upload(fs, target, retry=self._retry, bulk=bulk, on_bytes=on_bytes).run(local, known)
        else:
            with self._turn():
                upload.other_store(fs, target, local, retry=self._retry, known=known, on_bytes=on_bytes)

    def put_bytes(self, rel: str, data: bytes) -> None:
        """Write a small object, replacing one that is there; readers see the old or the new one, never a mixture."""
        path = self.local_path(_checked(rel))
        temp = None
        try:
            if path is None:
                self._remotely(rel, lambda fs, target: remote.replace(fs, target, data))
            else:
                self.check_inside(rel)
                temp = temp_beside(path)
                make_folder(path.parent)
                write_durably(temp, data)
                temp.replace(path)
                sync_folder(path.parent)
        except StoreError:
            raise
        except Exception as error:
            if temp is not None:
                with contextlib.suppress(OSError):
                    temp.unlink(missing_ok=True)
            raise failure(error, "write", self.describe(rel)) from error

    def delete(self, rel: str) -> None:
        """Remove an object; one that is absent is no error."""
        _checked(rel)
        try:
            if (path := self.local_path(rel)) is not None:
                self.check_inside(rel)
                path.unlink(missing_ok=True)
            else:
                with contextlib.suppress(FileNotFoundError):
                    self._remotely(rel, lambda fs, target: fs.rm_file(target))
        except StoreError:
            raise
        except Exception as error:
            raise failure(error, "delete", self.describe(rel)) from error

    def probe_exclusive(self) -> bool:
        """Find out whether this root creates exclusively: two conditional writes of a fresh name, the second must fail.

        The answer is kept in ``exclusive``. Without it, only one publisher may work on the root at a time.

        Raises:
            StoreError: the root cannot be written at all.
        """
        self.exclusive = None
        rel = f"{PROBES}/{uuid.uuid4().hex}"
        first, second = b"first " + uuid.uuid4().bytes, b"second " + uuid.uuid4().bytes
        try:
            try:
                self.create_exclusive(rel, first)
            except (NoSpaceError, StoreUnavailableError):
                raise
            except StoreError:
                self.put_bytes(rel, first)  # a root that cannot be written at all fails here, with its own reason
                answer = False
            else:
                answer = self._local is not None or not renames(self._open_remote()[0])
            self._require_seen(rel, first)
            if answer:
                try:
                    self.create_exclusive(rel, second)
                    answer = False
                except AlreadyExistsError as error:
                    answer = error.existing == first
        finally:
            with contextlib.suppress(StoreError):
                self.delete(rel)
            if (folder := self.local_path(PROBES)) is not None:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        self.exclusive = answer
        return answer

    def _require_seen(self, rel: str, data: bytes) -> None:
        """What was written must be read and listed at once."""
        folder, _, name = rel.rpartition("/")
        try:
            came = self._retry.call(
                lambda: self.read_bytes(rel), transient=lambda error: isinstance(error, FileNotFoundError)
            )
            listed = name in self.list(folder)
        except FileNotFoundError:
            came, listed = b"", False
        if came != data or not listed:
            what = "does not list it" if came == data else "shows other bytes"
            raise StoreError(
                f"{self.describe(rel)} was written, but the store {what}: a dataset needs a store where a write is "
                "seen at once; give another root"
            )


def _checked(rel: str) -> str:
    parts = rel.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in rel or "\0" in rel:
        raise ValueError(f"{rel!r} is not a plain relative path inside a dataset root")
    return rel
