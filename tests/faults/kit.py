"""What every family shares: cases, commands in processes of their own, and the invariants that every case ends in."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from extract_core.reader import HiddenStatesDataset
from extract_core.store import layout
from extract_core.store.commits import all_records, read_commits
from extract_core.store.gc import Policy, collect, survey
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import list_versions, read_manifest
from tests.faults import record, storejob

MARKER = "FAULTS_CASE"
"""Environment variable by which the processes of a case are found, wherever they are."""
WEEKS_S = 14 * 86400.0
TRACEBACK = "Traceback (most recent call last)"
_ENGINE_PART = re.compile(r"^(the engine:|from the engine's log:|engine traceback)", re.MULTILINE)


def full() -> bool:
    """Whether the whole suite runs."""
    return record.mode() == "full"


@dataclass
class Outcome:
    """How a command ended, and all that it printed."""

    code: int
    text: str

    @property
    def killed(self) -> bool:
        """Whether a signal ended it, ours presumably."""
        return self.code < 0


@dataclass
class Case:
    """One case: what it injected and what came of it.

    Args:
        family, name: as in the table.
        folder: of its own.
        what: what the family injects, in words.
    """

    family: str
    name: str
    folder: Path
    what: str = ""
    module: str = ""
    injected: int = 0
    completed: int = 0
    refused: int = 0
    versions: int = 0
    unreferenced: int = 0
    orphans: int = 0
    notes: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    marker: str = field(default_factory=lambda: uuid.uuid4().hex)
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def record(self, *, passed: bool, seconds: float) -> None:
        """One line in the journal."""
        names = (
            "injected",
            "completed",
            "refused",
            "versions",
            "unreferenced",
            "orphans",
            "notes",
            "what",
            "module",
            "detail",
        )
        counts = {name: getattr(self, name) for name in names}
        record.add(self.family, case=self.name, failed=int(not passed), seconds=seconds, **counts)

    # -- commands ------------------------------------------------------------------------------------------------

    def start(self, *words: str, module: str = "extract_core.cli", **environment: str) -> subprocess.Popen[bytes]:
        """Start a module (the command line by default); its output goes to a file of its own."""
        env = {
            **os.environ,
            "PREFECT_HOME": str(self.folder / "prefect"),
            "COLUMNS": "200",
            "TMPDIR": str(self._temp()),
            MARKER: self.marker,
            **environment,
        }
        path = self.folder / f"output-{len(self._started):02d}"
        with path.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
            )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[bytes], timeout_s: float = 240) -> Outcome:
        """Wait for a command to end."""
        path = self.folder / f"output-{self._started.index(process):02d}"
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:.0f} s:\n{path.read_text()[-4000:]}") from None
        return Outcome(code, path.read_text(encoding="utf-8", errors="replace"))

    def run(self, *words: str, timeout_s: float = 240, **environment: str) -> Outcome:
        """A command to its end."""
        return self.finish(self.start(*words, **environment), timeout_s)

    def job(self, path: Path, root: str | Path, **options: Any) -> Outcome:
        """A job with random rows in this process: its exit code and what a user would be told."""
        manifest, message = storejob.attempt(path, str(root), **options)
        return self.clear(Outcome(0 if manifest else 1, f"error: {message}"))

    def _temp(self) -> Path:
        path = self.folder / "tmp"
        path.mkdir(exist_ok=True)
        return path

    def processes(self) -> list[psutil.Process]:
        """Processes of this case that are still there, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARKER) == self.marker and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill_all(self) -> None:
        """End whatever a failed case left, and free its disk space."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for child in self._started:
            child.wait()
        shutil.rmtree(self.folder / "prefect", ignore_errors=True)

    # -- invariants ----------------------------------------------------------------------------------------------

    def clear(self, outcome: Outcome) -> Outcome:
        """The command came to its end, or failed with a message that says why; counts it."""
        words = _ENGINE_PART.split(outcome.text)[0]
        assert TRACEBACK not in words, f"a Python traceback at the user:\n{outcome.text[-6000:]}"
        if outcome.code == 0:
            self.completed += 1
            return outcome
        assert outcome.code in (1, 2, 3), f"exit status {outcome.code}:\n{outcome.text[-4000:]}"
        message = re.search(r"^error: (.+)", words, re.MULTILINE)
        assert message is not None, f"exit status {outcome.code} without a message:\n{outcome.text[-4000:]}"
        assert len(message[1].strip()) > 10, f"this says nothing: {message[0]!r}"
        self.refused += 1
        return outcome

    def settled(
        self,
        url: str,
        options: dict[str, Any] | None = None,
        *,
        rows: int | None = None,
        spools: tuple[Path, ...] = (),
        published: bool = True,
    ) -> None:
        """The invariants that every case ends in.

        Args:
            url: the dataset root.
            options: its storage options, of a way to the store without faults.
            rows: input rows of the job, to which the accounting of every version must add up.
            spools: folders outside the root where shards were written.
            published: whether there must be a version.
        """
        self.no_orphans()
        root = Root.open(url, options or {})
        versions = list_versions(root)
        assert versions or not published, f"{url} has no version"
        for version in versions:
            self._whole(root, version, rows, options)
        self._swept(root, spools)

    def no_orphans(self, patience_s: float = 15) -> None:
        """No process of this case is left."""
        deadline = time.monotonic() + patience_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.orphans += len(left)
        lines = [f"{process.pid}: {' '.join(process.cmdline())[:200]}" for process in left if process.is_running()]
        assert not left, "processes are left behind:\n" + "\n".join(lines)

    def _whole(self, root: Root, version: int, rows: int | None, options: dict[str, Any] | None) -> None:
        report = verify(root, version)
        assert report.ok, f"version {version} of {root.url}: {[str(problem) for problem in report.problems[:5]]}"
        manifest = read_manifest(root, version)
        accounting = manifest.accounting
        assert accounting.total == accounting.input == (accounting.input if rows is None else rows), accounting
        dataset = HiddenStatesDataset(root.url, version=version, storage_options=options)
        assert len(dataset) == accounting.published == manifest.totals.samples
        ids = {dataset[n]["sample_id"] for n in range(len(dataset))}  # reads every row, and checks its checksum
        assert len(ids) == accounting.published, "a sample is published twice"
        self.versions += 1

    def _swept(self, root: Root, spools: tuple[Path, ...]) -> None:
        """gc finds whatever nothing refers to; having removed it, nothing but what is referred to is there."""
        for spool in spools:
            assert not (left := list(spool.glob("run-*/*.tmp"))), f"left in the spool: {left}"
        if not list_versions(root) and not root.list(layout.PLANS):
            stray = [entry.path for entry in root.entries("") if not _known_stray(entry.path)]
            assert not stray, f"there is no plan, yet there are {stray}"
            return
        policy, later = Policy(grace_s=0), time.time() + WEEKS_S
        expected = unreferenced(root)
        found = {path for item in survey(root, policy, now=later).items for path in item.objects}
        assert expected <= found, f"gc does not find {sorted(expected - found)}"
        uploads = {upload.path for upload in root.unfinished_uploads()}
        collect(root, policy, now=later)
        assert not (left := unreferenced(root)), f"gc left {sorted(left)}"
        assert not (left := root.unfinished_uploads()), f"gc left unfinished uploads: {left}"
        self.unreferenced += len(expected) + len(uploads)
        for version in list_versions(root):
            report = verify(root, version)
            assert report.ok, f"gc damaged version {version}: {[str(problem) for problem in report.problems[:5]]}"


def wait_stopped(process: subprocess.Popen[bytes], timeout_s: float = 120) -> None:
    """Wait until a process has stopped itself (SIGSTOP)."""
    deadline = time.monotonic() + timeout_s
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert process.poll() is None, f"it ended with status {process.returncode} before it stopped"
        assert time.monotonic() < deadline, f"it did not stop within {timeout_s:.0f} s"
        time.sleep(0.02)


def last_json(text: str) -> dict[str, Any]:
    """The last line that is a JSON object."""
    found: dict[str, Any] = json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))
    return found


def _known_stray(path: str) -> bool:
    return path.startswith((f"{layout.PROBES}/", ".spool/", f"{layout.PLANS}/")) or "/.tmp-" in f"/{path}"


def unreferenced(root: Root) -> set[str]:
    """Objects that nothing refers to, found without gc's help: the listing less all that records name.

    A record may name an object by path or by digest in whatever field; its whole text is searched.
    """
    keep = {layout.LATEST}
    texts = []
    for version in list_versions(root):
        keep.add(layout.manifest_path(version))
        texts.append(read_manifest(root, version).dump().decode())
    for name in root.list(layout.PLANS):
        folder = f"{layout.PLANS}/{name}"
        for commit in all_records(read_commits(root, name)):
            keep.add(layout.commit_path(name, commit.shard, commit.round))
            texts.append(commit.dump().decode())
        with contextlib.suppress(FileNotFoundError):
            meta = json.loads(root.read_bytes(layout.plan_meta_path(name)))
            keep |= {layout.plan_meta_path(name), layout.dropped_path(name)}
            keep.add(layout.plan_path(name, meta["plan_sha256"]))
        keep |= {f"{folder}/quarantine/{item}" for item in root.list(f"{folder}/quarantine")}
    digests = set(re.findall(r"[0-9a-f]{64}", " ".join(texts)))
    return {
        entry.path
        for entry in root.entries("")
        if entry.path not in keep
        and layout.object_digest(entry.name) not in digests
        and not entry.path.startswith(f"{layout.TAGS}/")
    }
