"""Objects of a root against what records say of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from extract_core.errors import CorruptDataError
from extract_core.store.records import CommitRecord
from extract_core.store.root import Root


def read_object(root: Root, rel: str, *, sha256: str | None, nbytes: int | None, what: str, owner: str = "") -> bytes:
    """A small object whole, after checking its digest.

    Args:
        root: the dataset root.
        rel: where it is.
        sha256: its digest in hex.
        nbytes: its size.
        what: what to call it in a message.
        owner: what it belongs to, e.g. " of version 3".

    Raises:
        CorruptDataError: it is missing, or differs.
    """
    where = root.describe(rel)
    try:
        data = root.read_bytes(rel)
    except FileNotFoundError:
        raise CorruptDataError(f"{what} {where}{owner} is missing") from None
    found = hashlib.sha256(data).hexdigest()
    if found != sha256 or len(data) != nbytes:
        raise CorruptDataError(
            f"{what} {where} is damaged: expected {nbytes} bytes with sha256 {sha256}, "
            f"found {len(data)} bytes with {found}"
        )
    return data


def lost_by_commits(root: Root, commits: Iterable[CommitRecord]) -> dict[str, str]:
    """``lost_objects`` of everything that commit records name."""
    return lost_objects(root, {path: size for commit in commits for path, size in commit.objects.items()})


def lost_objects(root: Root, expected: Mapping[str, int]) -> dict[str, str]:
    """Objects that are missing or have another size, with what was found.

    One listing per folder tells what is missing; sizes are asked only where asking is cheap, on a local root. The bytes
    themselves are for ``verify``.

    Args:
        root: the dataset root.
        expected: relative path to size in bytes.
    """
    names = {folder: set(root.list(folder)) for folder in {path.rpartition("/")[0] for path in expected}}
    lost: dict[str, str] = {}
    for path, nbytes in expected.items():
        folder, _, name = path.rpartition("/")
        if name not in names[folder]:
            lost[path] = "is missing"
        elif root.is_local and (size := root.size(path)) != nbytes:
            lost[path] = f"has {size} bytes"
    return lost
