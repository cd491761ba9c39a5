"""Removes what nothing refers to: old versions on request, and what crashed and superseded runs left.

The rules, in the order that makes them safe:

* Objects are listed before references are read, so whatever was referred to meanwhile is seen as such.
* Nothing younger than the grace period goes, by the store's own clock.
* A version goes manifest first; only then is everything read again, and what no version and no plan that stays refers
  to is deleted. A crash at any moment leaves objects too many, never a version with too few.
* The highest version never goes, so numbers are never used twice and ``latest.json`` stays right.
* Plans stay while they are of a version, unfinished, or extracted and not published yet; their commit records' shards
  stay with them, and so does every plan and shard that an unfinished plan is going to refer to. A plan that goes is
  marked first (``retired.json``), so that another gc finishes what a crash left.
* Where something that may hold references cannot be read, nothing is deleted at all.
"""

from __future__ import annotations

import contextlib
import time

from extract_core.errors import StoreError
from extract_core.store import layout
from extract_core.store.records import canonical_json, utc_now
from extract_core.store.root import Root
from extract_core.store.survey import OBJECTS, GcReport, Item, Policy, Progress, Survey, survey
from extract_core.store.tags import list_tags, read_tag
from extract_core.store.versions import list_versions

__all__ = ["GcReport", "Item", "Policy", "collect", "survey"]

_CHUNK = 100


def collect(root: Root, policy: Policy, *, now: float | None = None, on_progress: Progress | None = None) -> GcReport:
    """Remove what ``survey`` finds. May be killed anywhere and run again, and run beside others.

    Args:
        root: the dataset root.
        policy: what may go.
        now: the time, for tests.
        on_progress: called with objects removed and objects in all.

    Returns:
        what was removed.

    Raises:
        SettingsError, CorruptDataError: as ``survey``.
        StoreError: something could not be removed; what went before it is gone, all versions are whole.
    """
    return _Collector(root, policy, now, on_progress).run()


class _Collector:
    def __init__(self, root: Root, policy: Policy, now: float | None, on_progress: Progress | None):
        self.root, self.policy, self._now = root, policy, now
        self._on_progress = on_progress or (lambda done, total: None)
        self.report = GcReport(root.url, deleted=True)
        self._done = self._total = 0

    def _survey(self, policy: Policy) -> Survey:
        return Survey(self.root, policy, time.time() if self._now is None else self._now)

    def run(self) -> GcReport:
        first = self._survey(self.policy)
        self._total = sum(max(len(item.objects), 1) for item in first.report.items)
        for item in sorted(first.report.of("version"), key=lambda item: item.version):
            self._drop_version(item, first)
        # Versions that are there now all stay, whatever was published meanwhile.
        policy = Policy(None, self.policy.grace_s, self.policy.unpublished)
        for item in self._survey(policy).report.of("tag"):
            tag = read_tag(self.root, layout.tag_name(item.path.rpartition("/")[2]) or "")
            if tag is not None and not self.root.exists(layout.manifest_path(tag.version)):
                self._delete(item)
        self._drop_plans(policy)
        last = self._drop_objects(policy)
        for name, plan in last.plans.items():
            if not plan.entries:
                self._remove_folders(name)
        notes = [*first.version_notes, *last.report.kept]
        self.report.kept, self.report.versions = notes, last.report.versions
        return self.report

    def _delete(self, item: Item) -> None:
        for path in item.objects:
            self.root.delete(path)
            self._step()
        self.report.items.append(item)

    def _step(self) -> None:
        self._done += 1
        self._on_progress(self._done, max(self._total, self._done))

    def _drop_version(self, item: Item, seen: Survey) -> None:
        root, version = self.root, item.version
        try:
            data = root.read_bytes(item.path)
        except FileNotFoundError:
            return  # another gc was quicker
        versions = list_versions(root)
        if version >= max(versions, default=0) or version in list_tags(root).values():
            return
        fingerprint = seen.fingerprint_of(version)
        if fingerprint is not None and fingerprint not in seen.published:
            _retire(root, fingerprint)
        root.delete(item.path)
        if (
            version in list_tags(root).values()
        ):  # whoever tagged it saw it there: it comes back, nothing else is gone yet
            with contextlib.suppress(StoreError):
                root.create_exclusive(item.path, data)
            return
        self._step()
        self.report.items.append(item)

    def _drop_plans(self, policy: Policy) -> None:
        before = _names(self.root)
        seen = self._survey(policy)
        for item in list(seen.report.of("plan")):
            if not (now := _names(self.root)) <= before:
                before, seen = now, self._survey(policy)
            if all(item.path != other.path for other in seen.report.of("plan")):
                continue
            if layout.is_plan_layout(item.path.rpartition("/")[2]):
                self._delete(item)
                continue
            fingerprint = item.path.rpartition("/")[2]
            _retire(self.root, fingerprint)
            first, last = layout.plan_meta_path(fingerprint), layout.retired_path(fingerprint)
            # Without plan.json it is no plan any more; with its mark, the next gc goes on from here.
            paths = sorted({*item.objects, last}, key=lambda path: (path == last, path != first, path))
            self._delete(Item(item.kind, item.path, item.nbytes, item.reason, tuple(paths)))
            self._remove_folders(fingerprint)

    def _remove_folders(self, fingerprint: str) -> None:
        """Of a plan without objects; where one came meanwhile, they stay."""
        for folder in (layout.commits_dir(fingerprint), layout.quarantine_dir(fingerprint)):
            self.root.delete_empty_folder(folder)
        self.root.delete_empty_folder(f"{layout.PLANS}/{fingerprint}")

    def _drop_objects(self, policy: Policy) -> Survey:
        """Everything else, a few at a time; references are read again whenever something new appears."""
        before = _names(self.root)
        seen = self._survey(policy)
        items = [item for item in seen.report.items if item.kind not in ("version", "tag", "plan")]
        for start in range(0, len(items), _CHUNK):
            if not (now := _names(self.root)) <= before:
                before, seen = now, self._survey(policy)
            still = {item.path for item in seen.report.items}
            for item in items[start : start + _CHUNK]:
                if item.path in still:
                    self._drop_object(item, seen)
        return seen

    def _drop_object(self, item: Item, seen: Survey) -> None:
        if item.upload is not None:
            self.root.abort_upload(item.upload)
            self._step()
            self.report.items.append(item)
            return
        if item.kind in OBJECTS.values() and not seen.old(self.root.modified(item.path)):
            return  # gone, or just stored again: somebody needs it
        self._delete(item)
        if item.kind == "spool":
            self.root.delete_empty_folder(f"{item.path}/logs")
            self.root.delete_empty_folder(item.path)


def _retire(root: Root, fingerprint: str) -> None:
    """Mark a plan as being removed."""
    if root.list(f"{layout.PLANS}/{fingerprint}"):
        root.put_bytes(layout.retired_path(fingerprint), canonical_json({"retired": utc_now()}))


def _names(root: Root) -> set[str]:
    """Names of everything that can hold references."""
    found = {str(version) for version in list_versions(root)} | set(root.list(layout.INDEXES))
    for name in root.list(layout.PLANS):
        found.add(name)
        if layout.is_fingerprint(name):
            found |= {f"{name}/{entry}" for entry in root.list(f"{layout.PLANS}/{name}")}
            found |= {f"{name}/{record}" for record in root.list(layout.commits_dir(name))}
    return found
