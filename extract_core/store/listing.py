"""What lies below a folder, with sizes and times: for ``gc``, which must know how old things are.

Only regular files count. A link inside a root may lead anywhere, so it is neither followed nor listed, and what it
leads to is never deleted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_TIMES = ("LastModified", "mtime", "last_modified", "updated", "modified", "created")


@dataclass(frozen=True)
class Entry:
    """An object: its path below the root, its bytes, and when it was written as the store says (None: it does not)."""

    path: str
    nbytes: int
    mtime: float | None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Upload:
    """A multipart upload that was begun and not completed."""

    path: str
    upload_id: str
    mtime: float | None


def local_entries(folder: Path, rel: str) -> list[Entry]:
    """Regular files in a local folder and below it, by path."""
    found: list[Entry] = []
    waiting = [(folder, rel)]
    while waiting:
        path, prefix = waiting.pop()
        try:
            items = list(os.scandir(path))
        except FileNotFoundError:
            if path == folder:
                raise
            continue  # removed meanwhile
        for item in items:
            name = f"{prefix}/{item.name}" if prefix else item.name
            try:
                if item.is_dir(follow_symlinks=False):
                    waiting.append((Path(item.path), name))
                elif item.is_file(follow_symlinks=False):
                    status = item.stat(follow_symlinks=False)
                    found.append(Entry(name, status.st_size, status.st_mtime))
            except FileNotFoundError:
                continue
    return sorted(found, key=lambda entry: entry.path)


def remote_entries(fs: Any, target: str, rel: str) -> list[Entry]:
    """Objects below a prefix, by path."""
    fs.invalidate_cache()
    start = target.strip("/") + "/"
    found = []
    for path, info in fs.find(target, detail=True).items():
        name = str(path).lstrip("/")
        if info.get("type") == "directory" or not name.startswith(start):
            continue
        inner = name[len(start) :]
        if inner and not inner.endswith("/"):
            found.append(Entry(f"{rel}/{inner}" if rel else inner, int(info.get("size") or 0), time_of(fs, path, info)))
    return sorted(found, key=lambda entry: entry.path)


def time_of(fs: Any, path: str, info: dict[str, Any]) -> float | None:
    """When an object was written, from what the client told about it or tells when asked."""
    value = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    if value is None:
        try:
            value = fs.modified(path)
        except (NotImplementedError, OSError):
            return None
    return _seconds(value)


def _seconds(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    return float(value) if isinstance(value, int | float) else None


def unfinished_uploads(fs: Any, target: str) -> list[Upload]:
    """Unfinished multipart uploads below a prefix; empty for clients that are not s3fs."""
    if not hasattr(fs, "call_s3"):
        return []
    bucket, key, _ = fs.split_path(target)
    prefix = f"{key}/" if key else ""
    found: list[Upload] = []
    marks: dict[str, str] = {}
    while True:
        answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marks)
        found += [
            Upload(item["Key"][len(prefix) :], item["UploadId"], _seconds(item.get("Initiated")))
            for item in answer.get("Uploads") or []
            if item["Key"].startswith(prefix)  # not every server heeds Prefix
        ]
        following = {"KeyMarker": answer.get("NextKeyMarker"), "UploadIdMarker": answer.get("NextUploadIdMarker")}
        if not answer.get("IsTruncated") or not following["KeyMarker"] or following == marks:
            return found
        marks = {name: value for name, value in following.items() if value}


def abort_upload(fs: Any, target: str, upload: Upload) -> None:
    """End an upload."""
    bucket, key, _ = fs.split_path(target)
    whole = f"{key}/{upload.path}" if key else upload.path
    fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=whole, UploadId=upload.upload_id)
