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
import random
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from extract_core.errors import (
    AlreadyExistsError,
    CorruptDataError,
    NoSpaceError,
    RootConflictError,
    RootError,
    SettingsError,
    StoreError,
    StoreUnavailableError,
    shortened,
)
from extract_core.store import listing
from extract_core.store.layout import PLANS, PROBES, VERSIONS

TEMP_PREFIX = ".tmp-"
MAX_RECORD_BYTES = 64 * 2**20
"""Records go in ONE put: stores disagree on whether a conditional multipart upload is exclusive."""

_COPY_CHUNK = 2**20
_CONFLICT_TRIES = 6
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
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
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK})


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
    text = f"cannot {action} {path}: {_reason(error)}"
    if number in _FULL:
        if number == errno.EFBIG:
            return NoSpaceError(f"{text}; raise the file size limit (ulimit -f), then run the same command again")
        return NoSpaceError(
            f"{text}; free space or raise the quota, then run the same command again (finished shards are kept)"
        )
    if isinstance(error, FileNotFoundError):
        kind = StoreError if action == "store" else RootError  # storing may also miss its local source
        return kind(f"{text}; create the bucket or folder, or correct the root")
    if isinstance(error, PermissionError) or number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return RootError(f"{text}; check the permissions and credentials for this root, or give another root")
    if isinstance(error, ImportError):
        return StoreError(f"{text}; install the package it names")
    origin = type(error).__module__.partition(".")[0]
    if type(error).__name__ in {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}:
        return RootError(f"{text}; give credentials through the environment or a profile")
    if (
        isinstance(error, TimeoutError | ConnectionError)
        or type(error).__name__ == "FSTimeoutError"
        or number in _TRANSIENT
        or origin in {"aiohttp", "botocore", "aiobotocore", "urllib3"}
        or _http_status(error) in (429, 500, 502, 503, 504)
    ):
        return StoreUnavailableError(f"{text}; the store did not answer, try again later")
    return StoreError(text)


def local_folder(text: str | os.PathLike[str], what: str) -> Path:
    """The absolute path of a folder that is there or can be made; creates nothing.

    Args:
        text: as the user wrote it; ``~`` is the home folder.
        what: the field, for messages: "root", "store.spool".

    Raises:
        RootConflictError: it is a file.
        RootError: it cannot be a folder: under a file, a link to nowhere or in a loop, no such home, unreadable.
    """
    shown = f"{what} {shortened(os.fspath(text))!r}"
    try:
        path = Path(os.path.normpath(Path.cwd() / Path(text).expanduser()))
    except RuntimeError:
        raise RootError(
            f"{shown}: there is no such user's home folder; write the path in full (or ./~name for a plain name)"
        ) from None
    except FileNotFoundError:
        raise RootError(f"{shown}: the current folder was removed; change to one that exists") from None
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise RootConflictError(f"{what} {path} is a file; give a folder")
    except FileNotFoundError:
        link = next((part for part in (path, *path.parents) if os.path.lexists(part)), path)
        if link.is_symlink():
            raise RootError(
                f"{what} {shortened(str(path))}: {link} is a link to {link.readlink()}, which does not exist; "
                "create that folder, or give another one"
            ) from None
    except NotADirectoryError:
        file = next((part for part in path.parents if part.is_file()), path.parent)
        raise RootError(
            f"{what} {shortened(str(path))} lies under {file}, which is no folder; give another one"
        ) from None
    except ValueError:  # NUL, or characters that no path can have
        raise RootError(f"{shown} holds a character that no path can have (such as NUL); correct it") from None
    except OSError as error:
        advice = {
            errno.ELOOP: "its links lead in a circle; remove them, or give another folder",
            errno.ENAMETOOLONG: "a name in it, or all of it, is too long; give a shorter one",
            errno.EACCES: "it cannot be looked at; check the permissions of the folders above it, or give another one",
        }.get(error.errno or 0, f"{error.strerror}; give another folder")
        raise RootError(f"{what} {shortened(str(path))}: {advice}") from None
    return path


def check_writable(path: Path, what: str) -> None:
    """Whether a folder can be written, or made: makes and removes an empty folder in it, or in the nearest above it.

    Raises:
        NoSpaceError: not for want of room.
        RootError: names the folder and the system's reason.
    """
    above = next(part for part in (path, *path.parents) if part.is_dir())
    temp = _temp_beside(above / "any")
    try:
        temp.mkdir()
        temp.rmdir()
    except OSError as error:
        if error.errno in _FULL:
            raise failure(error, "write", str(above)) from error
        where = f"{above} cannot be written" if above == path else f"it cannot be made in {above}"
        raise RootError(
            f"{what} {shortened(str(path))}: {where} ({error.strerror}); check permissions and mounts, "
            "or give another folder"
        ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    return str(error) or type(error).__name__


def _http_status(error: BaseException) -> int | None:
    """HTTP status behind a client's exception, where one is attached."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, Mapping):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        seen = seen.__cause__
    return None


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether a root, as the user wrote it, is no folder of this machine."""
    protocol, separator, _ = os.fspath(url).strip().partition("://")
    return bool(separator) and protocol not in ("file", "local")


class Root:
    """A dataset root. Cheap to make, safe to pickle and to use after a fork; opens no connection by itself.

    Attributes:
        url: the folder (absolute) or URL without a trailing slash; names no credentials.
        exclusive: whether the store creates exclusively, once ``probe_exclusive`` has been called; None before.
    """

    def __init__(self, url: str, *, local: Path | None, storage_options: Mapping[str, Any]) -> None:
        self.url = url
        self.exclusive: bool | None = None
        self._local = local
        self._options = dict(storage_options)
        self._remote: tuple[int, Any, str] | None = None

    @classmethod
    def open(cls, url: str, storage_options: Mapping[str, Any] | None = None) -> Root:
        """Name a root.

        Args:
            url: a folder (it need not exist yet), ``file://...`` or any URL that fsspec knows, e.g. ``s3://bucket/prefix``.
            storage_options: passed to the fsspec file system.

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
        root = cls(text.rstrip("/"), local=None, storage_options=storage_options or {})
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
        return Root.open, (self.url, self._options), {"exclusive": self.exclusive}

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
                fs, prefix = fsspec.url_to_fs(self.url, **{**self._options, "use_listings_cache": False})
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
            self._remote = (os.getpid(), fs, prefix.rstrip("/"))
        return self._remote[1], self._remote[2]

    def _target(self, rel: str) -> tuple[Any, str]:
        fs, prefix = self._open_remote()
        return fs, f"{prefix}/{_checked(rel)}" if rel else prefix

    # -- reading -------------------------------------------------------------------------------------------------

    def read_bytes(self, rel: str) -> bytes:
        """A whole object.

        Raises:
            FileNotFoundError: there is no such object.
            StoreError: it cannot be read.
        """
        with self._reading(rel):
            if (path := self.local_path(rel)) is not None:
                return path.read_bytes()
            fs, target = self._target(rel)
            return bytes(fs.cat_file(target))

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
                with path.open("rb", buffering=0) as file:
                    data = _pread(file.fileno(), start, stop)
            else:
                fs, target = self._target(rel)
                try:
                    data = bytes(fs.cat_file(target, start=start, end=stop))
                except OSError as error:
                    if _http_status(error) != 416:
                        raise
                    data = b""
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
            fs, target = self._target(rel)
            info = fs.info(target)
            if info.get("type") == "directory" or info.get("size") is None:
                raise FileNotFoundError(errno.ENOENT, "is a folder", target)
            return int(info["size"])

    def list(self, rel_dir: str) -> list[str]:
        """Names (not paths) in a folder ("" is the root), sorted, asked anew each time; empty when it is absent."""
        try:
            with self._reading(rel_dir, action="list"):
                if (path := self.local_path(rel_dir)) is not None:
                    names = [item.name for item in path.iterdir()]
                else:
                    fs, target = self._target(rel_dir)
                    fs.invalidate_cache()
                    found = (str(item).rstrip("/") for item in fs.ls(target, detail=False))
                    names = [item.rpartition("/")[2] for item in found if item != target]
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
                return listing.remote_entries(*self._target(rel_dir), rel_dir)
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
                fs, target = self._target(rel)
                return listing.time_of(fs, target, fs.info(target))
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
            return listing.unfinished_uploads(*self._target(""))

    def abort_upload(self, upload: listing.Upload) -> None:
        """End an unfinished upload and free its parts; one that is gone is no error."""
        try:
            listing.abort_upload(*self._target(""), upload)
        except FileNotFoundError:
            return
        except Exception as error:
            raise failure(error, "abort the upload of", self.describe(upload.path)) from error

    def delete_empty_folder(self, rel_dir: str) -> bool:
        """Remove a local folder if nothing is in it; object stores have no folders."""
        path = self.local_path(rel_dir)
        if path is None or not rel_dir or path.is_symlink():
            return False
        try:
            path.rmdir()
        except OSError:
            return False
        return True

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
            if self.exists(rel):
                raise AlreadyExistsError(self.describe(rel), self.read_bytes(rel))
            self.put_bytes(rel, data)
        elif (path := self.local_path(rel)) is not None:
            self._link_new(path, data)
        else:
            self._put_if_absent(rel, data)

    def _link_new(self, path: Path, data: bytes) -> None:
        temp = _temp_beside(path)
        try:
            _make_folder(path.parent)
            _write_durably(temp, data)
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
            _sync_folder(path.parent)
        except OSError as error:
            raise failure(error, "create", str(path)) from error
        finally:
            with contextlib.suppress(OSError):
                temp.unlink(missing_ok=True)

    def _put_if_absent(self, rel: str, data: bytes) -> None:
        fs, target = self._target(rel)
        for tried in range(_CONFLICT_TRIES):
            try:
                fs.pipe_file(target, data, mode="create")
                return
            except Exception as error:
                status = _http_status(error)
                refused = isinstance(error, FileExistsError) or status == 412
                try:
                    existing = self.read_bytes(rel)
                except FileNotFoundError:
                    existing = None
                if existing is not None:
                    if existing == data and not refused:
                        return  # the PUT arrived, only its answer was lost
                    raise AlreadyExistsError(self.describe(rel), existing) from error
                if status == 409 and tried + 1 < _CONFLICT_TRIES:
                    time.sleep(random.uniform(0.05, 0.2) * 2**tried)  # another conditional PUT was in flight: ask again
                    continue
                if status in (400, 501) or isinstance(error, NotImplementedError):
                    raise StoreError(
                        f"cannot create {self.describe(rel)}: the store refuses conditional writes ({_reason(error)})"
                    ) from error
                raise failure(error, "create", self.describe(rel)) from error

    def put_file(self, local: Path, rel: str) -> None:
        """Move a finished local file into the root as an immutable object, durable on return.

        ``local`` is consumed: it is gone when the call returns, and untouched when the call fails. Local roots: fsync
        and rename, or a copy under a temporary name where ``local`` is on another file system. Remote: upload, then
        the stored size is compared.

        Raises:
            NoSpaceError, StoreUnavailableError, StoreError: as everywhere.
        """
        local = Path(local)
        path = self.local_path(_checked(rel))
        try:
            expected = local.stat().st_size
            if path is None:
                fs, target = self._target(rel)
                fs.put_file(str(local), target)
                stored = self.size(rel)
                if stored != expected:
                    raise StoreError(
                        f"upload of {self.describe(rel)} is incomplete: {expected} bytes sent, {stored} stored"
                    )
            else:
                _make_folder(path.parent)
                _sync_file(local)
                try:
                    local.rename(path)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    _copy_durably(local, path)
                _sync_folder(path.parent)
            local.unlink(missing_ok=True)
        except StoreError:
            raise
        except Exception as error:
            raise failure(error, "store", self.describe(rel)) from error

    def put_bytes(self, rel: str, data: bytes) -> None:
        """Write a small object, replacing one that is there; readers see the old or the new one, never a mixture."""
        path = self.local_path(_checked(rel))
        temp = None
        try:
            if path is None:
                fs, target = self._target(rel)
                fs.pipe_file(target, data)
            else:
                temp = _temp_beside(path)
                _make_folder(path.parent)
                _write_durably(temp, data)
                temp.replace(path)
                _sync_folder(path.parent)
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
                path.unlink(missing_ok=True)
            else:
                fs, target = self._target(rel)
                with contextlib.suppress(FileNotFoundError):
                    fs.rm_file(target)
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


def _checked(rel: str) -> str:
    parts = rel.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in rel or "\0" in rel:
        raise ValueError(f"{rel!r} is not a plain relative path inside a dataset root")
    return rel


def _pread(fd: int, start: int, stop: int) -> bytes:
    data = os.pread(fd, stop - start, start)
    if len(data) == stop - start or not data:
        return data
    pieces, at = [data], start + len(data)
    while at < stop and (data := os.pread(fd, stop - at, at)):
        pieces.append(data)
        at += len(data)
    return b"".join(pieces)


def _temp_beside(path: Path) -> Path:
    return path.parent / f"{TEMP_PREFIX}{uuid.uuid4().hex}"


def _make_folder(path: Path) -> None:
    """Create a folder and its missing parents, each durable in its own parent."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(fd)


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _copy_durably(source: Path, path: Path) -> None:
    temp = _temp_beside(path)
    try:
        with source.open("rb") as reading, temp.open("xb") as writing:
            shutil.copyfileobj(reading, writing, _COPY_CHUNK)
            writing.flush()
            os.fsync(writing.fileno())
        temp.rename(path)
    finally:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
