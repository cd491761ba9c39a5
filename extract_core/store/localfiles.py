"""Files and folders of a local root: made, looked at and written so that a power failure leaves the old or the new."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import uuid
from pathlib import Path

from extract_core.errors import CorruptDataError, RootConflictError, RootError, shortened
from extract_core.store.failures import FULL, failure
from extract_core.store.layout import TEMP_PREFIX

_COPY_CHUNK = 2**20


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
    no_path = RootError(f"{shown} holds a character that no path can have (such as NUL); correct it")
    try:
        path = Path(os.path.normpath(Path.cwd() / Path(text).expanduser()))
    except ValueError:
        raise no_path from None
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
        raise no_path from None
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
    temp = temp_beside(above / "any")
    try:
        temp.mkdir()
        temp.rmdir()
    except OSError as error:
        if error.errno in FULL:
            raise failure(error, "write", str(above)) from error
        where = f"{above} cannot be written" if above == path else f"it cannot be made in {above}"
        raise RootError(
            f"{what} {shortened(str(path))}: {where} ({error.strerror}); check permissions and mounts, "
            "or give another folder"
        ) from error


def open_regular(path: Path) -> io.FileIO:
    """A file for reading; a pipe or device in the place of a file is refused instead of waited for.

    Raises:
        CorruptDataError: it is no regular file.
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISDIR(mode := os.fstat(fd).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise CorruptDataError(f"{path} is no regular file; remove it")
    except BaseException:
        os.close(fd)
        raise
    return io.FileIO(fd, "rb")


def pread(fd: int, start: int, stop: int) -> bytes:
    """Bytes ``start`` to ``stop`` of a file, fewer where it ends before."""
    data = os.pread(fd, stop - start, start)
    if len(data) == stop - start or not data:
        return data
    pieces, at = [data], start + len(data)
    while at < stop and (data := os.pread(fd, stop - at, at)):
        pieces.append(data)
        at += len(data)
    return b"".join(pieces)


def temp_beside(path: Path) -> Path:
    """A new temporary name in the folder of a path."""
    return path.parent / f"{TEMP_PREFIX}{uuid.uuid4().hex}"


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, each durable in its own parent."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """A new file with these bytes, durable."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def copy_durably(source: Path, path: Path) -> None:
    """A copy under a temporary name, then renamed; its bytes are durable."""
    temp = temp_beside(path)
    try:
        with source.open("rb") as reading, temp.open("xb") as writing:
            shutil.copyfileobj(reading, writing, _COPY_CHUNK)
            writing.flush()
            os.fsync(writing.fileno())
        temp.rename(path)
    finally:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
