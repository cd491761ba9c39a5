"""Layer ids, layout and the plan as a pure function of its inputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from extract_core.engine.compat import refuse_extra
from extract_core.errors import CorruptDataError, EngineIncompatibleError, LayerIdError
from extract_core.job import Job, prepare
from extract_core.planning import plan as planning
from extract_core.planning.layers import default_layer_ids, eagle3_layer_ids, resolve_layer_ids
from extract_core.planning.model import file_sha256
from extract_core.store import layout

from .cli import kit


def test_default_layers_are_eagle3s() -> None:
    assert default_layer_ids(30) == (2, 15, 27, 30)
    assert default_layer_ids(32) == (2, 16, 29, 32)
    assert default_layer_ids(4) == (1, 2, 4)
    assert default_layer_ids(1) == (1,)
    assert (eagle3_layer_ids(30), eagle3_layer_ids(2), eagle3_layer_ids(1)) == ((2, 15, 27), (1, 2), ())


@pytest.mark.parametrize(
    ("entries", "n", "message"),
    [
        ((0, 31), 30, r"\[31\] out of range; this model has 30 blocks, so ids go from 0 .* or from -1 \(= 30\) down"),
        ((-31, -32), 30, r"\[-32\] out of range; .* down to -31 \(= 0\)$"),
        (
            (4, -1),
            4,
            r"more than once: 4 and -1 both name 4 \(this model has 4 blocks, ids 0 to 4\); give every id once",
        ),
        (("all", "last"), 4, r"more than once: all and last both name 4 "),
        ((15, "eagle3"), 30, r"15 and eagle3 both name 15 "),
        (("eagle3", "last"), 2, r"eagle3 and last both name 2 "),
        (("all", "every:1"), 30, r"both name 3 and 27 more \("),
        (("every:31",), 30, r"every:31 is more than the 30 blocks of this model"),
        (("eagle3",), 1, r"eagle3 needs a model of at least 2 blocks, this has 1"),
        (("middle",), 30, r"'middle' is no layer; possible are ids, eagle3, last, all and every:K"),
    ],
)
def test_layer_ids_that_cannot_be(entries: tuple[int | str, ...], n: int, message: str) -> None:
    with pytest.raises(LayerIdError, match=message):
        resolve_layer_ids(entries, n)


@pytest.mark.parametrize(
    ("entries", "n", "ids"),
    [
        (None, 30, (2, 15, 27, 30)),
        ((30, 0, 7), 30, (0, 7, 30)),
        ((-1, -31, -2), 30, (0, 29, 30)),
        (("eagle3",), 32, (2, 16, 29)),
        (("last", "eagle3"), 32, (2, 16, 29, 32)),
        (("eagle3", -1), 32, (2, 16, 29, 32)),
        (("eagle3",), 4, (1, 2)),
        (("all",), 3, (0, 1, 2, 3)),
        (("every:4",), 12, (0, 4, 8, 12)),
        (("every:4",), 15, (0, 4, 8, 12)),
        (("every:4", "last", 1), 15, (0, 1, 4, 8, 12, 15)),
        (("every:30",), 30, (0, 30)),
    ],
)
def test_layer_ids_resolve_and_ascend(entries: tuple[int | str, ...] | None, n: int, ids: tuple[int, ...]) -> None:
    assert resolve_layer_ids(entries, n) == ids


@pytest.fixture
def job(tmp_path: Path) -> Job:
    kit.make_model(tmp_path / "model")
    kit.make_chats(tmp_path / "chats.jsonl", 12)
    return prepare(kit.settings(kit.write_job(tmp_path / "job.yaml", store__shard_bytes="10KiB")))


def test_every_row_has_one_place(job: Job) -> None:
    meta = job.plan.meta
    assert len(meta.shards) > 2
    seen = []
    for shard in meta.shards:
        table = job.plan.shard(shard.index).to_pylist()
        places: dict[int, tuple[int, ...]] = {}
        for row in table:
            assert row["shard"] == shard.index
            assert len(row["token_ids"]) == len(row["loss_mask"]) == row["n_tokens"]
            rows = [n for run in row["segments"] for n in range(run["first_row"], run["first_row"] + run["rows"])]
            assert len(rows) == row["n_tokens"]
            for position, place in enumerate(rows):
                prefix = tuple(row["token_ids"][: position + 1])
                assert places.setdefault(place, prefix) == prefix
        assert sorted(places) == list(range(shard.rows))
        assert len(table) == shard.samples
        assert len(table) == 1 or shard.rows * meta.row_bytes <= 10 * 2**10
        seen += [row["sample_id"] for row in table]
    assert len(set(seen)) == len(seen) == meta.samples == 12
    assert sum(shard.rows for shard in meta.shards) == meta.rows <= meta.tokens and meta.rows <= meta.computed
    assert meta.input == meta.samples + meta.duplicates + sum(meta.dropped.values())
    assert job.plan.sample_ids() == {s.index: job.plan.shard(s.index)["sample_id"].to_pylist() for s in meta.shards}


def test_planning_again_gives_the_same_plan_elsewhere(job: Job, tmp_path: Path) -> None:
    again = prepare(job.settings.model_copy(update={"root": str(tmp_path / "other")}))
    assert again.plan.meta == job.plan.meta


def test_two_runs_that_plan_at_once_do_not_harm_each_other(job: Job, tmp_path: Path, monkeypatch) -> None:
    """Same content under another path: other bytes in the plan's file, the same plan."""
    shutil.copytree(tmp_path / "dataset", tmp_path / "race")
    plan_json = tmp_path / "race" / layout.plan_meta_path(job.plan.fingerprint)
    before = plan_json.read_bytes()
    elsewhere = tmp_path / "mount"
    elsewhere.mkdir()
    shutil.copy(tmp_path / "chats.jsonl", elsewhere)
    settings = job.settings.model_copy(
        update={
            "root": str(tmp_path / "race"),
            "data": job.settings.data.model_copy(update={"path": str(elsewhere / "chats.jsonl")}),
        }
    )
    real = planning.load_plan
    calls = iter([None])
    # The second run looks before the first has written plan.json, and writes after it.
    monkeypatch.setattr("extract_core.job.load_plan", lambda *arguments: next(calls, real(*arguments)))
    late = prepare(settings)
    assert plan_json.read_bytes() == before
    assert late.plan.meta == job.plan.meta
    assert late.plan.shard(0).num_rows == job.plan.meta.shards[0].samples


def test_a_damaged_plan_is_refused(job: Job) -> None:
    path = job.root.local_path(layout.plan_path(job.plan.fingerprint, job.plan.meta.plan_sha256))
    assert path is not None
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match="run the job with --repair: it is planned again"):
        prepare(job.settings)


def test_duplicates_are_merged_and_named(tmp_path: Path) -> None:
    kit.make_model(tmp_path / "model")
    chats = kit.make_chats(tmp_path / "chats.jsonl", 3)
    chats.write_text(chats.read_text() * 2 + "not json\n")
    job = prepare(kit.settings(kit.write_job(tmp_path / "job.yaml")))
    meta = job.plan.meta
    assert (meta.input, meta.samples, meta.duplicates, meta.dropped) == (7, 3, 3, {"not_json": 1})
    lines = job.root.read_bytes(layout.dropped_path(job.plan.fingerprint)).decode().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [(entry["row"], entry["reason"]) for entry in entries] == [
        (4, "duplicate"),
        (5, "duplicate"),
        (6, "duplicate"),
        (7, "not_json"),
    ]


def test_a_digest_is_right_without_a_cache_or_with_a_broken_one(tmp_path: Path, monkeypatch) -> None:
    big = tmp_path / "weights"
    big.write_bytes(b"x" * (2**20 + 1))
    cache = tmp_path / "cache"
    monkeypatch.setattr("extract_core.planning.model._cache_folder", lambda: cache)
    first = file_sha256(big)
    assert file_sha256(big) == first
    [entry] = cache.iterdir()
    entry.write_text("")
    assert file_sha256(big) == first
    monkeypatch.setattr("extract_core.planning.model._cache_folder", lambda: Path("/proc/nothing/here"))
    assert file_sha256(big) == first


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_model_len": 5}, "max_model_len is set by engine.max_model_len"),
        ({"dtype": "float16"}, "dtype is set by model.dtype"),
        ({"speculative_config": {}}, "speculative_config is not possible: a step would have rows"),
        ({"pipeline_parallel_size": 2}, "only the last stage returns hidden states"),
    ],
)
def test_engine_arguments_that_would_make_rows_wrong_are_refused(extra: dict[str, object], message: str) -> None:
    with pytest.raises(EngineIncompatibleError, match=message):
        refuse_extra(extra)
