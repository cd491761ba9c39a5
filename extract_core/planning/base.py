"""What a root holds already of a job that is planned: samples whose rows need not be extracted again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from extract_core.errors import CorruptDataError, NoSuchVersionError
from extract_core.planning.fingerprint import JobSpec
from extract_core.planning.model import ModelInfo, canonical_digest
from extract_core.planning.plan import read_plan_meta
from extract_core.store import layout
from extract_core.store.commits import DamagedRecord, ShardCommits, all_records, read_commits
from extract_core.store.objects import lost_objects
from extract_core.store.records import CommitRecord, SampleRecord, ShardSource
from extract_core.store.root import Root
from extract_core.store.versions import list_versions, read_manifest


@dataclass(frozen=True)
class Base:
    """Stored samples by id: the number of their source, and the first row of their last segment in its file.

    ``digest`` names the commit records that were looked at; plans of one job are equal where it is.
    """

    sources: tuple[ShardSource, ...] = ()
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    digest: str = ""


@dataclass(frozen=True)
class Pins:
    """Commit records of a plan that is made again: the shard of each of their samples, and its place in that shard."""

    sources: Mapping[int, ShardSource | None] = field(default_factory=dict)
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)


NOTHING, FREE = Base(), Pins()


def find_base(root: Root, spec: JobSpec) -> Base:
    """Samples of earlier plans that have the rows this job wants.

    Plans count whose ``JobSpec.values_digest`` is this job's: the one of the newest version that has it, and those of
    no version (runs that were interrupted before the data changed). A sample counts where its commit record can be read
    and the shard file is there with its size.

    Args:
        root: the dataset root.
        spec: of the job that is planned.

    Raises:
        StoreError: the root cannot be read.
    """
    sources: list[ShardSource] = []
    places: dict[str, tuple[int, int]] = {}
    seen: list[str] = []
    for fingerprint, commits in _plans(root, spec):
        held = list(_held(commits))
        lost = lost_objects(root, {record.object or "": record.nbytes for record, _ in held})
        for record, samples in held:
            if record.object in lost or record.sha256 is None:
                continue
            seen.append(f"{fingerprint} {record.shard} {record.round} {record.attempt}")
            number = len(sources)
            sources.append(
                ShardSource(fingerprint=fingerprint, shard=record.shard, round=record.round, sha256=record.sha256)
            )
            for sample in samples:
                places.setdefault(sample.sample_id, (number, sample.segments[-1].first_row))
    return Base(tuple(sources), places, canonical_digest(seen) if seen else "")


def pins(commits: Mapping[int, ShardCommits]) -> Pins:
    """Where the samples of a plan have to stay, by the commit records beside it.

    They keep the order of their files, so that a lost file is made again as it was.
    """
    sources: dict[int, ShardSource | None] = {}
    places: dict[str, tuple[int, int]] = {}
    for shard, known in commits.items():
        sources[shard] = known.records[0].source
        for record in known.records:
            for sample in record.samples:
                places.setdefault(sample.sample_id, (shard, sample.segments[-1].first_row))
            for item in record.excluded:
                places.setdefault(item.sample_id, (shard, 0))
    return Pins(sources, places)


def positions_follow_length(model: ModelInfo) -> bool:
    """Whether the model encodes positions in one of two ways, by the longest input that its engine is started for.

    LongRoPE (Phi-3 and later) does in vLLM: with it, the same tokens give other rows beside a longer sample.
    """
    try:
        config = json.loads((model.path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return any(value in ("longrope", "su") for value in _rope_kinds(config))


def _rope_kinds(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        yield from (value for key, value in tree.items() if key in ("rope_type", "type"))
        for value in tree.values():
            yield from _rope_kinds(value)


def _held(commits: Mapping[int, ShardCommits]) -> Iterator[tuple[CommitRecord, list[SampleRecord]]]:
    return (item for _, shard in sorted(commits.items()) for item in shard.by_record)


def _plans(root: Root, spec: JobSpec) -> Iterator[tuple[str, dict[int, ShardCommits]]]:
    """Plans to look at with their commit records: the published one, then the others, newest first."""
    newest, published = _newest_version(root, spec)
    if newest is not None:
        yield newest, _records(root, newest)
    others = {}
    for name in root.list(layout.PLANS):
        if not layout.is_fingerprint(name) or name in published or name == spec.fingerprint:
            continue
        with contextlib.suppress(CorruptDataError):
            meta = read_plan_meta(root, name)
            if meta is not None and _alike(meta.spec, spec) and not root.exists(layout.retired_path(name)):
                others[name] = _records(root, name)
    last = {
        name: max((record.created for record in all_records(commits)), default="") for name, commits in others.items()
    }
    for name in sorted(others, key=lambda name: (last[name], name), reverse=True):
        yield name, others[name]


def _newest_version(root: Root, spec: JobSpec) -> tuple[str | None, set[str]]:
    """The plan of the newest version with the job's values, and the plans of all versions."""
    newest, published = None, set()
    for version in reversed(list_versions(root)):
        with contextlib.suppress(CorruptDataError, NoSuchVersionError):
            manifest = read_manifest(root, version)
            published.add(manifest.fingerprint)
            if newest is None and manifest.fingerprint != spec.fingerprint and _alike(manifest.spec, spec):
                newest = manifest.fingerprint
    return newest, published


def _alike(document: dict[str, Any], spec: JobSpec) -> bool:
    whole = all(isinstance(document.get(name), dict) for name in ("model", "layout"))
    return whole and JobSpec(document).values_digest == spec.values_digest


def _records(root: Root, fingerprint: str) -> dict[int, ShardCommits]:
    damaged: list[DamagedRecord] = []  # extracting their samples anew is safe; their own job repairs them
    return read_commits(root, fingerprint, damaged=damaged)
