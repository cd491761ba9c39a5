"""A job on changed data extracts what is new, and refers to what the root holds already."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from typer.testing import CliRunner

from extract_core.chat.types import Sample, Source
from extract_core.cli import app
from extract_core.errors import CorruptDataError, EngineError
from extract_core.job import Job, prepare
from extract_core.planning import plan as plans
from extract_core.planning.base import FREE, NOTHING, Base, Pins, find_base
from extract_core.planning.fingerprint import JobSpec
from extract_core.planning.making import make_plan
from extract_core.planning.model import canonical_digest
from extract_core.planning.plan import CHECKSUM, PLAN_SCHEMA, load_plan
from extract_core.reader import HiddenStatesDataset
from extract_core.settings import JobSettings
from extract_core.store import layout
from extract_core.store.commits import all_records, read_commits
from extract_core.store.diff import diff
from extract_core.store.gc import Policy, collect
from extract_core.store.records import CommitRecord, Manifest, ShardSource
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import list_versions, read_manifest
from tests.unit import rows_kit
from tests.unit.cli import kit
from tests.unit.rows_kit import requested, run
from tests.unit.store.versions_kit import age

ROWS = list(range(24))


def tokens(n: int) -> list[int]:
    """Row ``n`` of the data; 10 to 30 tokens."""
    return [2 + n, *range(100, 110 + n % 20)]


class Case:
    """One root, whose data changes."""

    def __init__(self, folder: Path, **sections: Any):
        self.folder, self.fresh = folder, 0
        kit.make_model(folder / "model")
        self.sections = {"layers": [1, 2, 5], "store__shard_bytes": "20KiB", "completeness": 0.5, **sections}

    def job(self, rows: Sequence[int], *, root: str = "dataset", **change: Any) -> JobSettings:
        """Write the data; the job that reads it."""
        data = self.folder / "chats.jsonl"
        data.write_text("".join(json.dumps({"input_ids": tokens(n)}) + "\n" for n in rows))
        options = {**self.sections, "root": str(self.folder / root), **change}
        return kit.settings(kit.write_job(self.folder / "job.yaml", **options))

    @property
    def root(self) -> Root:
        return Root.open(str(self.folder / "dataset"))

    def extract(self, rows: Sequence[int], **change: Any) -> tuple[Manifest, list[list[int]]]:
        """Run it: the version, and which rows each request to the engine had."""
        result, engines, _ = run(self.job(rows, **change))
        return result.manifest, asked(engines)

    def interrupted(self, rows: Sequence[int], shards: int) -> Job:
        """A run that ends after some shards."""
        settings = self.job(rows)
        with pytest.MonkeyPatch.context() as patch:
            plain = rows_kit.Rows.extract

            def extract(engine: rows_kit.Rows, *request: Any) -> Any:
                if len(engine.requests) == shards:
                    raise EngineError("pulled the plug")
                return plain(engine, *request)

            patch.setattr(rows_kit.Rows, "extract", extract)
            with pytest.raises(EngineError, match="pulled the plug"):
                run(settings)
        return prepare(settings)

    def sound(self, rows: Sequence[int], version: int) -> None:
        """Every byte is right, the samples are these, and each has the rows that a fresh root gives it."""
        report = verify(self.root, version)
        assert report.ok, [str(problem) for problem in report.problems]
        self.fresh += 1
        fresh, _, _ = run(self.job(rows, root=f"fresh-{self.fresh}"))
        ours, theirs = (
            {item["sample_id"]: item for item in HiddenStatesDataset(root, version=number)}
            for root, number in ((self.root.url, version), (fresh.root, 1))
        )
        assert ours.keys() == theirs.keys() and len(ours) == len(rows)
        for name, item in ours.items():
            for what in ("hidden_states", "input_ids", "loss_mask"):
                assert torch.equal(item[what], theirs[name][what])


def asked(engines: list[rows_kit.Rows]) -> list[list[int]]:
    """Rows of the data in each request."""
    known = [
        [int(np.frombuffer(sample.token_ids, "<i4")[0]) - 2 for sample in request.samples]
        for engine in engines
        for request in engine.requests
    ]
    assert [len(names) for names in known] == [len(names) for names in requested(engines)]
    return known


def flat(requests: list[list[int]]) -> list[int]:
    return sorted(row for request in requests for row in request)


def records(root: Root, fingerprint: str) -> list[CommitRecord]:
    return list(all_records(read_commits(root, fingerprint)))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


EDITED = [n for n in ROWS if n not in (3, 11, 12)] + [40, 41, 42]
"""Two rows removed, one changed, two added."""


def test_only_what_is_new_is_extracted(case: Case) -> None:
    first, asked_for = case.extract(ROWS)
    assert flat(asked_for) == ROWS and len(first.shards) > 4
    assert first.provenance["reused"] == {"samples": 0, "tokens": 0, "shards": 0, "fingerprints": []}

    second, asked_for = case.extract(EDITED)
    assert flat(asked_for) == [40, 41, 42]
    assert second.version == 2 and second.totals.samples == len(EDITED)
    new = sum(len(tokens(n)) for n in (40, 41, 42))
    assert second.provenance["extracted"] == {"samples": 3, "tokens": new, "shards": len(asked_for)}
    kept = second.provenance["reused"]
    assert (kept["samples"], kept["tokens"]) == (21, second.totals.tokens - new)
    assert kept["fingerprints"] == [first.fingerprint]
    assert second.timings["engine_s"] == len(asked_for), "no second is counted twice"
    assert second.timings["tokens_per_s"] == new / len(asked_for)
    ours = {shard.sha256 for shard in second.shards}
    assert len(ours - {shard.sha256 for shard in first.shards}) == len(asked_for)
    case.sound(EDITED, 2)
    case.sound(ROWS, 1)
    found = diff((case.root, first), (case.root, second))
    assert found.shards["shared"] == kept["shards"] and not found.samples["values"].count and not found.not_compared

    third, engines, _ = run(case.job(EDITED))
    assert not third.new and third.manifest == second and not engines


def test_stored_samples_come_first_and_new_ones_in_the_order_of_the_input(case: Case) -> None:
    case.extract(ROWS)
    case.extract([50, *reversed(EDITED), 51])
    order = [int(item["input_ids"][0]) - 2 for item in HiddenStatesDataset(case.root.url)]
    stored = [n for n in ROWS if n in EDITED]
    assert order == [*stored, 50, 42, 41, 40, 51]


def test_a_record_that_refers_says_so(case: Case) -> None:
    first, _ = case.extract(ROWS)
    second, _ = case.extract(EDITED)
    base = {(r.shard, r.round): r for r in records(case.root, first.fingerprint)}
    refers = [record for record in records(case.root, second.fingerprint) if record.source is not None]
    assert len(refers) == second.provenance["reused"]["shards"]
    for record in refers:
        assert record.source is not None
        old = base[record.source.shard, record.source.round]
        assert record.source == ShardSource(
            fingerprint=first.fingerprint, shard=old.shard, round=0, sha256=str(old.sha256)
        )
        assert (record.object, record.rows, record.nbytes, record.engine) == (
            old.object,
            old.rows,
            old.nbytes,
            old.engine,
        )
        assert record.timings == {} and record.attempt != old.attempt
        by_id = {sample.sample_id: sample for sample in old.samples}
        assert all(by_id[sample.sample_id] == sample for sample in record.samples)
    with pytest.raises(ValueError, match="refers to shard"):
        CommitRecord.model_validate(
            {**record.model_dump(), "source": {**record.source.model_dump(), "sha256": "0" * 64}}
        )


@pytest.mark.parametrize("rows", [ROWS[:-5], list(reversed(ROWS)), ROWS[5:]])
def test_no_engine_starts_where_everything_is_stored(case: Case, rows: list[int]) -> None:
    case.extract(ROWS)
    result, engines, notes = run(case.job(rows))
    assert not engines and result.new and result.manifest.version == 2 and result.shards == 0
    assert f"{len(rows)} samples are stored already" in notes
    assert result.manifest.timings["tokens_per_s"] == 0
    case.sound(rows, 2)


def test_version_after_version(case: Case) -> None:
    """A plan that refers to shards is itself a base; so is what it refers to."""
    rows = list(ROWS)
    case.extract(rows)
    for step in range(1, 5):
        rows = [*rows[2:], 60 + step]
        manifest, asked_for = case.extract(rows)
        assert flat(asked_for) == [60 + step]
        case.sound(rows, manifest.version)
    assert list_versions(case.root) == [1, 2, 3, 4, 5]


def test_encoded_shards(tmp_path: Path) -> None:
    case = Case(tmp_path, store__dtype="bfloat16", store__encoding="bf16-split-zstd")
    case.extract(ROWS)
    _, asked_for = case.extract(EDITED)
    assert flat(asked_for) == [40, 41, 42]
    case.sound(EDITED, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": [1, 2, 4]},
        {"store__dtype": "float16"},
        {"engine__enforce_eager": True},
        {"engine__max_num_batched_tokens": 512},
        {"chat__max_length": 100},
    ],
)
def test_other_values_are_extracted_anew_and_the_old_ones_are_found_again(case: Case, change: dict[str, Any]) -> None:
    case.extract(ROWS)
    _, asked_for = case.extract(EDITED, allow_change=True, **change)
    assert flat(asked_for) == sorted(EDITED)
    _, asked_for = case.extract([*ROWS, 70], allow_change=True)
    assert flat(asked_for) == [70], "the newest version with the same values is the first"


def test_another_shard_size_changes_no_values(case: Case) -> None:
    case.extract(ROWS)
    second, asked_for = case.extract(EDITED, store__shard_bytes="40KiB")
    assert flat(asked_for) == [40, 41, 42] and second.version == 2
    case.sound(EDITED, 2)


def test_it_can_be_switched_off(case: Case) -> None:
    case.extract(ROWS)
    with_it = prepare(case.job(EDITED, root="elsewhere")).plan.fingerprint
    second, asked_for = case.extract(EDITED, store__reuse=False)
    assert flat(asked_for) == sorted(EDITED) and second.fingerprint == with_it


def test_a_model_that_encodes_positions_by_the_longest_sample(case: Case) -> None:
    config = case.folder / "model" / "config.json"
    tree = json.loads(config.read_text())
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
    tree |= {"rope_scaling": scaling, "original_max_position_embeddings": 64}
    config.write_text(json.dumps(tree))
    case.extract(ROWS)
    _, engines, notes = run(case.job(EDITED))
    assert flat(asked(engines)) == sorted(EDITED) and "encodes positions by the longest sample" in notes
    case.extract(ROWS, chat__max_length=100, allow_change=True)
    _, asked_for = case.extract(EDITED, chat__max_length=100)
    assert flat(asked_for) == [40, 41, 42], "its positions follow from the job"


def test_what_was_left_out_is_tried_in_the_new_plan(case: Case) -> None:
    job = prepare(case.job(ROWS))
    bad = rows_kit.ids(job, 1)[0]
    first, _, _ = run(case.job(ROWS), spoil={bad})
    assert first.manifest.accounting.quarantined
    second, engines, _ = run(case.job([*ROWS, 40]))
    assert len(flat(asked(engines))) == 2 and bad in requested(engines)[0]
    assert not second.manifest.accounting.quarantined
    _, engines, _ = run(case.job(ROWS[1:]))
    assert not engines
    case.sound(ROWS[1:], 3)


def test_a_retried_sample_is_found_in_its_own_round(case: Case) -> None:
    job = prepare(case.job(ROWS))
    bad = rows_kit.ids(job, 1)[0]
    run(case.job(ROWS), spoil={bad})
    run(case.job(ROWS))
    third, asked_for = case.extract([*ROWS, 40])
    assert flat(asked_for) == [40] and third.version == 3
    assert {r.source.round for r in records(case.root, third.fingerprint) if r.source} == {0, 1}
    case.sound([*ROWS, 40], 3)


# -- runs that were interrupted --------------------------------------------------------------------------------------


def test_an_interrupted_run_is_worth_something(case: Case) -> None:
    job = case.interrupted(ROWS, 2)
    done = {s.sample_id for c in read_commits(job.root, job.plan.fingerprint).values() for s in c.samples}
    assert done
    first, asked_for = case.extract(EDITED)
    assert first.version == 1 and len(flat(asked_for)) == len(EDITED) - first.provenance["reused"]["samples"]
    assert 0 < first.provenance["reused"]["samples"] <= len(done)
    case.sound(EDITED, 1)


def test_the_last_version_and_an_interrupted_run_together(case: Case) -> None:
    case.extract(ROWS)
    more = [*ROWS, *range(80, 100)]
    unfinished = case.interrupted(more, 2)
    done = sum(len(c.samples) for c in read_commits(case.root, unfinished.plan.fingerprint).values())
    rows = [*more[1:], 120]
    second, asked_for = case.extract(rows)
    assert len(flat(asked_for)) == len(rows) - second.provenance["reused"]["samples"] < 20
    assert second.provenance["reused"]["samples"] == done - 1, "all that either holds, once"
    assert set(second.provenance["reused"]["fingerprints"]) == {
        read_manifest(case.root, 1).fingerprint,
        unfinished.plan.fingerprint,
    }
    case.sound(rows, 2)


def test_killed_between_two_records(case: Case) -> None:
    case.extract(ROWS)
    settings = case.job(EDITED)
    job = prepare(settings)
    assert records(case.root, job.plan.fingerprint) == []
    with pytest.MonkeyPatch.context() as patch:
        plain, left = Root.create_exclusive, iter([True, True])

        def create(root: Root, rel: str, data: bytes) -> None:
            if "/commits/" in rel and not next(left, False):
                raise KeyboardInterrupt
            plain(root, rel, data)

        patch.setattr(Root, "create_exclusive", create)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    assert len(records(case.root, job.plan.fingerprint)) == 2
    _, asked_for = case.extract(EDITED)
    assert flat(asked_for) == [40, 41, 42]
    case.sound(EDITED, 2)


# -- what is gone ----------------------------------------------------------------------------------------------------


def object_of(root: Root, fingerprint: str, shard: int) -> Path:
    record = read_commits(root, fingerprint)[shard].records[0]
    path = root.local_path(record.object or "")
    assert path is not None
    return path


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("what", ["object", "cut", "record", "damaged record"])
def test_a_base_that_is_gone_is_extracted(case: Case, when: str, what: str) -> None:
    first, _ = case.extract(ROWS)
    if when == "between":
        prepare(case.job(EDITED))
    victim = object_of(case.root, first.fingerprint, 1)
    held = len(read_commits(case.root, first.fingerprint)[1].samples)
    record = case.root.local_path(layout.commit_path(first.fingerprint, 1))
    assert record is not None
    victim.chmod(0o644)
    if what == "object":
        victim.unlink()
    elif what == "cut":
        victim.write_bytes(victim.read_bytes()[:-8])
    elif what == "record":
        record.unlink()
    else:
        record.chmod(0o644)
        record.write_bytes(record.read_bytes().replace(b'"rows":', b'"Rows":', 1))
    _, engines, notes = run(case.job(EDITED))
    assert {40, 41, 42} < set(flat(asked(engines))) and 4 <= len(flat(asked(engines))) <= 3 + held
    assert ("shards were to refer to is gone" in notes) == (when == "between")
    case.sound(EDITED, 2)


def test_a_base_record_that_lost_a_sample_is_not_referred_to(case: Case) -> None:
    first, _ = case.extract(ROWS)
    prepare(case.job(EDITED))
    record = read_commits(case.root, first.fingerprint)[0].records[0]  # begins with row 0, which stays
    less = CommitRecord.model_validate({**record.model_dump(), "samples": record.model_dump()["samples"][1:]})
    path = layout.commit_path(first.fingerprint, 0)
    case.root.delete(path)
    case.root.create_exclusive(path, less.dump())
    _, asked_for = case.extract(EDITED)
    assert len(flat(asked_for)) > 3
    case.sound(EDITED, 2)


def test_a_file_that_several_plans_name_is_lost(case: Case) -> None:
    """Each job makes its own samples again."""
    first, _ = case.extract(ROWS)
    second, _ = case.extract(EDITED)
    victim = next(record for record in records(case.root, second.fingerprint) if record.source is not None)
    path = case.root.local_path(victim.object or "")
    assert path is not None
    path.unlink()
    third, engines, _ = run(case.job(EDITED))
    assert requested(engines) == [[sample.sample_id for sample in victim.samples]]
    assert third.new and third.manifest.version == 3
    (made,) = [r for r in records(case.root, second.fingerprint) if r.shard == victim.shard]
    assert made.source is None and made.object != victim.object
    case.sound(EDITED, 3)
    assert not verify(case.root, 1).ok
    _, engines, _ = run(case.job(ROWS))
    assert len(flat(asked(engines))) == len(
        next(r for r in records(case.root, first.fingerprint) if r.sha256 == victim.sha256).samples
    )
    case.sound(ROWS, 1)


def test_repair_does_not_refer_to_rotten_bytes(case: Case) -> None:
    first, _ = case.extract(ROWS)
    prepare(case.job(EDITED))
    victim = object_of(case.root, first.fingerprint, 1)
    data = bytearray(victim.read_bytes())
    data[-50] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(data)
    _, engines, notes = run(case.job(EDITED), repair=True)
    assert len(flat(asked(engines))) > 3 and "shards were to refer to is gone or damaged" in notes
    case.sound(EDITED, 2)


def test_repair_of_a_rotten_file_that_is_referred_to(case: Case) -> None:
    case.extract(ROWS)
    second, _ = case.extract(EDITED)
    victim = next(record for record in records(case.root, second.fingerprint) if record.source is not None)
    path = case.root.local_path(victim.object or "")
    assert path is not None
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    third, engines, _ = run(case.job(EDITED), repair=True)
    assert requested(engines) == [[sample.sample_id for sample in victim.samples]] and third.new
    case.sound(EDITED, 3)


# -- planning --------------------------------------------------------------------------------------------------------


def test_planning_writes_no_commit_record_and_says_what_there_is_to_do(case: Case) -> None:
    case.extract(ROWS)
    case.job(EDITED)

    def printed(*words: str) -> str:
        done = CliRunner().invoke(app, ["plan", str(case.folder / "job.yaml"), *words])
        assert done.exit_code == 0, done.output
        return " ".join(done.stdout.split())

    document = json.loads(printed("--json"))
    new = sum(len(tokens(n)) for n in (40, 41, 42))
    assert (document["reused"]["samples"], document["to_extract"]["samples"]) == (21, 3)
    assert document["to_extract"]["tokens"] == document["estimate"]["tokens"] == new
    assert document["bytes"] < document["tokens"] * document["row_bytes"]
    assert records(case.root, document["fingerprint"]) == []
    assert f"to be extracted: 3 samples, {new} tokens" in printed()
    case.job(ROWS[1:])
    assert "Everything is stored already" in printed()
    run(case.job(EDITED))
    text = CliRunner().invoke(app, ["inspect", case.root.url]).stdout
    assert f"3 samples ({new} tokens) extracted, 21 samples" in " ".join(text.split())
    status = json.loads(CliRunner().invoke(app, ["status", case.root.url, "--json"]).stdout)
    (plan,) = [plan for plan in status["plans"] if plan["published_versions"] == [2]]
    assert plan["rows_committed"] == plan["tokens"] and plan["rows_referred_to"] == plan["tokens"] - new
    assert plan["tokens_per_s"] == new / read_manifest(case.root, 2).timings["engine_s"]


def test_two_that_plan_at_once_on_other_bases(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.extract(ROWS)
    settings = case.job(EDITED)
    monkeypatch.setattr("extract_core.job.find_base", lambda *of: NOTHING)
    winner = prepare(settings)
    assert all(shard.source is None for shard in winner.plan.meta.shards) and not winner.plan.meta.base
    monkeypatch.setattr("extract_core.job.find_base", find_base)
    calls = iter([None])
    monkeypatch.setattr("extract_core.job.load_plan", lambda *arguments: next(calls, load_plan(*arguments)))
    loser = prepare(settings)
    assert loser.plan.meta == winner.plan.meta
    _, asked_for = case.extract(EDITED)
    assert flat(asked_for) == sorted(EDITED)
    age(case.root)
    assert {item.reason for item in collect(case.root, Policy(None, 3600)).items} == {
        "the layout of a run that planned at the same time and lost"
    }
    case.sound(EDITED, 2)


def test_two_that_plan_at_once_on_one_base_must_agree(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.extract(ROWS)
    job = prepare(case.job(EDITED))
    base = find_base(case.root, job.spec)
    assert base.digest == job.plan.meta.base
    with pytest.raises(CorruptDataError, match="two plans of fingerprint .* differ"):
        make_plan(case.root, job.spec, iter([sample(n) for n in EDITED]), shard_bytes=10**9, base=base)


def test_older_plans_are_read_and_are_a_base(case: Case) -> None:
    job = prepare(case.job(ROWS))
    for schema in (1, 2, 3):
        rewritten(job, schema)
        plan = load_plan(job.root, job.plan.fingerprint)
        assert plan is not None and plan.meta.schema_version == schema
        now = {name: getattr(job.plan.meta, name) for name in ("schema_version", "computed", "plan_sha256")}
        assert plan.meta.model_copy(update=now) == job.plan.meta
        assert plan.shard(0).equals(job.plan.shard(0))
    case.extract(ROWS)
    _, asked_for = case.extract(EDITED)
    assert flat(asked_for) == [40, 41, 42]


def rewritten(job: Job, schema: int) -> None:
    """The plan as that schema had it."""
    old = io.BytesIO()
    with pq.ParquetWriter(old, plans._OLDER_SCHEMA, compression="zstd") as writer:
        for table in job.plan.shards():
            firsts = [segments[0]["first_row"] for segments in table["segments"].to_pylist()]
            columns = [firsts if name == "first_row" else table[name] for name in plans._OLDER_SCHEMA.names]
            writer.write_table(pa.table(columns, plans._OLDER_SCHEMA))
    tree = json.loads(job.plan.meta.model_dump_json())
    tree |= {"schema_version": schema, "plan_sha256": hashlib.sha256(old.getvalue()).hexdigest()}
    job.root.put_bytes(layout.plan_path(job.plan.fingerprint, tree["plan_sha256"]), old.getvalue())
    del tree["rows"], tree["computed"]
    if schema < 3:
        del tree["base"]
        for shard in tree["shards"]:
            del shard["source"]
    if schema > 1:
        tree[CHECKSUM] = canonical_digest(tree)
    job.root.put_bytes(layout.plan_meta_path(job.plan.fingerprint), json.dumps(tree).encode())


@pytest.mark.parametrize("gone", [False, True])
def test_a_damaged_plan_is_made_again_around_its_commit_records(case: Case, gone: bool) -> None:
    """Also where the plan that it referred to is not there any more."""
    case.extract(ROWS)
    second, _ = case.extract(EDITED)
    if gone:
        age(case.root)
        collect(case.root, Policy(1, 3600))
        assert list_versions(case.root) == [2]
    before = load_plan(case.root, second.fingerprint)
    assert before is not None
    case.root.put_bytes(layout.plan_meta_path(second.fingerprint), b"{")
    result, engines, _ = run(case.job(EDITED), repair=True)
    assert not engines and result.manifest == second
    again = load_plan(case.root, second.fingerprint)
    assert again is not None
    assert again.sample_ids() == before.sample_ids() and again.meta.shards == before.meta.shards
    case.sound(EDITED, 2)


@pytest.mark.parametrize("kept", [(1,), (2, 4), (0, 3), (5,)])
def test_a_plan_that_is_made_again_has_no_gaps(case: Case, kept: tuple[int, ...]) -> None:
    """Commit records of some shards, whatever the others are now."""
    case.extract(ROWS)
    second, _ = case.extract(EDITED)
    for record in records(case.root, second.fingerprint):
        if record.shard not in kept:
            case.root.delete(layout.commit_path(second.fingerprint, record.shard))
    case.root.delete(layout.plan_meta_path(second.fingerprint))
    case.root.delete(layout.manifest_path(2))
    case.root.delete(layout.LATEST)
    second, asked_for = case.extract(EDITED)
    assert set(flat(asked_for)) <= {40, 41, 42}
    case.sound(EDITED, 2)


# -- gc --------------------------------------------------------------------------------------------------------------


def test_gc_between_planning_and_the_run_takes_nothing_that_is_needed(case: Case) -> None:
    first, _ = case.extract(ROWS)
    case.extract(ROWS, layers=[1, 2, 4], allow_change=True)
    job = prepare(case.job(EDITED, allow_change=True))
    age(case.root)
    report = collect(case.root, Policy(1, 3600))
    assert list_versions(case.root) == [2], "version 1 goes, its plan and shards stay"
    assert any(f"unfinished plan {job.plan.fingerprint} refers to its shards" in text for text in report.kept)
    assert not report.of("shard") and not report.of("plan")
    _, asked_for = case.extract(EDITED, allow_change=True)
    assert flat(asked_for) == [40, 41, 42]
    case.sound(EDITED, 3)

    age(case.root)
    report = collect(case.root, Policy(1, 3600))
    assert {item.path for item in report.of("plan")} >= {f"plans/{first.fingerprint}"}
    assert report.of("shard")
    case.sound(EDITED, 3)


def test_gc_keeps_what_a_plan_names_even_where_the_base_plan_was_removed(case: Case) -> None:
    first, _ = case.extract(ROWS)
    prepare(case.job(EDITED))
    for record in records(case.root, first.fingerprint):
        case.root.delete(layout.commit_path(first.fingerprint, record.shard))
    case.root.delete(layout.manifest_path(1))
    age(case.root)
    report = collect(case.root, Policy(None, 3600))
    assert not {shard.path for shard in first.shards} & {item.path for item in report.of("shard")}
    manifest, asked_for = case.extract(EDITED)
    assert flat(asked_for) == sorted(EDITED)
    case.sound(EDITED, manifest.version)


def test_a_plan_that_gc_is_removing_is_no_base(case: Case) -> None:
    job = case.interrupted(ROWS, 2)
    case.root.put_bytes(layout.retired_path(job.plan.fingerprint), b"{}")
    _, asked_for = case.extract(EDITED)
    assert flat(asked_for) == sorted(EDITED)


def test_gc_removes_what_only_the_old_version_needs(case: Case) -> None:
    first, _ = case.extract(ROWS)
    rows = ROWS[12:]
    case.extract(rows)
    age(case.root)
    report = collect(case.root, Policy(1, 3600))
    assert 0 < len(report.of("shard")) < len(first.shards)
    case.sound(rows, 2)
    _, asked_for = case.extract(ROWS)
    assert flat(asked_for) == ROWS[:12], "also those whose file is still there: no plan names them"
    case.sound(ROWS, 3)


# -- every edit ------------------------------------------------------------------------------------------------------


def sample(n: int) -> Sample:
    ids = np.array(tokens(n), np.int32)
    return Sample(f"{n:032x}", ids, np.ones(len(ids), np.uint8), Source("data", n, None), "train", "given", False)


SPEC = JobSpec({"model": {"name": "m"}, "inputs": {}, "layout": {"row_bytes": 8, "shard_bytes": 1}})
SOURCES = tuple(ShardSource(fingerprint="ab" * 16, shard=n, sha256=f"{n:064x}") for n in range(4))


@st.composite
def edits(draw: st.DrawFn) -> tuple[list[int], dict[int, int], dict[int, int]]:
    """Rows; the stored file of some, in any order; the pinned shard of some."""
    rows = draw(st.lists(st.integers(0, 60), min_size=1, max_size=40))
    stored = draw(st.dictionaries(st.integers(0, 60), st.integers(0, 3), max_size=40))
    distinct = list(dict.fromkeys(rows))
    pinned = draw(st.dictionaries(st.sampled_from(distinct), st.integers(0, 3), max_size=5))
    free = len(distinct) - len(pinned)
    while pinned and max(pinned.values()) + 1 - len(set(pinned.values())) > free:
        del pinned[max(pinned, key=lambda row: pinned[row])]
        free += 1
    return rows, stored, pinned


@given(made=edits(), shard_rows=st.integers(1, 200), share=st.booleans())
@examples(deadline=None)
def test_every_sample_has_one_place_whatever_is_stored(
    made: tuple[list[int], dict[int, int], dict[int, int]],
    shard_rows: int,
    share: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rows, stored, pinned = made
    root = Root.open(str(tmp_path_factory.mktemp("root")))
    base = Base(SOURCES, {sample(n).sample_id: (file, 1000 - n) for n, file in stored.items()}, "x")
    pins = Pins(dict.fromkeys(pinned.values()), {sample(n).sample_id: (shard, 0) for n, shard in pinned.items()})
    spec = JobSpec({**SPEC.document, "layout": {**SPEC.document["layout"], "share_prefixes": share}})
    plan = make_plan(root, spec, map(sample, rows), shard_bytes=8 * shard_rows, base=base, pinned=pins)
    seen: dict[str, int] = {}
    for shard, table in zip(plan.meta.shards, plan.shards(), strict=True):
        assert table.schema.equals(PLAN_SCHEMA)
        at = 0
        for row in table.to_pylist():
            assert row["segments"] == [{"first_row": at, "rows": row["n_tokens"]}], "no prefix of 16 is shared here"
            assert row["shard"] == shard.index and row["sample_id"] not in seen
            seen[row["sample_id"]] = shard.index
            number = int(row["sample_id"], 16)
            assert row["token_ids"] == tokens(number) and row["source_row"] == number
            if number not in pinned:
                assert shard.source == (SOURCES[stored[number]] if number in stored else None)
            at += row["n_tokens"]
        assert (at, table.num_rows) == (shard.rows, shard.samples)
        if shard.source is not None:
            names = [int(name, 16) for name in table["sample_id"].to_pylist()]
            assert names == sorted(names, reverse=True), "as in the stored file"
    assert seen.keys() == {sample(n).sample_id for n in rows}
    assert all(seen[sample(n).sample_id] == shard for n, shard in pinned.items())
    assert plan.meta.tokens == sum(shard.rows for shard in plan.meta.shards)
    assert plan.meta.duplicates == len(rows) - len(set(rows))


def test_records_of_more_shards_than_samples_are_refused(tmp_path: Path) -> None:
    pins = Pins({7: None}, {sample(1).sample_id: (7, 0)})
    with pytest.raises(CorruptDataError, match="commit records of more shards than the data has samples for"):
        make_plan(Root.open(str(tmp_path)), SPEC, map(sample, [1, 2]), shard_bytes=100, pinned=pins)


def test_many_tokens_go_through_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extract_core.planning.samples._BUFFER", 100)
    base = Base(SOURCES, {sample(n).sample_id: (n % 4, n) for n in range(0, 60, 2)}, "x")
    plan = make_plan(Root.open(str(tmp_path)), SPEC, map(sample, range(60)), shard_bytes=8 * 100, base=base)
    names = [int(name, 16) for ids in plan.sample_ids().values() for name in ids]
    assert sorted(names) == list(range(60)) and names[-30:] == list(range(1, 60, 2))
    assert FREE.places == {}
