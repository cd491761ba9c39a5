"""Published versions. A version exists once its manifest does; the highest number that exists is the latest.

``latest.json`` is a hint for people and is never trusted: one listing of the manifests gives the truth.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from extract_core.errors import (
    AlreadyExistsError,
    CorruptDataError,
    NoSuchVersionError,
    SettingsError,
    StoreError,
    StoreUnavailableError,
    shortened,
)
from extract_core.store import layout
from extract_core.store.records import Manifest, canonical_json
from extract_core.store.root import MAX_RECORD_BYTES, Root

_LOG = logging.getLogger(__name__)
_PUBLISH_TRIES = 1000
_REMEDY = "run the job with --repair: what it names is published again as a new version"
_REF = re.compile(r"(?P<root>.+)@(?P<version>[0-9]{1,18}|latest)", re.DOTALL)


def parse_ref(ref: str) -> tuple[str, int | None]:
    """Split ``ROOT@VERSION``; the version is None for the latest one (``ROOT`` or ``ROOT@latest``).

    Tags are left in the root, since only the root can tell which there are: ``tags.open_ref`` knows them.

    A local folder of exactly this name is the root, unless there is one of the name before the ``@`` as well.

    Raises:
        SettingsError: the version is 0 or the root is empty.
    """
    match = _REF.fullmatch(ref)
    if match is None:
        if not ref.strip():
            raise SettingsError("the dataset is empty; write ROOT or ROOT@VERSION, e.g. s3://bucket/data@3")
        return ref, None
    if is_folder(ref) and not is_folder(match["root"]):
        return ref, None
    if match["version"] == "latest":
        return match["root"], None
    version = int(match["version"])
    if version < 1:
        raise SettingsError(f"{ref!r} asks for version 0; versions count from 1")
    return match["root"], version


def no_version_in(ref: str) -> str:
    """What is wrong with a reference that ``parse_ref`` took for a root because of its text after ``@``; or empty."""
    head, at, text = ref.rstrip().rpartition("@")
    if not at or "/" in text or not head.rpartition("/")[2]:
        return ""
    return (
        f"{shortened(text)!r} after the @ is no version, and there is no dataset of exactly this name; "
        f"write {shortened(head)}@3, or {shortened(head)} for the latest version"
    )


def is_folder(text: str) -> bool:
    """Whether there is a local folder of this name."""
    try:
        return "://" not in text and Path(os.path.expanduser(text)).is_dir()  # noqa: PTH111 -- pathlib's raises
    except (OSError, ValueError):
        return False


def no_such_version(root: Root, version: int) -> NoSuchVersionError:
    """The error that says which versions there are."""
    known = ", ".join(map(str, list_versions(root)[-10:])) or "none"
    return NoSuchVersionError(f"{root.url} has no version {version}; there are: {known}")


def list_versions(root: Root) -> list[int]:
    """Versions that exist, ascending."""
    found = (layout.manifest_version(name) for name in root.list(layout.VERSIONS))
    return sorted(version for version in found if version is not None)


def latest_version(root: Root) -> int | None:
    """The highest version that exists; None when nothing is published yet."""
    versions = list_versions(root)
    return versions[-1] if versions else None


def read_manifest(root: Root, version: int | None = None) -> Manifest:
    """The manifest of a version, by default of the latest.

    Raises:
        NoSuchVersionError: there is no such version; says which there are.
        CorruptDataError: the manifest is damaged.
    """
    if version is None:
        version = latest_version(root)
        if version is None:
            wrong = no_version_in(root.url)
            raise NoSuchVersionError(
                f"{root.url} holds no published version; run 'coresample run' first or correct the path"
                + (f" ({wrong})" if wrong else "")
            )
    rel = layout.manifest_path(version)
    try:
        data = root.read_bytes(rel, most=MAX_RECORD_BYTES)
    except FileNotFoundError:
        raise no_such_version(root, version) from None
    return _load(root, version, data)


def named_by_a_version(root: Root, path: str) -> bool:
    """Whether a version's shards or norm are in this object, or may be: a damaged manifest could name anything."""
    for version in list_versions(root):
        try:
            if path in read_manifest(root, version).objects:
                return True
        except NoSuchVersionError:
            continue
        except CorruptDataError:
            return True
    return False


def publish(root: Root, build: Callable[[int], Manifest], attempt: str) -> Manifest:
    """Make a version visible, by creating its manifest under the next free number.

    Everything that the manifest names must be durable already. When another publisher takes the number first, the next
    one is tried; a manifest of the same attempt, left by a run that was killed right after publishing, is recognised
    and returned instead of being published twice.

    Args:
        root: the dataset root.
        build: makes the manifest for a version number; called again after a lost race.
        attempt: id of this attempt (32 hex digits), the same when a killed run is taken up again.

    Raises:
        StoreError: the manifest could not be written; nothing is published.
    """
    versions = list_versions(root)
    if (own := _published_by(root, versions, attempt)) is not None:
        _write_hint(root, max(versions))
        return own
    version = versions[-1] + 1 if versions else 1
    for _ in range(_PUBLISH_TRIES):
        manifest = build(version)
        if (manifest.version, manifest.attempt) != (version, attempt):
            raise ValueError(
                f"the manifest is of version {manifest.version} attempt {manifest.attempt}, "
                f"asked for version {version} attempt {attempt}"
            )
        try:
            root.create_exclusive(layout.manifest_path(version), manifest.dump())
        except AlreadyExistsError:
            if (own := _published_by(root, [version], attempt)) is not None:
                manifest = own
            else:
                version = max(version, latest_version(root) or 0) + 1
                continue
        _write_hint(root, version)
        return manifest
    raise StoreUnavailableError(f"{root.url}: others published {_PUBLISH_TRIES} versions meanwhile; try again later")


def _published_by(root: Root, versions: list[int], attempt: str) -> Manifest | None:
    for version in reversed(versions):
        try:
            manifest = read_manifest(root, version)
        except CorruptDataError as error:
            _LOG.warning("%s; it is left as it is", error)
            continue
        if manifest.attempt == attempt:
            return manifest
    return None


def _write_hint(root: Root, version: int) -> None:
    """Best effort: the version is published already."""
    try:
        root.put_bytes(
            layout.LATEST, canonical_json({"hint_version": version, "manifest": layout.manifest_path(version)})
        )
    except StoreError as error:
        _LOG.warning("version %d is published, but %s could not be updated: %s", version, layout.LATEST, error)


def _load(root: Root, version: int, data: bytes) -> Manifest:
    where = root.describe(layout.manifest_path(version))
    try:
        manifest = Manifest.load(data, where)
    except CorruptDataError as error:
        if "install a newer" in str(error):  # not damaged
            raise
        raise CorruptDataError(f"{error}; {_REMEDY}") from error
    if manifest.version != version:
        raise CorruptDataError(
            f"manifest {where} says it is version {manifest.version}; it was copied or renamed; {_REMEDY}"
        )
    return manifest
