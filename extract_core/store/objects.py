"""Which objects of a root are not there as they were stored."""

from __future__ import annotations

from collections.abc import Mapping

from extract_core.store.root import Root


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
