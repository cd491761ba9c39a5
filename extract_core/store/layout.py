"""Names of all objects below a dataset root: the one place that knows them.

Every function returns a path relative to the root, with forward slashes, for local folders and object stores alike.
"""

from __future__ import annotations

import hashlib
import re

LATEST = "latest.json"
SHARDS = "shards"
NORMS = "norms"
INDEXES = "indexes"
REPORTS = "reports"
PLANS = "plans"
VERSIONS = "versions"
PROBES = ".probe"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FINGERPRINT = re.compile(r"[0-9a-f]{8,64}")
_COMMIT = re.compile(r"(\d{5,})\.json")
_VERSION = re.compile(r"(\d{6,})\.json")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,119}")


def _digest(value: str) -> str:
    if not _DIGEST.fullmatch(value):
        raise ValueError(f"{value!r} is not a sha256 digest in lower-case hex")
    return value


def _plan(fingerprint: str) -> str:
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ValueError(f"{fingerprint!r} is not a fingerprint: 8 to 64 lower-case hex digits")
    return f"{PLANS}/{fingerprint}"


def shard_path(digest: str) -> str:
    """A shard by the sha256 of its bytes."""
    return f"{SHARDS}/{_digest(digest)}.safetensors"


def norm_path(digest: str) -> str:
    """A model's final norm by the sha256 of its file."""
    return f"{NORMS}/{_digest(digest)}.safetensors"


def index_path(digest: str) -> str:
    """An index by the sha256 of its bytes."""
    return f"{INDEXES}/{_digest(digest)}.parquet"


def report_path(digest: str) -> str:
    """A run report by the sha256 of its bytes."""
    return f"{REPORTS}/{_digest(digest)}.html"


def plan_path(fingerprint: str, digest: str) -> str:
    """The shard layout of a plan, by the sha256 of its bytes: runs that plan at once cannot replace each other's."""
    return f"{_plan(fingerprint)}/plan-{_digest(digest)[:16]}.parquet"


def plan_meta_path(fingerprint: str) -> str:
    """What went into the fingerprint of a plan."""
    return f"{_plan(fingerprint)}/plan.json"


def dropped_path(fingerprint: str) -> str:
    """Input rows that the plan left out, each with its reason."""
    return f"{_plan(fingerprint)}/dropped.jsonl"


def commits_dir(fingerprint: str) -> str:
    """The folder of a plan's commit records."""
    return f"{_plan(fingerprint)}/commits"


def commit_path(fingerprint: str, shard: int) -> str:
    """The commit record of one shard of a plan, e.g. ``plans/<fp>/commits/00012.json``."""
    if shard < 0:
        raise ValueError(f"shard {shard} is negative; shards count from 0")
    return f"{commits_dir(fingerprint)}/{shard:05d}.json"


def commit_shard(name: str) -> int | None:
    """The shard number in the file name of a commit record; None for any other name."""
    match = _COMMIT.fullmatch(name)
    return int(match[1]) if match else None


def quarantine_dir(fingerprint: str) -> str:
    """The folder of a plan's quarantined samples."""
    return f"{_plan(fingerprint)}/quarantine"


def quarantine_path(fingerprint: str, sample_id: str) -> str:
    """The record of one quarantined sample; ids that are no plain file name go by their sha256."""
    plain = _PLAIN.fullmatch(sample_id) is not None
    name = sample_id if plain else hashlib.sha256(sample_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{quarantine_dir(fingerprint)}/{name}.json"


def manifest_path(version: int) -> str:
    """The manifest of a version, e.g. ``versions/000001.json``; versions count from 1."""
    if version < 1:
        raise ValueError(f"version {version} does not exist: versions count from 1")
    return f"{VERSIONS}/{version:06d}.json"


def manifest_version(name: str) -> int | None:
    """The version in the file name of a manifest; None for any other name."""
    match = _VERSION.fullmatch(name)
    return int(match[1]) if match and int(match[1]) > 0 else None
