"""What a collection (``store.gc``) would remove from a root, and why: one look that changes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from extract_core.errors import CorruptDataError, NoSuchVersionError, SettingsError, StoreError
from extract_core.planning.plan import PlanMeta, PlannedShard, read_plan_meta
from extract_core.spool import LOG_DAYS, RUN_PREFIX, ended_runs
from extract_core.store import layout
from extract_core.store.columns import referenced_shards
from extract_core.store.commits import DamagedRecord, read_commits
from extract_core.store.layout import TEMP_PREFIX
from extract_core.store.listing import Entry, Upload
from extract_core.store.records import Manifest
from extract_core.store.root import MAX_RECORD_BYTES, Root
from extract_core.store.tags import list_tags
from extract_core.store.versions import list_versions, read_manifest

SPOOL = ".spool"
_DIGESTS = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_OWN_CHECKSUM = re.compile(rb'"checksum":"sha256:([0-9a-f]{64})",')
OBJECTS = {
    layout.SHARDS: "shard",
    layout.NORMS: "norm",
    layout.INDEXES: "index",
    layout.REPORTS: "report",
}
"""Folders of objects named by their digest, and what to call one."""


@dataclass(frozen=True)
class Policy:
    """What may go.

    Args:
        keep: versions that stay, counted from the latest; tagged and young ones stay too. None: all of them.
        grace_s: nothing that was written less than this many seconds ago is touched.
        unpublished: plans go whose shards are all extracted but that are of no version.
    """

    keep: int | None = None
    grace_s: float = 86400.0
    unpublished: bool = False

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise SettingsError(f"--keep {self.keep}: at least 1, since the latest version always stays")
        if not 0 <= self.grace_s < float("inf"):
            raise SettingsError(f"the grace period is {self.grace_s} s; give 0 or more")


@dataclass(frozen=True)
class Item:
    """Something that goes, with all its objects (a plan has many), and why."""

    kind: str
    path: str
    nbytes: int
    reason: str
    objects: tuple[str, ...] = ()
    upload: Upload | None = None

    @property
    def version(self) -> int:
        """The version of a manifest."""
        return layout.manifest_version(self.path.rpartition("/")[2]) or 0


@dataclass
class GcReport:
    """What goes, or went; what stays although nothing refers to it; and the versions that stay."""

    root: str
    deleted: bool = False
    items: list[Item] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self.items)

    def of(self, *kinds: str) -> list[Item]:
        """The items of some kinds."""
        return [item for item in self.items if item.kind in kinds]


@dataclass
class _Plan:
    fingerprint: str
    entries: list[Entry]
    meta: PlanMeta | None
    commits: set[tuple[int, int]]
    """Shard and round of every commit record."""
    damaged: str = ""

    @property
    def open(self) -> list[PlannedShard]:
        """Shards without a commit record."""
        return [s for s in self.meta.shards if (s.index, 0) not in self.commits] if self.meta is not None else []

    @property
    def unfinished(self) -> bool:
        return bool(self.open)

    @property
    def retired(self) -> bool:
        """Whether a gc began to remove it, and nothing was written to it since."""
        marker = layout.retired_path(self.fingerprint)
        marked = [entry.mtime for entry in self.entries if entry.path == marker and entry.mtime is not None]
        newest = self.newest
        return bool(marked) and newest is not None and newest <= marked[0]

    @property
    def newest(self) -> float | None:
        """When something was last written to it, apart from the mark of a gc; None where the store does not say."""
        marker = layout.retired_path(self.fingerprint)
        times = [entry.mtime for entry in self.entries if entry.path != marker]
        return max((t for t in times if t is not None), default=0.0) if None not in times else None


Progress = Callable[[int, int], None]


def survey(root: Root, policy: Policy, *, now: float | None = None) -> GcReport:
    """What a collection would remove, and why. Changes nothing.

    Args:
        root: the dataset root.
        policy: what may go.
        now: the time, for tests.

    Raises:
        SettingsError: the root holds neither a version nor a plan, so nothing says what its objects belong to.
        CorruptDataError: something that may hold references cannot be read; says how to mend it.
        StoreError: the root cannot be read.
    """
    return Survey(root, policy, time.time() if now is None else now).report


class Survey:
    """One look at a root. Objects are listed first, references read afterwards."""

    def __init__(self, root: Root, policy: Policy, now: float):
        self.root, self.policy = root, policy
        self.cutoff = now - policy.grace_s
        self.report = GcReport(root.url)
        self.entries = root.entries("")
        uploads = self._uploads()
        self.live = self._live_runs()
        self.versions = list_versions(root)
        names = [name for name in root.list(layout.PLANS) if layout.is_fingerprint(name)]
        if not self.versions and not names:
            raise SettingsError(
                f"{root.url} holds no published version and no plan, so nothing says what its objects belong to; "
                "correct the path, or remove the folder by hand"
            )
        self.version_notes: list[str] = []
        self.dropped = self._choose_versions()
        self.manifests = {n: m for n in self.versions if n not in self.dropped and (m := self._manifest(n)) is not None}
        self.report.versions = list(self.manifests)
        self.published = {manifest.fingerprint for manifest in self.manifests.values()}
        self.named = {digest for manifest in self.manifests.values() for digest in _digests(manifest.dump())}
        self.pending = self._pending_indexes()
        self.plans = {name: self._plan(name) for name in names}
        self.needed = {
            shard.source.fingerprint: name
            for name, plan in self.plans.items()
            for shard in plan.open
            if shard.source is not None and name != shard.source.fingerprint
        }
        going = self._choose_plans()
        self._choose_tags()
        references = self._references(name for name in names if name not in going)
        busy = {name for name, plan in self.plans.items() if plan.entries or plan.commits} - going - self.published
        self._choose_objects(references, keep_norms=bool(self.live or busy))
        self._choose_leftovers(uploads)

    def _add(self, kind: str, entry: Entry, reason: str) -> None:
        self.report.items.append(Item(kind, entry.path, entry.nbytes, reason, (entry.path,)))

    def old(self, mtime: float | None) -> bool:
        """Whether something is older than the grace period; what the store tells no time of is not."""
        return mtime is not None and mtime <= self.cutoff

    # -- versions and tags ---------------------------------------------------------------------------------------

    def _choose_versions(self) -> set[int]:
        damaged: dict[str, CorruptDataError] = {}
        self.tags = list_tags(self.root, damaged=damaged)
        keep = self.policy.keep
        if keep is None:
            self.report.kept += [str(error) for error in damaged.values()]
            return set()
        for error in damaged.values():  # it may name a version that would go
            raise CorruptDataError(f"nothing is removed: {error}")
        listed = {entry.path: entry for entry in self.entries}
        dropped: set[int] = set()
        for version in self.versions[:-keep]:
            named = [name for name, tagged in self.tags.items() if tagged == version]
            entry = listed.get(layout.manifest_path(version))
            if named:
                self.version_notes.append(f"version {version} is tagged {', '.join(named)}")
            elif entry is None or not self.old(entry.mtime):
                self.version_notes.append(f"version {version} is younger than the grace period")
            else:
                dropped.add(version)
                self._add("version", entry, f"not among the last {keep}")
        self.report.kept += self.version_notes
        return dropped

    def _manifest(self, version: int) -> Manifest | None:
        try:
            return read_manifest(self.root, version)
        except NoSuchVersionError:
            return None  # another gc was here meanwhile
        except CorruptDataError as error:
            raise CorruptDataError(
                f"nothing is removed, since what version {version} refers to cannot be known: {error}; restore it from "
                "a backup, or delete that file if the version is to be given up (never the highest one)"
            ) from error

    def _choose_tags(self) -> None:
        listed = {entry.path: entry for entry in self.entries}
        for name, version in self.tags.items():
            entry = listed.get(layout.tag_path(name))
            if entry is not None and version not in self.versions and self.old(entry.mtime):
                self._add("tag", entry, f"names version {version}, which is not there")

    # -- plans ---------------------------------------------------------------------------------------------------

    def _plan(self, fingerprint: str) -> _Plan:
        prefix = f"{layout.PLANS}/{fingerprint}/"
        entries = [entry for entry in self.entries if entry.path.startswith(prefix)]
        meta, damaged = None, ""
        try:
            meta = read_plan_meta(self.root, fingerprint)
        except CorruptDataError as error:
            damaged = str(error)
        names = self.root.list(layout.commits_dir(fingerprint))
        commits = {shard for name in names if (shard := layout.commit_shard(name)) is not None}
        return _Plan(fingerprint, entries, meta, commits, damaged)

    def _choose_plans(self) -> set[str]:
        gave = {self.fingerprint_of(version) for version in self.dropped}
        going = set()
        for fingerprint, plan in self.plans.items():
            path = f"{layout.PLANS}/{fingerprint}"
            verdict, goes = self._judge(plan, superseded=fingerprint in gave)
            if goes:
                going.add(fingerprint)
                paths = tuple(entry.path for entry in plan.entries)
                self.report.items.append(Item("plan", path, sum(e.nbytes for e in plan.entries), verdict, paths))
                continue
            if verdict:
                self.report.kept.append(f"{path}: {verdict}")
            if plan.meta is not None:
                stands = layout.plan_path(fingerprint, plan.meta.plan_sha256)
                for entry in plan.entries:
                    if layout.is_plan_layout(entry.name) and entry.path != stands and self.old(entry.mtime):
                        self._add("plan", entry, "the layout of a run that planned at the same time and lost")
        return going

    def fingerprint_of(self, version: int) -> str | None:
        """The plan of a version; None where its manifest cannot be read."""
        try:
            return read_manifest(self.root, version).fingerprint
        except StoreError:
            return None

    def _judge(self, plan: _Plan, *, superseded: bool) -> tuple[str, bool]:
        """Why a plan goes or stays (empty: nothing to tell), and whether it goes."""
        if plan.fingerprint in self.published:
            return "", False
        if plan.damaged:
            return f"stays, since its plan.json cannot be read ({plan.damaged})", False
        if plan.fingerprint in self.needed:
            return f"stays: unfinished plan {self.needed[plan.fingerprint]} refers to its shards", False
        begun = plan.meta is not None or plan.commits
        if not begun and not plan.entries:
            return "", False  # an empty folder
        if begun and (self.live or self.pending):
            doing = "a run is at work on this root" if self.live else "a version is perhaps being published"
            return f"stays while {doing}", False
        if plan.meta is None:
            if plan.commits and not plan.retired:
                return "stays: it has commit records and no plan.json; the next run of its job plans it again", False
            reason = "of a version that was removed" if plan.commits else "its planning was never finished"
        elif plan.unfinished:
            return f"stays: {len(plan.open):,} of {len(plan.meta.shards):,} shards are still to be extracted", False
        elif superseded or plan.retired:
            reason = "of a version that goes" if superseded else "of a version that was removed"
        elif self.policy.unpublished:
            reason = "extracted, and of no version"
        else:
            return "stays: extracted, and of no version yet; publish it by running its job, or --unpublished", False
        if not plan.entries or not self.old(plan.newest):
            return "stays: younger than the grace period", False
        return reason, True

    # -- references ----------------------------------------------------------------------------------------------

    def _references(self, plans: Iterable[str]) -> set[str]:
        """Digests of everything that the versions and plans that stay may read.

        Any digest in a record counts, in whatever field: an object that a later Coresample's field names stays.
        """
        found = set(self.named)
        for fingerprint in plans:
            for shard, round in self.plans[fingerprint].commits:
                found |= self._of_commit(fingerprint, shard, round)
            plan = self.plans[fingerprint]
            if plan.meta is None or plan.unfinished:  # its open shards are about to refer to what is stored
                with contextlib.suppress(FileNotFoundError):
                    found |= _digests(self.root.read_bytes(layout.plan_meta_path(fingerprint)))
        for entry in self.pending:
            found.add(layout.object_digest(entry.name) or "")
            with contextlib.suppress(FileNotFoundError):
                found |= referenced_shards(self.root, entry.path, entry.nbytes)
        return found

    def _of_commit(self, fingerprint: str, shard: int, round: int) -> set[str]:
        rel = layout.commit_path(fingerprint, shard, round)
        try:
            data = self.root.read_bytes(rel, most=MAX_RECORD_BYTES)
        except FileNotFoundError:
            return set()  # another gc or a person removed it
        if not _sound(data):
            damaged: list[DamagedRecord] = []
            read_commits(self.root, fingerprint, damaged=damaged)
            for item in damaged:
                raise CorruptDataError(
                    f"nothing is removed, since which shards are in use cannot be known: {item.error}"
                ) from item.error
        return _digests(data)

    def _pending_indexes(self) -> list[Entry]:
        """Young indexes of no version: a publisher writes the index right before the manifest."""
        return [
            entry
            for entry in self.entries
            if entry.path == f"{layout.INDEXES}/{entry.name}"
            and (digest := layout.object_digest(entry.name)) is not None
            and digest not in self.named
            and not self.old(entry.mtime)
        ]

    # -- objects and leftovers -----------------------------------------------------------------------------------

    def _choose_objects(self, references: set[str], *, keep_norms: bool) -> None:
        kinds = {folder: kind for folder, kind in OBJECTS.items() if not (keep_norms and folder == layout.NORMS)}
        for entry in self.entries:
            folder, _, name = entry.path.rpartition("/")
            digest = layout.object_digest(name)
            if folder in kinds and digest is not None and digest not in references and self.old(entry.mtime):
                what = "version or plan" if folder in (layout.SHARDS, layout.NORMS) else "version"
                self._add(kinds[folder], entry, f"no {what} refers to it")

    def _choose_leftovers(self, uploads: Sequence[Upload]) -> None:
        plans = {path for item in self.report.of("plan") for path in item.objects}
        for entry in self.entries:
            if not self.old(entry.mtime) or entry.path in plans:
                continue
            parts = entry.path.split("/")
            if parts[0] == layout.PROBES:
                self._add("temporary", entry, "a probe of a run that was killed")
            elif parts[0] == layout.PUBLISHERS:
                self._add("temporary", entry, "the claim of a run that ended")
            elif parts[0] != SPOOL and any(part.startswith(TEMP_PREFIX) for part in parts):
                self._add("temporary", entry, "a write that was not finished")
        self._choose_spool()
        for upload in uploads:
            if self.old(upload.mtime):
                self.report.items.append(
                    Item("upload", upload.path, 0, "a multipart upload that was not finished", (), upload)
                )

    def _uploads(self) -> Sequence[Upload]:
        try:
            return self.root.unfinished_uploads()
        except StoreError as error:
            self.report.kept.append(f"unfinished uploads are not looked for: {error}")
            return []

    def _live_runs(self) -> set[str]:
        """Run folders below the root whose lock is held."""
        spool = self.root.local_path(SPOOL)
        self.ended: set[str] = set()
        if spool is None or not spool.is_dir():
            return set()
        self.ended = {folder.name for folder in ended_runs(spool)}
        return {path.parent.name for path in spool.glob(f"{RUN_PREFIX}*/lock")} - self.ended

    def _choose_spool(self) -> None:
        runs: dict[str, list[Entry]] = {}
        for entry in self.entries:
            parts = entry.path.split("/")
            if len(parts) > 2 and parts[0] == SPOOL and parts[1] in self.ended:
                runs.setdefault(parts[1], []).append(entry)
        for name, entries in sorted(runs.items()):
            logs = f"{SPOOL}/{name}/logs/"
            shards = [entry for entry in entries if not entry.path.startswith(logs)]
            going = [] if any(not self.old(entry.mtime) for entry in shards) else shards
            limit = self.cutoff - LOG_DAYS * 86400
            going += [e for e in entries if e.path.startswith(logs) and e.mtime is not None and e.mtime <= limit]
            if going:
                paths = tuple(entry.path for entry in going)
                reason = "of a run that ended"
                self.report.items.append(
                    Item("spool", f"{SPOOL}/{name}", sum(entry.nbytes for entry in going), reason, paths)
                )


def _digests(data: bytes) -> set[str]:
    return {match.decode() for match in _DIGESTS.findall(data)}


def _sound(data: bytes) -> bool:
    """Whether a record carries its own checksum; quick, a record of a large shard has megabytes."""
    match = _OWN_CHECKSUM.search(data)
    return (
        match is not None
        and hashlib.sha256(data[: match.start()] + data[match.end() :]).hexdigest().encode() == match[1]
    )
