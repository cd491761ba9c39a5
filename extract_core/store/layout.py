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
TAGS = "tags"
PROBES = ".probe"
TEMP_PREFIX = ".tmp-"
"""Names of files that are being written on a local root."""
PUBLISHERS = "publishers"

TOP_NAMES = frozenset({SHARDS, NORMS, INDEXES, REPORTS, PLANS, VERSIONS, TAGS, LATEST, PROBES, PUBLISHERS})
"""Everything that a dataset has at the top of its root."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FINGERPRINT = re.compile(r"[0-9a-f]{8,64}")
_LAYOUT = re.compile(r"plan-[0-9a-f]{16}\.parquet")
_COMMIT = re.compile(r"([0-9]{5}|[1-9][0-9]{5,17})(?:\.r([1-9][0-9]{0,17}))?\.json")
_VERSION = re.compile(r"([0-9]{6}|[1-9][0-9]{6,17})\.json")
"""Only the names that are written: another spelling of a number would be a second object of the same meaning."""
_TAG = re.compile(r"(?!latest$)(?![0-9]+$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OBJECT = re.compile(r"([0-9a-f]{64})\.[a-z0-9.]{1,20}")
_ATTEMPT = re.compile(r"[0-9a-f]{32}")
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


def commit_path(fingerprint: str, shard: int, round: int = 0) -> str:
    """The commit record of a shard of a plan, e.g. ``plans/<fp>/commits/00012.json``; ``00012.r1.json`` of a retry."""
    if shard < 0 or round < 0:
        raise ValueError(f"shard {shard} or round {round} is negative; both count from 0")
    return f"{commits_dir(fingerprint)}/{shard:05d}{f'.r{round}' if round else ''}.json"


def commit_shard(name: str) -> tuple[int, int] | None:
    """Shard number and round in the file name of a commit record; None for any other name."""
    match = _COMMIT.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


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


def is_tag_name(name: str) -> bool:
    """Whether a version can be called so: 64 characters of A-Z a-z 0-9 . _ -, and neither a number nor "latest"."""
    return _TAG.fullmatch(name) is not None


def tag_path(name: str) -> str:
    """The record of a tag, e.g. ``tags/baseline.json``."""
    if not is_tag_name(name):
        raise ValueError(f"{name!r} is no name for a tag")
    return f"{TAGS}/{name}.json"


def tag_name(file_name: str) -> str | None:
    """The tag in the file name of its record; None for any other name."""
    name = file_name.removesuffix(".json")
    return name if name != file_name and is_tag_name(name) else None


def object_digest(name: str) -> str | None:
    """The digest in the file name of a shard, norm, index or report; None for any other name."""
    match = _OBJECT.fullmatch(name)
    return match[1] if match else None


def publisher_path(attempt: str) -> str:
    """The claim of a run to be the only one that publishes, e.g. ``publishers/<32 hex digits>.json``."""
    if not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"{attempt!r} is not the id of an attempt: 32 lower-case hex digits")
    return f"{PUBLISHERS}/{attempt}.json"


def publisher_attempt(name: str) -> str | None:
    """The attempt in the file name of a claim; None for any other name."""
    attempt = name.removesuffix(".json")
    return attempt if attempt != name and _ATTEMPT.fullmatch(attempt) else None


def retired_path(fingerprint: str) -> str:
    """Says that ``gc`` is removing the plan, so that another gc finishes it."""
    return f"{_plan(fingerprint)}/retired.json"


def is_fingerprint(name: str) -> bool:
    """Whether a folder below ``plans/`` is a plan's."""
    return _FINGERPRINT.fullmatch(name) is not None


def is_plan_layout(name: str) -> bool:
    """Whether a file of a plan's folder is a shard layout."""
    return _LAYOUT.fullmatch(name) is not None
