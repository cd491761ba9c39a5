"""Tags: names that people give to versions. One small record each, ``tags/<name>.json``.

A tagged version is kept by ``gc``. A tag is created exclusively; to move one is said aloud (``force``), since whoever
reads ``ROOT@NAME`` gets other rows afterwards.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from extract_core.errors import AlreadyExistsError, CorruptDataError, NoSuchVersionError, SettingsError, shortened
from extract_core.store import layout
from extract_core.store.records import Attempt, Positive, _check_time, _Record, utc_now
from extract_core.store.root import MAX_RECORD_BYTES, Root
from extract_core.store.versions import is_folder, no_version_in, parse_ref, read_manifest

NAME_RULE = (
    "a tag has 1 to 64 characters of A-Z a-z 0-9 . _ -, begins with a letter or digit, and is neither a number nor "
    "'latest'"
)


class Tag(_Record):
    """The record of a tag. ``attempt`` makes its bytes unique to who created it."""

    kind: ClassVar[str] = "tag"

    name: str
    version: Positive
    created: str = Field(default_factory=utc_now)
    attempt: Attempt


def check_name(name: str) -> str:
    """The name itself.

    Raises:
        SettingsError: it is no name for a tag; says what is.
    """
    if not layout.is_tag_name(name):
        raise SettingsError(f"{shortened(name)!r} is no name for a tag: {NAME_RULE}")
    return name


def read_tag(root: Root, name: str) -> Tag | None:
    """A tag; None where the root has none of this name.

    Raises:
        CorruptDataError: its record is damaged.
    """
    if not layout.is_tag_name(name):
        return None
    rel = layout.tag_path(name)
    try:
        data = root.read_bytes(rel, most=MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    where = root.describe(rel)
    advice = f"; set it again: coresample tag {root.url}@VERSION {name} --force"
    try:
        tag = Tag.load(data, where)
        _check_time(tag.created)
    except (CorruptDataError, ValueError) as error:
        raise CorruptDataError(f"{error}{advice}") from error
    if tag.name != name:
        raise CorruptDataError(f"tag {where} says its name is {tag.name!r}; it was copied or renamed{advice}")
    return tag


def list_tags(root: Root, *, damaged: dict[str, CorruptDataError] | None = None) -> dict[str, int]:
    """Version by name of every tag, ordered by name.

    Args:
        root: the dataset root.
        damaged: takes the failures of damaged tags, which are then left out instead of raised.

    Raises:
        CorruptDataError: a tag is damaged.
    """
    found: dict[str, int] = {}
    for name in filter(None, map(layout.tag_name, root.list(layout.TAGS))):
        try:
            tag = read_tag(root, name)
        except CorruptDataError as error:
            if damaged is None:
                raise
            damaged[name] = error
            continue
        if tag is not None:  # else deleted meanwhile
            found[name] = tag.version
    return found


def write_tag(root: Root, name: str, version: int, *, force: bool = False) -> int | None:
    """Call a version by a name.

    Args:
        root: the dataset root.
        name: see ``NAME_RULE``.
        version: must exist.
        force: move the tag where it is another version's.

    Returns:
        the version that the tag named before; None where it is new.

    Raises:
        SettingsError: no name for a tag, or the tag is another version's.
        NoSuchVersionError: there is no such version (any more).
        CorruptDataError: the version's manifest, or the tag that is there, is damaged.
    """
    rel = layout.tag_path(check_name(name))
    read_manifest(root, version)
    data = Tag(name=name, version=version, attempt=uuid.uuid4().hex).dump()
    before = None
    try:
        root.create_exclusive(rel, data)
    except AlreadyExistsError:
        try:
            standing = read_tag(root, name)
        except CorruptDataError:
            if not force:
                raise
            standing = None
        before = standing.version if standing is not None else None
        if before != version:
            if not force:
                raise SettingsError(
                    f"tag {name!r} of {root.url} names version {before}, not {version}; "
                    "give --force to move it, or choose another name"
                ) from None
            root.put_bytes(rel, data)
    try:
        read_manifest(root, version)
    except NoSuchVersionError:  # a gc was quicker; one that comes later sees the tag and keeps the version
        root.delete(rel)
        raise
    return before


def delete_tag(root: Root, name: str) -> None:
    """Remove a tag; its version stays.

    Raises:
        SettingsError: there is no such tag; names those there are.
    """
    rel = layout.tag_path(check_name(name))
    if not root.exists(rel):
        raise SettingsError(f"{root.url} has no tag {name!r}; {_known(root)}")
    root.delete(rel)


def tagged_version(root: Root, name: str) -> int:
    """The version that a tag names.

    Raises:
        SettingsError: there is no such tag.
        CorruptDataError: its record is damaged.
    """
    tag = read_tag(root, name)
    if tag is None:
        raise SettingsError(
            f"version {shortened(name)!r} is neither a number nor 'latest', nor a tag of {root.url}; {_known(root)}"
        )
    return tag.version


def open_ref(ref: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Root, int | None]:
    """Root and version of ``ROOT``, ``ROOT@VERSION`` or ``ROOT@TAG``; the version is None for the latest.

    A name that holds an ``@`` itself is taken whole where the part behind it is neither a version nor a tag.

    Raises:
        SettingsError: malformed, or a folder that is there has no such tag.
        StoreError: the root cannot be opened.
    """
    url, version = parse_ref(ref)
    head, at, name = ref.rpartition("@")
    if version is not None or url != ref or not at or not head.rpartition("/")[2] or not layout.is_tag_name(name):
        return Root.open(url, storage_options), version
    local = "://" not in ref
    if local and not is_folder(head):
        return Root.open(url, storage_options), None
    root = Root.open(head, storage_options)
    tag = read_tag(root, name)
    if tag is not None:
        return root, tag.version
    if local and not is_folder(ref):
        raise SettingsError(f"{root.url} has no tag {name!r} ({_known(root)}); {no_version_in(ref)}")
    return Root.open(url, storage_options), None


def _known(root: Root) -> str:
    names = [name for name in map(layout.tag_name, root.list(layout.TAGS)) if name]
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")
    return f"its tags: {shown or 'none'}"
