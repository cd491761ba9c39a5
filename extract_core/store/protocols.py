"""Which kinds of URL a dataset can be written to, which only read, and why.

A dataset needs four things of its store: an object appears whole or not at all; what was written is read and listed at
once; a small object can be replaced; and, for more than one run at a time, a record is created by exactly one writer.
Object stores have them. File servers show half-written files: there everything is written beside its name and renamed.
"""

from __future__ import annotations

from typing import Any

from extract_core.errors import SettingsError

OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
RENAMED = frozenset({"sftp", "ssh"})
READ_ONLY = {
    "http": "a web server takes no files",
    "https": "a web server takes no files",
    "github": "files of a repository cannot be written through it",
    "data": "the URL is the data",
    "zip": "archives are read whole",
    "tar": "archives are read whole",
    "libarchive": "archives are read whole",
    "reference": "it only points at parts of other files",
    "hf": "each write there is a commit of a repository, and half-written datasets would be seen",
}


def protocol_of(url: str) -> str:
    """The part of a URL before ``://``; "file" for plain paths."""
    protocol, separator, _ = url.partition("://")
    return protocol.lower() if separator else "file"


def renames(fs: Any) -> bool:
    """Whether files of a file system are seen half-written, so that they are written beside their name and renamed."""
    names = fs.protocol if isinstance(fs.protocol, tuple | list) else (fs.protocol,)
    return bool(RENAMED & set(names))


def refuse_as_output(url: str) -> None:
    """Refuse a root that no run may write to.

    Raises:
        SettingsError: says why, and what to use instead.
    """
    protocol = protocol_of(url)
    instead = "give a folder, or a URL of s3://, gs://, az:// or sftp://"
    if protocol == "memory":
        raise SettingsError(f"root {url} ends with this process, and the dataset with it; {instead}")
    if protocol in READ_ONLY:
        raise SettingsError(f"root {url} can be read but not written ({READ_ONLY[protocol]}); {instead}")
    if protocol not in OBJECT_STORES | RENAMED | {"file", "local"}:
        raise SettingsError(
            f"root {url}: nobody has tried whether a dataset is safe on {protocol}:// (objects that appear whole, "
            f"listings that are current); {instead}, and copy the finished dataset"
        )
