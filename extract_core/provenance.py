"""Where a version was made: code, environment, machine, and how long each stage took.

No user names, paths of homes, addresses or variables: a dataset is published, its host's name is all that it says.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from extract_core.hardware import driver_version, visible_gpus
from extract_core.store.records import CommitRecord

_PACKAGES = ("torch", "transformers")
_OF_RECORDS = ("engine_s", "stall_s", "check_and_seal_s", "upload_s")


@dataclass
class RunClock:
    """Seconds per stage of one run, and what each start of its engine took."""

    stages: dict[str, float] = field(default_factory=dict)
    engine_starts: list[float] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; one that is entered again is added up."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - started

    def to_dict(self, records: Iterable[CommitRecord] = ()) -> dict[str, Any]:
        """For the manifest: this run's stages, and sums over all commit records, whichever run wrote them."""
        totals = dict.fromkeys(_OF_RECORDS, 0.0)
        for record in records:
            for name in _OF_RECORDS:
                totals[name] += record.timings.get(name, 0.0)
        return {
            "stages": {name: round(seconds, 3) for name, seconds in self.stages.items()},
            "engine_starts": [{"seconds": round(seconds, 3)} for seconds in self.engine_starts],
            "shards": {name: round(seconds, 3) for name, seconds in totals.items()},
        }


def origin_in_words(provenance: Mapping[str, Any]) -> str:
    """How much a version extracted and how much it refers to; empty where it refers to nothing.

    Args:
        provenance: of its manifest.
    """
    reused, own = (provenance.get(name) or {} for name in ("reused", "extracted"))
    if not reused.get("samples"):
        return ""
    return (
        f"{own.get('samples', 0):,} samples ({own.get('tokens', 0):,} tokens) extracted, {reused['samples']:,} samples "
        f"({reused['tokens']:,} tokens) of earlier plans referred to"
    )


def provenance() -> dict[str, Any]:
    """The part that follows from this process and machine."""
    return {
        "host": platform.node(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "gpus": [gpu.name for gpu in visible_gpus()],
        "gpu_driver": driver_version(),
        "python": platform.python_version(),
        "packages": packages(),
        "environment_sha256": environment_digest(),
        "git": git_state(),
        "lock_sha256": lock_digest(),
    }


def checkout() -> Path | None:
    """The folder of the source checkout that this package is used from; None for an installed copy."""
    folder = Path(__file__).resolve().parent.parent
    return folder if (folder / ".git").exists() and (folder / "pyproject.toml").exists() else None


@cache
def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the checkout, and whether tracked files differ from it; None without one, or without git."""
    folder = folder or checkout()
    if folder is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def environment_digest() -> str:
    """sha256 over the sorted ``name==version`` lines of everything that is installed."""
    heads = (item.metadata for item in metadata.distributions())  # parsed anew at each look
    found = {f"{head['Name'].lower().replace('_', '-')}=={head['Version']}" for head in heads if head["Name"]}
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


@cache
def lock_digest(folder: Path | None = None) -> str | None:
    """sha256 over the checkout's lock files, names and bytes; None without a checkout."""
    folder = folder or checkout()
    locks = sorted((folder / "requirements").glob("*.lock")) if folder is not None else []
    if not locks:
        return None
    digest = hashlib.sha256()
    for lock in locks:
        digest.update(lock.name.encode() + b"\0" + lock.read_bytes() + b"\0")
    return digest.hexdigest()


def packages() -> dict[str, str]:
    """Versions of the engine's packages."""
    from extract_core.engine.versions import installed_engine

    engine = installed_engine()
    return {name: str(value) for name, value in engine.items() if name in ("package", "vllm", *_PACKAGES)}


def cpu_model() -> str:
    """As the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
