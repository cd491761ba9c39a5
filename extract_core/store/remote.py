"""Single requests to a remote root: on S3 with the checks of ``store.s3``, elsewhere as fsspec's client does them."""

from __future__ import annotations

import errno
from typing import Any

from extract_core.store import s3, upload
from extract_core.store.failures import http_status


def read_whole(fs: Any, target: str) -> bytes:
    """All bytes of an object, checked where the store says how."""
    data = s3.get(fs, target) if s3.is_s3(fs) else None
    return bytes(fs.cat_file(target)) if data is None else data


def read_range(fs: Any, target: str, start: int, stop: int) -> bytes:
    """Bytes ``start`` to ``stop``, fewer where the object ends before."""
    if s3.is_s3(fs):
        return s3.get_range(fs, target, start, stop)
    try:
        return bytes(fs.cat_file(target, start=start, end=stop))
    except OSError as error:
        if http_status(error) != 416:
            raise
        return b""


def size(fs: Any, target: str) -> int:
    """Bytes of an object."""
    info = fs.info(target)
    if info.get("type") == "directory" or info.get("size") is None:
        raise FileNotFoundError(errno.ENOENT, "is a folder", target)
    return int(info["size"])


def names(fs: Any, target: str) -> list[str]:
    """Names in a folder, asked anew."""
    fs.invalidate_cache()
    found = (str(item).rstrip("/") for item in fs.ls(target, detail=False))
    return [item.rpartition("/")[2] for item in found if item != target]


def create(fs: Any, target: str, data: bytes) -> None:
    """Write a new small object; one that is there is an error where the store can tell."""
    if s3.is_s3(fs):
        s3.put(fs, target, data, create=True)
    else:
        fs.pipe_file(target, data, mode="create")


def replace(fs: Any, target: str, data: bytes) -> None:
    """Write a small object; readers see the old or the new one."""
    if s3.is_s3(fs):
        s3.put(fs, target, data)
    else:
        upload.replace(fs, target, data)
