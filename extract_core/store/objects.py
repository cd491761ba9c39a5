"""Objects of a root against what records say of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from extract_core.errors import CorruptDataError
from extract_core.store import layout
from extract_core.store.commits import ShardCommits
from extract_core.store.root import MAX_RECORD_BYTES, Root

_CHUNK = 8 * 2**20


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
        data = root.read_bytes(rel, most=None if nbytes is None else max(nbytes, MAX_RECORD_BYTES))
    except FileNotFoundError:
        raise CorruptDataError(f"{what} {where}{owner} is missing") from None
    found = hashlib.sha256(data).hexdigest()
    if found != sha256 or len(data) != nbytes:
        raise CorruptDataError(
            f"{what} {where} is damaged: expected {nbytes} bytes with sha256 {sha256}, "
            f"found {len(data)} bytes with {found}"
        )
    return data


def lost_by_commits(root: Root, commits: Mapping[int, ShardCommits]) -> dict[str, str]:
    """``lost_objects`` of everything that the samples of commit records need."""
    return lost_objects(root, {path: size for shard in commits.values() for path, size in shard.objects.items()})


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


def damaged_objects(
    root: Root, expected: Mapping[str, int], *, on_progress: Callable[[int], None] = lambda done: None
) -> dict[str, str]:
    """Objects that are missing or whose bytes do not have the sha256 in their name, with what was found.

    Args:
        root: the dataset root; every object is read once, a few MiB at a time.
        expected: relative path of an object named by its digest to its size in bytes.
        on_progress: called with the bytes done so far.
    """
    wrong: dict[str, str] = {}
    done = 0
    for path, nbytes in expected.items():
        try:
            size = root.size(path)
        except FileNotFoundError:
            wrong[path] = "is missing"
            continue
        if size != nbytes:
            wrong[path] = f"has {size} bytes"
            continue
        digest = hashlib.sha256()
        for start in range(0, size, _CHUNK):
            chunk = root.read_range(path, start, min(start + _CHUNK, size))
            digest.update(chunk)
            on_progress(done := done + len(chunk))
        if digest.hexdigest() != layout.object_digest(path.rpartition("/")[2]):
            wrong[path] = f"has sha256 {digest.hexdigest()}"
    return wrong
