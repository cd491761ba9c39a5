"""One bit of a stored object flipped: found under the right name, by ``verify`` and by whoever reads it; and repaired.

Each object of a dataset is damaged in turn, at seeded places, and put right again by ``coresample run --repair``'s own
steps, which extract anew just the shard that is damaged.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from extract_core.errors import CorruptDataError
from extract_core.reader import HiddenStatesDataset
from extract_core.store import layout
from extract_core.store.commits import read_commits
from extract_core.store.root import Root
from extract_core.store.shard import HEADER_BYTES
from extract_core.store.verify import verify
from extract_core.store.versions import read_manifest
from tests import tiny
from tests.faults import kit, storejob

FAMILY = "bit flips"
pytestmark = [pytest.mark.timeout(600)]

CHATS = 24
FLIPS = 24 if kit.full() else 4
"""Per kind of object."""
ENCODINGS = {"none": {}, "bf16-split-zstd": {"dtype": "bfloat16", "encoding": "bf16-split-zstd"}}


@dataclass
class Dataset:
    """A published dataset to damage."""

    url: str
    options: dict[str, Any]
    job: Path

    @property
    def root(self) -> Root:
        return Root.open(self.url, self.options)

    def flip(self, rel: str, at: int, bit: int) -> bytes:
        """Flip a bit; the object as it was."""
        data = self.root.read_bytes(rel)
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        self.put(rel, bytes(changed))
        return data

    def put(self, rel: str, data: bytes) -> None:
        """Change an object where it lies: also one that is never replaced."""
        path = self.root.local_path(rel)
        if path is not None:
            path.write_bytes(data)
        else:
            self.root.put_bytes(rel, data)

    def read(self) -> None:
        """Read every sample."""
        data = HiddenStatesDataset(self.url, storage_options=self.options)
        for n in range(len(data)):
            data[n]


@pytest.fixture(params=["local", "moto", "radosgw"] if kit.full() else ["local"])
def place(request, case, server, model) -> Callable[..., Dataset]:
    def make(**store: object) -> Dataset:
        options: dict[str, Any] = {}
        url = str(case.folder / "root")
        if request.param != "local":
            found = server(request.param)
            options, url = found.options(), found.url()
            store = {**store, "storage_options": options}
        job = tiny.write_job(
            case.folder / "job.yaml",
            model=model,
            chats=tiny.write_chats(case.folder / "chats.jsonl", CHATS, seed=3),
            root=Path("unused"),
            store={"shard_bytes": "512KiB", "spool": str(case.folder / "spool"), **store},
        )
        assert case.job(job, url).code == 0
        case.completed = 0
        return Dataset(url, options, job)

    return make


def objects(dataset: Dataset) -> dict[str, list[str]]:
    """Paths by kind."""
    root, manifest = dataset.root, read_manifest(dataset.root)
    plan = f"{layout.PLANS}/{manifest.fingerprint}"
    names = root.list(plan)
    assert manifest.final_norm is not None and manifest.final_norm.path is not None
    return {
        "shard": [shard.path for shard in manifest.shards],
        "norm": [manifest.final_norm.path],
        "index": [manifest.index.path],
        "manifest": [layout.manifest_path(manifest.version)],
        "commit": [f"{plan}/commits/{name}" for name in root.list(f"{plan}/commits")],
        "plan.json": [layout.plan_meta_path(manifest.fingerprint)],
        "plan layout": [f"{plan}/{name}" for name in names if layout.is_plan_layout(name)],
    }


def places(rng: random.Random, kind: str, root: Root, paths: list[str], count: int) -> list[tuple[str, int, int]]:
    """Object, byte and bit of each flip; every other one in a shard lies in its rows."""
    found = []
    for n in range(count):
        path = rng.choice(paths)
        start = HEADER_BYTES if kind == "shard" and n % 2 else 0
        found.append((path, rng.randrange(start, root.size(path)), rng.randrange(8)))
    return found


@pytest.mark.parametrize("kind", ["shard", "norm", "index", "manifest"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_verify_and_the_reader_find_it(case, place, encoding: str, kind: str) -> None:
    case.family = f"bit flips, {kind}"
    case.what = "one bit of a stored object flipped"
    dataset = place(**ENCODINGS[encoding])
    root = dataset.root
    for path, at, bit in places(random.Random(kind), kind, root, objects(dataset)[kind], FLIPS):
        before = dataset.flip(path, at, bit)
        case.injected += 1
        report = verify(root)
        assert not report.ok, f"verify does not find bit {bit} of byte {at} of {path}"
        assert {problem.object for problem in report.problems} == {path}, [str(p) for p in report.problems[:5]]
        if kind != "norm" and not (kind == "shard" and at < HEADER_BYTES):  # the reader reads no header on S3
            _reader_says(dataset, path, kind)
        if kind == "norm":
            with pytest.raises(CorruptDataError) as failure:
                _ = HiddenStatesDataset(dataset.url, storage_options=dataset.options).final_norm
            assert path.rpartition("/")[2] in str(failure.value)
        dataset.put(path, before)
    case.settled(dataset.url, dataset.options, rows=CHATS)


def _reader_says(dataset: Dataset, path: str, kind: str) -> None:
    """What is read is right, or the reader names the object; token ids are read from the index, not from shards."""
    try:
        dataset.read()
    except CorruptDataError as error:
        assert path.rpartition("/")[2] in str(error), str(error)
    else:
        assert kind == "shard", f"the reader does not notice that {path} is damaged"


def test_the_reader_finds_every_flip_in_the_rows(case, place) -> None:
    case.family, case.what = "bit flips, rows", "one bit of a sample's rows flipped"
    dataset = place()
    manifest, chance = read_manifest(dataset.root), random.Random(5)
    table = HiddenStatesDataset(dataset.url, storage_options=dataset.options).index
    for _ in range(FLIPS):
        row = table.slice(chance.randrange(table.num_rows), 1).to_pylist()[0]
        segment = row["segments"][0]
        at = segment["byte_offset"] + chance.randrange(segment["byte_length"])
        path = layout.shard_path(segment["shard"])
        before = dataset.flip(path, at, chance.randrange(8))
        case.injected += 1
        with pytest.raises(CorruptDataError) as failure:
            dataset.read()
        assert row["sample_id"] in str(failure.value) and segment["shard"] in str(failure.value)
        dataset.put(path, before)
    assert manifest.totals.samples == CHATS
    case.settled(dataset.url, dataset.options, rows=CHATS)


@pytest.mark.parametrize("kind", ["commit", "plan.json", "plan layout"])
def test_a_run_finds_it(case, place, kind: str) -> None:
    """Commit records and plans belong to no version: whoever goes on from them finds the damage."""
    case.family, case.what = f"bit flips, {kind}", "one bit of a stored object flipped"
    dataset = place()
    root, fingerprint = dataset.root, read_manifest(dataset.root).fingerprint
    version = layout.manifest_path(1)
    for path, at, bit in places(random.Random(kind), kind, root, objects(dataset)[kind], FLIPS):
        before = dataset.flip(path, at, bit)
        manifest = root.read_bytes(version)
        root.delete(version)  # so that a run has to read its plan and its records
        case.injected += 1
        if kind == "commit":
            with pytest.raises(CorruptDataError, match=path.rpartition("/")[2]):
                read_commits(root, fingerprint)
        outcome = case.job(dataset.job, dataset.url)
        assert outcome.code != 0, f"a run goes on with a damaged {path} (bit {bit} of byte {at})"
        assert path.rpartition("/")[2] in outcome.text, outcome.text
        dataset.put(path, before)
        dataset.put(version, manifest)
    case.settled(dataset.url, dataset.options, rows=CHATS)


@pytest.mark.parametrize("kind", ["shard", "norm", "index", "manifest", "commit"])
@pytest.mark.parametrize("encoding", ENCODINGS if kit.full() else ["none"])
def test_repaired(case, place, encoding: str, kind: str) -> None:
    """The damaged object is as it was before, or a new version is; no other shard is touched."""
    case.family, case.what = "bit flips, repair", "one bit flipped, then run --repair"
    dataset = place(**ENCODINGS[encoding])
    root = dataset.root
    for path, at, bit in places(random.Random(kind), kind, root, objects(dataset)[kind], 1 + FLIPS // 8):
        shards = {shard: root.modified(shard) for shard in objects(dataset)["shard"]}
        before = dataset.flip(path, at, bit)
        case.injected += 1
        extracted: list[int] = []
        manifest, message = storejob.attempt(dataset.job, dataset.url, repair=True, before=extracted.append)
        assert manifest is not None, message
        case.completed += 1
        assert len(extracted) <= (1 if kind in ("shard", "norm", "commit") else 0), f"{len(extracted)} shards"
        if kind in ("shard", "norm"):
            assert root.read_bytes(path) == before, f"{path} was not put right"
        touched = {shard for shard, time in shards.items() if root.modified(shard) != time}
        assert len(touched) <= len(extracted), f"touched: {touched}"  # a norm comes back with the shard that names it
        assert kind != "shard" or touched <= {path}
        report = verify(root, manifest.version)
        assert report.ok, [str(problem) for problem in report.problems[:5]]
        if kind == "manifest":
            dataset.put(path, before)  # the damaged version stays as it is, a new one stands beside it
    case.settled(dataset.url, dataset.options, rows=CHATS)
