"""Whole runs whose samples share prefixes: stored once, whoever is left out, lost, tried again or reused."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from typer.testing import CliRunner

from extract_core.cli import app
from extract_core.errors import CaptureError
from extract_core.job import Job, prepare
from extract_core.planning.plan import segments_of
from extract_core.planning.prefixes import fused, lay_out
from extract_core.reader import HiddenStatesDataset
from extract_core.settings import JobSettings
from extract_core.store.commits import all_records, read_commits
from extract_core.store.records import CommitRecord, Manifest
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import read_manifest
from tests.prefix_rows import prefix_rows
from tests.unit.cli import kit
from tests.unit.rows_kit import requested, run

LAYERS = [1, 2, 5]
CHATS, TURNS = 8, 3


def chat(n: int, turns: int = TURNS) -> list[list[int]]:
    """One sample per turn, under a system prompt of 20 tokens that two chats share."""
    ids = [2 + n // 2, *range(50, 69)]
    samples = []
    for turn in range(turns):
        ids = [*ids, 100 + n, *range(120, 130 + (n + turn) % 7), 110 + turn]
        samples.append(ids)
    return samples


def answers() -> list[list[int]]:
    """Four answers to one prompt of 40 tokens, one of which says nothing."""
    prompt = [90, *range(30, 69)]
    return [prompt, *([*prompt, 200 + n, *range(130, 140 + n)] for n in range(3))]


ROWS = [*itertools.chain(*(chat(n) for n in range(CHATS))), *answers()]


class Case:
    """One root, whose data changes."""

    def __init__(self, folder: Path, **sections: Any):
        self.folder = folder
        kit.make_model(folder / "model")
        self.sections = {"layers": LAYERS, "store__shard_bytes": "30KiB", "completeness": 0.4, **sections}

    def settings(self, rows: list[list[int]], **change: Any) -> JobSettings:
        data = self.folder / "chats.jsonl"
        data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
        return kit.settings(kit.write_job(self.folder / "job.yaml", **{**self.sections, **change}))

    @property
    def root(self) -> Root:
        return Root.open(str(self.folder / "dataset"))

    def sound(self, rows: list[list[int]], version: int | None = None) -> Manifest:
        """Every byte is right, and the samples are these, each with the rows of its tokens."""
        report = verify(self.root, version)
        assert report.ok, [str(problem) for problem in report.problems]
        dataset = HiddenStatesDataset(self.root.url, version=version)
        found = [tuple(item["input_ids"].tolist()) for item in dataset]
        assert Counter(found) == Counter(map(tuple, rows))
        dtype = getattr(torch, dataset.manifest.dtype)
        for item in dataset:
            expected = prefix_rows(item["input_ids"].tolist(), len(LAYERS), kit.HIDDEN).to(dtype)
            assert torch.equal(item["hidden_states"], expected)
        return dataset.manifest

    def stored_rows(self, version: int | None = None) -> int:
        return sum(shard.rows for shard in read_manifest(self.root, version).shards)


def records(root: Root, fingerprint: str) -> list[CommitRecord]:
    return list(all_records(read_commits(root, fingerprint)))


def id_of(job: Job, row: list[int]) -> str:
    for table in job.plan.shards():
        for name, ids in zip(table["sample_id"].to_pylist(), table["token_ids"].to_pylist(), strict=True):
            if ids == row:
                return str(name)
    raise AssertionError("no such sample")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.parametrize("encoding", ["none", "bf16-split-zstd"])
def test_every_prefix_is_stored_once(tmp_path: Path, encoding: str) -> None:
    kind = {"store__dtype": "bfloat16", "store__shard_bytes": "15KiB"} if encoding != "none" else {}
    case = Case(tmp_path, store__encoding=encoding, **kind)
    result, engines, _ = run(case.settings(ROWS))
    meta = prepare(case.settings(ROWS)).plan.meta
    total = sum(map(len, ROWS))
    assert len(meta.shards) > 1 and meta.tokens == total and meta.rows < 0.7 * total
    manifest = case.sound(ROWS)
    assert manifest == result.manifest and manifest.totals.tokens == total
    assert case.stored_rows() == meta.rows == sum(request.rows for engine in engines for request in engine.requests)
    for record in records(case.root, meta.fingerprint):
        spans = {(s.first_row, s.rows, s.xxh3) for sample in record.samples for s in sample.segments}
        assert sum(rows for _, rows, _ in spans) == record.rows, "each segment once, and nothing beside them"
        assert max(len(sample.segments) for sample in record.samples) > 1


def test_switched_off_every_sample_is_one_segment(case: Case) -> None:
    run(case.settings(ROWS, store__share_prefixes=False))
    manifest = case.sound(ROWS)
    assert case.stored_rows() == manifest.totals.tokens
    samples = [s for record in records(case.root, manifest.fingerprint) for s in record.samples]
    assert {len(sample.segments) for sample in samples} == {1}


def test_the_order_of_the_input_decides_only_the_order_of_families(case: Case) -> None:
    before = prepare(case.settings(ROWS)).plan
    mixed = [row for turn in range(TURNS) for row in ROWS[turn : CHATS * TURNS : TURNS]] + ROWS[CHATS * TURNS :]
    after = prepare(case.settings(mixed, root=str(case.folder / "mixed"))).plan
    assert before.meta.shards == after.meta.shards
    for one, other in zip(before.shards(), after.shards(), strict=True):
        assert one.select(["sample_id", "segments"]).equals(other.select(["sample_id", "segments"]))


# -- samples that are left out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", range(TURNS))
def test_a_spoilt_turn_takes_the_later_ones_and_nothing_else(case: Case, turn: int) -> None:
    """Rows that are not finite are in the turns after it, too; the turns before and other chats keep theirs."""
    settings = case.settings(ROWS)
    job = prepare(settings)
    bad = chat(2)[turn:]
    good = [row for row in ROWS if row not in bad]
    result, _, _ = run(settings, spoil={id_of(job, row) for row in bad})
    assert result.manifest.accounting.quarantined == {"not_finite": len(bad)}
    case.sound(good)
    assert case.stored_rows() == prepare(settings).plan.meta.rows - sum(1 for _ in _own_rows(job, bad))
    run(case.settings(ROWS))  # tries them again
    case.sound(ROWS)


def _own_rows(job: Job, rows: list[list[int]]) -> set[tuple[int, int]]:
    """Rows of the plan that only these samples use: (shard, row)."""
    ours: set[tuple[int, int]] = set()
    others: set[tuple[int, int]] = set()
    for shard, table in enumerate(job.plan.shards()):
        for ids, segments in zip(table["token_ids"].to_pylist(), segments_of(table), strict=True):
            used = {(shard, row) for first, count in segments for row in range(first, first + count)}
            (ours if ids in rows else others).update(used)
    return ours - others


def test_one_fault_in_a_long_conversation_does_not_stop_the_run(case: Case) -> None:
    """All later turns share the faulty rows: that is one fault, however many samples fail."""
    turns = chat(9, turns=7)
    settings = case.settings([*ROWS, *turns], store__shard_bytes="1MiB")
    job = prepare(settings)
    result, _, _ = run(settings, spoil={id_of(job, row) for row in turns[1:]})
    assert result.manifest.accounting.quarantined == {"not_finite": 6}
    case.sound([*ROWS, turns[0]])
    other = Case(case.folder / "other")
    settings = other.settings([*ROWS, *turns], store__shard_bytes="1MiB")
    job = prepare(settings)
    with pytest.raises(CaptureError, match="6 of 35 samples fail their row checks"):
        run(settings, spoil={id_of(job, chat(n)[2]) for n in range(6)})


def test_a_killer_takes_only_its_own_rows(case: Case) -> None:
    settings = case.settings(ROWS)
    job = prepare(settings)
    bad = chat(3)[1]  # the turn in the middle: its rows are those of the last turn, too
    result, _, _ = run(settings, killers={id_of(job, bad)})
    assert result.manifest.accounting.quarantined == {"kills_engine": 1}
    case.sound([row for row in ROWS if row != bad])
    assert case.stored_rows() == job.plan.meta.rows - len(_own_rows(job, [bad])) == job.plan.meta.rows
    prompt = answers()[2]
    other = Case(case.folder / "other")
    settings = other.settings(ROWS)
    run(settings, killers={id_of(prepare(settings), prompt)})
    other.sound([row for row in ROWS if row != prompt])
    assert other.stored_rows() == job.plan.meta.rows - len(_own_rows(job, [prompt])) < job.plan.meta.rows


def test_what_was_left_out_comes_back_in_a_file_of_its_own(case: Case) -> None:
    settings = case.settings(ROWS)
    job = prepare(settings)
    bad = [chat(0)[2], chat(1)[2], answers()[1], answers()[3]]
    run(settings, killers={id_of(job, row) for row in bad})
    case.sound([row for row in ROWS if row not in bad])
    result, engines, _ = run(settings)
    assert result.manifest.version == 2 and not result.manifest.accounting.quarantined
    case.sound(ROWS)
    assert sorted(name for names in requested(engines) for name in names) == sorted(id_of(job, row) for row in bad)
    late = [r for r in records(case.root, job.plan.fingerprint) if r.round]
    assert sum(r.rows for r in late) < sum(map(len, bad)), "they share what they share there, too"


# -- files that are lost ----------------------------------------------------------------------------------------------


def test_a_lost_shard_is_made_again_as_it_was(case: Case) -> None:
    first, _, _ = run(case.settings(ROWS))
    for shard in first.manifest.shards:
        path = case.root.local_path(shard.path)
        assert path is not None
        path.unlink()
        again, engines, _ = run(case.settings(ROWS))
        assert len(engines) == 1 and again.manifest == first.manifest and path.exists()
    case.sound(ROWS)


def test_a_lost_shard_without_some_of_its_samples(case: Case) -> None:
    settings = case.settings(ROWS, quarantine_runs=1)
    job = prepare(settings)
    bad = [chat(2)[0], chat(2)[2], answers()[0]]
    good = [row for row in ROWS if row not in bad]
    first, _, _ = run(settings, killers={id_of(job, row) for row in bad})
    for shard in first.manifest.shards:
        path = case.root.local_path(shard.path)
        assert path is not None
        path.unlink()
    run(settings)
    case.sound(good)


# -- reuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_rows_are_reused_whatever_they_share(case: Case, before: bool, after: bool) -> None:
    kept = [row for n, row in enumerate(ROWS) if n % 5]
    new = [*chat(CHATS), [*chat(1)[2], 111, 112]]
    run(case.settings(ROWS, store__share_prefixes=before))
    second, engines, _ = run(case.settings([*kept, *new], store__share_prefixes=after))
    asked = [tuple(torch.frombuffer(bytearray(s.token_ids), dtype=torch.int32).tolist()) for e in engines
             for r in e.requests for s in r.samples]  # fmt: skip
    assert Counter(asked) == Counter(map(tuple, new))
    case.sound([*kept, *new], 2)
    assert second.manifest.provenance["reused"]["samples"] == len(kept)
    third, engines, _ = run(case.settings(ROWS[3:], store__share_prefixes=after))
    case.sound(ROWS[3:], third.manifest.version)
    case.sound(ROWS, 1)


def test_a_reused_file_that_is_gone_is_extracted(case: Case) -> None:
    run(case.settings(ROWS))
    kept = [row for n, row in enumerate(ROWS) if n % 3]
    second, engines, _ = run(case.settings(kept))
    assert not engines
    for shard in second.manifest.shards:
        path = case.root.local_path(shard.path)
        assert path is not None
        path.unlink()
    run(case.settings(kept))
    case.sound(kept)


def test_a_plan_that_is_made_again_keeps_its_places(case: Case) -> None:
    settings = case.settings(ROWS)
    job = prepare(settings)
    result, _, _ = run(settings)
    case.root.put_bytes(f"plans/{job.plan.fingerprint}/plan.json", b"{")
    again, engines, _ = run(settings, repair=True)
    assert not engines and again.manifest == result.manifest
    made = prepare(settings).plan
    assert made.meta.shards == job.plan.meta.shards
    assert all(a.equals(b) for a, b in zip(made.shards(), job.plan.shards(), strict=True))


# -- what is left of a layout -----------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=5).map("".join), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
@examples(deadline=None)
def test_nodes_that_nothing_parts_become_one(words: list[str], dice: random.Random) -> None:
    samples = [[n for letter in word for n in ([ord(letter)] * 17)] for word in words]
    segments = lay_out(samples, share=True).segments
    assert fused(segments) == segments, "a whole layout has no such nodes"
    left = [nodes for nodes in segments if dice.random() < 0.5]
    made = fused(left)
    users: dict[int, set[int]] = {}
    for number, (before, after) in enumerate(zip(left, made, strict=True)):
        rows = [row for first, count in after for row in range(first, first + count)]
        assert rows == [row for first, count in before for row in range(first, first + count)]
        for row in rows:
            users.setdefault(row, set()).add(number)
    edges = {first for nodes in made for first, _ in nodes}
    for row, whose in users.items():
        if row - 1 in users and users[row - 1] == whose:
            assert row not in edges or any(
                first == row and not _follows(nodes, row) for nodes in made for first, _ in nodes
            )
    assert len({first for nodes in made for first, _ in nodes}) == len({node for nodes in made for node in nodes})


def _follows(nodes: list[tuple[int, int]], row: int) -> bool:
    return any(a[0] + a[1] == b[0] == row for a, b in itertools.pairwise(nodes))


def test_plan_and_status_say_what_sharing_saves(case: Case) -> None:
    settings = case.settings(ROWS)
    path = str(case.folder / "job.yaml")

    def told(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return done.stdout

    document = json.loads(told("plan", path, "--json"))
    meta = prepare(settings).plan.meta
    assert (document["tokens"], document["rows"], document["computed"]) == (meta.tokens, meta.rows, meta.computed)
    assert document["to_extract"]["tokens"] == meta.tokens and document["to_extract"]["rows"] == meta.rows
    assert document["estimate"]["tokens"] == meta.rows
    text = " ".join(told("plan", path).split())
    assert f"{meta.rows:,} rows are stored ({meta.tokens / meta.rows:.2f} times fewer)" in text
    run(settings)
    (plan,) = json.loads(told("status", case.root.url, "--json"))["plans"]
    assert plan["tokens_committed"] == plan["tokens"] == meta.tokens
    assert plan["rows_committed"] == plan["rows"] == meta.rows
    run(case.settings(ROWS[5:]))
    document = json.loads(told("plan", path, "--json"))
    assert document["to_extract"] == {"samples": 0, "tokens": 0, "rows": 0, "shards": 0}
