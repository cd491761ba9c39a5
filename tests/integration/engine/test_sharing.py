"""Shared prefixes in a real engine: computed once, stored once, and the rows are those of every sample alone."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extract_core import local
from extract_core.engine.protocol import EngineSpec, JobSample, ShardDone, ShardJob, laid_out
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.planning.prefixes import lay_out, trie_order
from extract_core.reader import HiddenStatesDataset
from extract_core.settings import load_job
from extract_core.store.root import Root
from extract_core.store.unsealed import UnsealedShard
from extract_core.store.verify import verify
from tests import tiny

from . import saboteur

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 32
"""The least that this vLLM's attention takes on the CPU; on a GPU it is 16, which layouts count with."""
WORKER = {"worker_cls": "tests.integration.engine.saboteur.Saboteur", "block_size": BLOCK}
TOLERANCE = 1e-4


def spec(model: Path, **changes: Any) -> EngineSpec:
    base = {
        "model": str(model),
        "layer_ids": [1, 2, 4],
        "max_model_len": 500,
        "dtype": "float32",
        "store_dtype": "float32",
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "kv_cache_bytes": 2**28,
        "extra": WORKER,
    }
    return EngineSpec(**{**base, **changes})


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSupervisor]:
    with EngineSupervisor(
        spec(tiny_model), tmp_path_factory.mktemp("logs"), start_timeout_s=250, step_timeout_s=60
    ) as running:
        yield running


class Found:
    """What a shard job gave: rows ``[N, L, H]`` and echoed tokens of each sample."""

    def __init__(self, engine: EngineSupervisor, folder: Path, samples: list[JobSample], rows: int, **options: Any):
        attempt = uuid.uuid4().hex
        path = folder / f"{attempt}.tmp"
        self.progress: list[int] = []
        self.done: ShardDone = engine.extract(
            ShardJob(attempt, str(path), rows, samples, **options), lambda told: self.progress.append(told.tokens)
        )
        with UnsealedShard(path) as shard:
            read = [shard.sample(s.segments) for s in samples]
        self.rows = [rows.float().numpy() for rows, _ in read]
        for sample, (_, echo) in zip(samples, read, strict=True):
            assert echo.numpy().tobytes() == sample.token_ids
        path.unlink()

    @property
    def counters(self) -> dict[str, float]:
        return self.done.counters


def extract(
    engine: EngineSupervisor, folder: Path, sequences: list[np.ndarray], *, share: bool, **options: Any
) -> Found:
    samples, rows = laid_out(sequences, "s", share=share)
    found = Found(engine, folder, samples, rows, **options)
    assert found.counters["rows"] == rows and found.progress[-1] == rows
    return found


def tokens(random: np.random.Generator, count: int) -> np.ndarray:
    return random.integers(0, 256, count, dtype=np.int32)


def conversations(seed: int, count: int = 6) -> list[np.ndarray]:
    """One sample per turn of conversations under one system prompt, and answers to one prompt."""
    random = np.random.default_rng(seed)
    system = tokens(random, 50)
    samples = []
    for _ in range(count):
        chat = system
        for _ in range(int(random.integers(1, 5))):
            chat = np.concatenate([chat, tokens(random, int(random.integers(5, 80)))])
            samples.append(chat)
    prompt = tokens(random, 130)
    samples += [np.concatenate([prompt, tokens(random, int(random.integers(1, 60)))]) for _ in range(5)]
    samples += [prompt[:64], prompt[:64].copy(), tokens(random, 7)]
    return samples


def compare(shared: Found, alone: Found) -> None:
    for ours, theirs in zip(shared.rows, alone.rows, strict=True):
        error = np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
        assert error.max() < TOLERANCE
    assert shared.done.greedy == alone.done.greedy
    assert shared.done.top1 == alone.done.top1 == shared.done.greedy


def computed(sequences: list[np.ndarray]) -> int:
    """Tokens to compute one sample after the other, with blocks of this engine's size."""
    lengths = np.array([len(ids) for ids in sequences])
    order, same = trie_order(np.concatenate(sequences), np.cumsum(lengths) - lengths, lengths)
    return int((lengths[order] - np.minimum(same, lengths[order] - 1) // BLOCK * BLOCK).sum())


def in_order(sequences: list[np.ndarray]) -> list[np.ndarray]:
    """As a plan has them."""
    return [np.array(ids, dtype=np.int32) for ids in sorted(map(tuple, sequences))]


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_every_sample_alone(engine: EngineSupervisor, tmp_path: Path, seed: int) -> None:
    sequences = in_order(conversations(seed))
    planned = lay_out(sequences, share=True)
    total = sum(map(len, sequences))
    assert planned.rows < 0.6 * total
    alone = extract(engine, tmp_path, sequences, share=False)
    shared = extract(engine, tmp_path, sequences, share=True)
    compare(shared, alone)
    assert alone.counters["computed"] == alone.counters["tokens"] == total
    assert shared.counters["tokens"] == total
    assert shared.counters["computed"] == pytest.approx(computed(sequences), rel=0.05)
    assert shared.counters["samples_again"] == 0


def test_in_any_order_and_alone(engine: EngineSupervisor, tmp_path: Path) -> None:
    sequences = conversations(7)
    np.random.default_rng(0).shuffle(sequences)
    alone = extract(engine, tmp_path, sequences, share=False)
    compare(extract(engine, tmp_path, sequences, share=True), alone)
    compare(extract(engine, tmp_path, sequences, share=True, solo=[f"s{n}" for n in range(5)]), alone)
    compare(extract(engine, tmp_path, sequences, share=True, chunk=48), alone)


def test_rows_that_the_cache_took_away_are_computed_after_all(engine: EngineSupervisor, tmp_path: Path) -> None:
    """Two samples share their rows, a third begins with the same tokens but has rows of its own for them."""
    random = np.random.default_rng(3)
    prompt = tokens(random, 96)
    sequences = [prompt, np.concatenate([prompt, tokens(random, 30)]), np.concatenate([prompt, tokens(random, 20)])]
    samples, rows = laid_out(sequences[:2], "s", share=True)
    samples.append(JobSample("s2", [(rows, 116)], sequences[2].tobytes()))
    found = Found(engine, tmp_path, samples, rows + 116)
    assert found.counters["samples_again"] == 1
    compare(found, extract(engine, tmp_path, sequences, share=False))


def test_a_refused_sample_leaves_the_others_whole(engine: EngineSupervisor, tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    prompt = tokens(random, 64)
    sequences = [np.concatenate([prompt, tokens(random, 20)]) for _ in range(3)]
    sequences[1][-1] = 600  # beyond the vocabulary
    samples, rows = laid_out(sequences, "s", share=True)
    found = Found(engine, tmp_path, samples[:1] + samples[2:], rows)
    assert set(found.done.greedy) == {"s0", "s2"}
    job = ShardJob(uuid.uuid4().hex, str(tmp_path / "refused.tmp"), rows, samples)
    done = engine.extract(job, lambda told: None)
    assert set(done.refused) == {"s1"} and set(done.greedy) == {"s0", "s2"}
    alone = extract(engine, tmp_path, [sequences[0], sequences[2]], share=False)
    for ours, theirs in zip(found.rows, alone.rows, strict=True):
        assert np.abs(ours - theirs).max() / np.abs(theirs).max() < TOLERANCE


@pytest.mark.parametrize("blocks", [18, 32])
def test_a_small_cache_evicts_and_preempts(tiny_model: Path, tmp_path: Path, blocks: int) -> None:
    """A token takes 2 * 4 layers * 2 heads * 32 values * 4 bytes; the longest sample must fit."""
    sequences = in_order(conversations(11, count=12))
    small = spec(tiny_model, kv_cache_bytes=blocks * 2 * 4 * 2 * 32 * 4 * BLOCK)
    with EngineSupervisor(small, tmp_path / "logs", start_timeout_s=250, step_timeout_s=60) as running:
        alone = extract(running, tmp_path, sequences, share=False)
        shared = extract(running, tmp_path, sequences, share=True)
        compare(shared, alone)
        shuffled = list(sequences)
        np.random.default_rng(1).shuffle(shuffled)
        extract(running, tmp_path, shuffled, share=True)
    assert shared.counters["computed"] < alone.counters["computed"]


def follow(
    engine: EngineSupervisor, folder: Path, shards: list[list[np.ndarray]], **options: Any
) -> tuple[list[ShardDone], list[list[np.ndarray]], int]:
    """Jobs that are given to the engine one ahead: what each came to, its samples' rows, and the steps of them all."""
    jobs = []
    for number, sequences in enumerate(shards):
        samples, rows = laid_out(sequences, f"{number}-", share=True)
        attempt = uuid.uuid4().hex
        jobs.append(ShardJob(attempt, str(folder / f"{attempt}.tmp"), rows, samples, shard=str(number), **options))
    steps: list[int] = []
    results, found = [], []
    for number, job in enumerate(jobs):
        assert (engine.begun(job.shard) is job) == (number > 0)
        then = jobs[number + 1] if number + 1 < len(jobs) else None
        results.append(engine.extract(job, lambda told: steps.append(told.steps), lambda then=then: then))
        with UnsealedShard(Path(job.path)) as shard:
            found.append([shard.sample(s.segments)[0].float().numpy() for s in job.samples])
    return results, found, steps[-1] - steps[0]


def test_shards_follow_each_other_in_full_steps(engine: EngineSupervisor, tmp_path: Path) -> None:
    """Their rows are those of each shard alone, and no step waits for the end of a shard."""
    random = np.random.default_rng(21)
    shards = [[tokens(random, 100) for _ in range(9)] for _ in range(4)]  # 900 tokens each, steps hold 256
    results, found, steps = follow(engine, tmp_path, shards)
    assert sum(done.counters["steps"] for done in results) > steps  # some hold rows of two shards
    assert steps < 4 * 4
    for sequences, rows, done in zip(shards, found, results, strict=True):
        alone = extract(engine, tmp_path, sequences, share=False)
        assert done.counters["rows"] == 900 and done.counters["rows_again"] == 0
        assert list(done.greedy.values()) == list(alone.done.greedy.values()) == list(done.top1.values())
        for ours, theirs in zip(rows, alone.rows, strict=True):
            assert (np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)).max() < TOLERANCE


def test_a_shard_takes_nothing_from_the_one_before(engine: EngineSupervisor, tmp_path: Path) -> None:
    """Both begin with the same tokens, which each computes and stores for itself."""
    shards = [in_order(conversations(9)), in_order(conversations(9)), in_order(conversations(10))]
    results, found, _ = follow(engine, tmp_path, shards)
    for sequences, rows, done in zip(shards, found, results, strict=True):
        assert done.counters["samples_again"] == 0
        assert done.counters["computed"] == pytest.approx(computed(sequences), rel=0.05)
        assert all(len(ours) == len(ids) for ours, ids in zip(rows, sequences, strict=True))
    for ours, theirs in zip(found[0], found[1], strict=True):
        assert (np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)).max() < TOLERANCE


def test_a_shard_of_other_chunks_or_with_solo_samples_waits(engine: EngineSupervisor, tmp_path: Path) -> None:
    random = np.random.default_rng(22)
    sequences = [tokens(random, 40) for _ in range(4)]
    alone = extract(engine, tmp_path, sequences, share=False)
    samples, rows = laid_out(sequences, "s")
    jobs = [
        ShardJob(uuid.uuid4().hex, str(tmp_path / f"{number}.tmp"), rows, samples, shard=str(number), **options)
        for number, options in enumerate([{}, {"chunk": 16}, {"solo": ["s2", "s0"]}, {}])
    ]
    for job, then in zip(jobs, [*jobs[1:], None], strict=True):
        done = engine.extract(job, lambda told: None, lambda then=then: then)
        assert done.greedy == alone.done.greedy == done.top1
        assert done.counters["rows"] == 160


def write_rows(path: Path, rows: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def job(model: Path, folder: Path, rows: list[list[int]], **sections: Any) -> Path:
    engine = {"kv_cache_bytes": "256MiB", "max_num_batched_tokens": 256, "step_timeout_s": 60, "extra": WORKER}
    chats = write_rows(folder / "rows.jsonl", rows)
    root = folder / sections.pop("root", "root")
    name = folder / f"{root.name}.yaml"
    return tiny.write_job(name, model=model, chats=chats, root=root, engine=engine, **sections)


def test_a_killer_inside_a_family(tiny_model: Path, tmp_path: Path) -> None:
    """It goes, and takes none of the rows that others use; the whole job gives what one without sharing gives."""
    rows = [[int(t) for t in ids] for ids in in_order(conversations(5))]
    killer = [*rows[3], 9, saboteur.DIE_AT_END]
    settings = load_job(job(tiny_model, tmp_path, [*rows, killer], completeness=0.5, store={"shard_bytes": "200KiB"}))
    made = local.run(settings).manifest
    assert made.accounting.quarantined == {"kills_engine": 1} and len(made.shards) > 1
    assert verify(Root.open(str(tmp_path / "root"))).problems == []
    preflight = made.provenance["engines"][0]["preflight"]
    assert preflight["cached_p90"] < 1e-5 and preflight["cached_tokens"] > 0
    store = {"shard_bytes": "200KiB", "share_prefixes": False}
    plain = local.run(load_job(job(tiny_model, tmp_path, rows, root="plain", store=store))).manifest
    assert made.totals.bytes < 0.75 * plain.totals.bytes
    ours, theirs = (
        {item["sample_id"]: item for item in HiddenStatesDataset(str(tmp_path / name))} for name in ("root", "plain")
    )
    assert ours.keys() == theirs.keys()
    for name, item in ours.items():
        a, b = (found["hidden_states"].numpy() for found in (item, theirs[name]))
        assert (np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).max() < TOLERANCE
