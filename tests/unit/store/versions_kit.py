"""Roots with several versions, made of little objects: for the tests of versions, tags and gc."""

import hashlib
import os
import time
from pathlib import Path
from unittest import mock

import pyarrow as pa

from extract_core.planning.plan import PlanMeta, PlannedShard
from extract_core.store import layout
from extract_core.store.commits import read_commits, write_commit
from extract_core.store.gc import Policy, collect
from extract_core.store.index import INDEX_SCHEMA, write_index
from extract_core.store.records import CommitRecord
from extract_core.store.root import Root
from extract_core.store.versions import publish
from tests.unit.store.kit import HIDDEN, LAYERS, attempt, build_manifest, commit_shard, index_table, make_shard

RETRIED = 20
"""Seeds from here on are of retry rounds."""


def fingerprint_of(plan: int) -> str:
    return f"{plan:032x}"


def _layout(plan: int) -> bytes:
    return f"layout {plan}".encode()


def layout_digest(plan: int) -> str:
    return hashlib.sha256(_layout(plan)).hexdigest()


def age(root: Root, seconds: float = 7200.0) -> None:
    """Make everything below a local root this old."""
    then = time.time() - seconds
    for path in Path(root.url).rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mtime > then:
            os.utime(path, (then, then))


def add_plan(root: Root, plan: int, shards: int) -> None:
    fingerprint = fingerprint_of(plan)
    if root.exists(layout.plan_meta_path(fingerprint)):
        return
    meta = PlanMeta(
        fingerprint=fingerprint,
        spec={"plan": plan},
        plan_sha256=layout_digest(plan),
        row_bytes=len(LAYERS) * HIDDEN * 2,
        shards=[PlannedShard(index=n, rows=10, samples=2) for n in range(shards)],
        input=9,
        samples=8,
        tokens=80,
        rows=80,
        computed=80,
        supervised_tokens=40,
        truncated=0,
        duplicates=0,
        dropped={},
        malformed=0,
        mask_methods={},
        length_histogram={},
        longest=12,
    )
    root.put_bytes(layout.dropped_path(fingerprint), b"{}\n")
    root.put_bytes(layout.plan_path(fingerprint, meta.plan_sha256), _layout(plan))
    root.put_bytes(layout.plan_meta_path(fingerprint), meta.model_dump_json().encode())
    root.put_bytes(layout.quarantine_path(fingerprint, "evil"), b"{}\n")


def commit(root: Root, spool: Path, plan: int, number: int, seed: int) -> None:
    """Commit a shard made from a seed: the same seed gives the same shard, also in other plans."""
    _commit(root, spool, plan, number, seed, 0)


def retry(root: Root, spool: Path, plan: int, number: int) -> None:
    """A further round of a shard, with samples of its own."""
    if root.exists(layout.commit_path(fingerprint_of(plan), number)):
        _commit(root, spool, plan, number, RETRIED + plan, 1)


def _commit(root: Root, spool: Path, plan: int, number: int, seed: int, round: int) -> None:
    fingerprint = fingerprint_of(plan)
    if root.exists(layout.commit_path(fingerprint, number, round)):
        return
    scratch = Root.open(str(spool / f"scratch-{attempt()}"))
    sealed, made, pieces = make_shard(spool, 2, seed)
    record = commit_shard(scratch, number, sealed, made, pieces, attempt())
    for path in record.objects:
        local = scratch.local_path(path)
        if path.startswith(layout.SHARDS):
            root.put_file(local, path)
        elif not root.exists(path):
            root.put_bytes(path, local.read_bytes())
    write_commit(root, CommitRecord.model_validate({**record.model_dump(), "fingerprint": fingerprint, "round": round}))


def known(seeds, spool: Path):
    return {sample.sample_id: sample for seed in seeds for sample in make_shard(spool, 2, seed)[1]}


def publish_plan(root: Root, spool: Path, plan: int, seeds) -> int:
    """Plan, extract and publish; what is there already is used again."""
    fingerprint = fingerprint_of(plan)
    add_plan(root, plan, len(seeds))
    for number, seed in enumerate(seeds):
        commit(root, spool, plan, number, seed)
    return publish_commits(root, spool, fingerprint, seeds)


def publish_commits(root: Root, spool: Path, fingerprint: str, seeds) -> int:
    commits = read_commits(root, fingerprint)
    index = write_index(root, index_table(commits, known([*seeds, *range(RETRIED, RETRIED + 5)], spool)))
    who = attempt()

    def build(version):
        manifest = build_manifest(version, who, commits, index)
        return type(manifest).model_validate(
            {**manifest.model_dump(), "fingerprint": fingerprint, "spec": {"model": {"name": "tiny"}}}
        )

    return publish(root, build, who).version


def changed_index(root: Root, table: pa.Table, change):
    """An index whose rows went through ``change``."""
    rows = table.to_pylist()
    return write_index(root, pa.Table.from_pylist(change(rows), schema=INDEX_SCHEMA))


class Killed(BaseException):
    pass


def killed_gc(root: Root, policy: Policy, left: int) -> bool:
    """A collection that is killed after ``left`` changes; whether it came that far."""

    def counting(name):
        plain = getattr(Root, name)

        def call(self, *args):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return plain(self, *args)

        return mock.patch.object(Root, name, call)

    with counting("delete"), counting("put_bytes"), counting("delete_empty_folder"):
        try:
            collect(root, policy)
        except Killed:
            return True
    return False
