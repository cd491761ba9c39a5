"""The workloads of the throughput benchmarks and the arithmetic of their results; no engine."""

import json
import threading
import time

import numpy as np
import pytest

from benchmarks import rounds, sinks, workloads
from benchmarks.contestants import Spec
from benchmarks.gpu import parse_part
from benchmarks.shapes import SHAPES


def ids(*values):
    return np.array(values, np.int32)


@pytest.fixture
def chats():
    random = np.random.default_rng(3)
    made = [random.integers(3, 500, n, dtype=np.int32) for n in (40, 100, 7)]
    return workloads.Chats(made, [[10, 40], [30, 60, 100], [7]], random.integers(3, 500, 20, dtype=np.int32), 512)


def test_turns_are_prefixes_of_their_conversation_and_distinct_tokens_are_those_of_the_conversations(chats):
    turns = workloads.make("turns", chats, prompts=0)
    assert [len(sample) for sample in turns.samples] == [10, 40, 30, 60, 100, 7]
    assert np.array_equal(turns.samples[3], chats.ids[1][:60])
    assert turns.facts()["tokens"] == 247
    assert turns.facts()["distinct"] == 147


def test_system_prompt_is_before_every_conversation_and_counts_once(chats):
    system = workloads.make("system", chats, prompts=0)
    assert all(np.array_equal(sample[:20], chats.system) for sample in system.samples)
    assert system.tokens == 147 + 3 * 20
    assert workloads.distinct(system.samples) == 147 + 20


def test_uniform_prompts_are_the_same_every_time_and_within_the_vocabulary(chats):
    one, other = (workloads.make("uniform", chats, prompts=5, length=64) for _ in range(2))
    assert np.array_equal(one.samples, other.samples)
    assert one.facts() == {"name": "uniform", "samples": 5, "tokens": 320, "distinct": 320, "longest": 64}
    assert min(map(np.min, one.samples)) >= 3 and max(map(np.max, one.samples)) < 512


def test_equal_samples_come_once_as_in_a_plan(chats):
    twice = workloads.Chats(chats.ids * 2, chats.ends * 2, chats.system, chats.vocabulary)
    assert len(workloads.make("turns", twice, prompts=0).samples) == 6


def test_unknown_workload_is_refused(chats):
    with pytest.raises(ValueError, match="uniform, turns, system"):
        workloads.make("other", chats, prompts=1)


@pytest.mark.parametrize("vocabulary", [512, 200_000])
def test_file_gives_back_what_was_saved(chats, tmp_path, vocabulary):
    high = [sample + (vocabulary - 512) for sample in chats.ids]
    workloads.save(workloads.Chats(high, chats.ends, chats.system, vocabulary), tmp_path / "w.npz")
    again = workloads.load(tmp_path / "w.npz")
    assert all(map(np.array_equal, again.ids, high)) and len(again.ids) == 3
    assert again.ends == chats.ends and again.vocabulary == vocabulary
    assert again.ids[0].dtype == np.int32 and np.array_equal(again.system, chats.system)
    assert [len(sample) for sample in again.first(1).ids] == [40]


def test_samples_for_another_process_and_rows_for_a_job(chats, tmp_path):
    samples = workloads.make("turns", chats, prompts=0).samples
    assert all(map(np.array_equal, workloads.read_samples(workloads.write_samples(samples, tmp_path / "s")), samples))
    lines = workloads.write_rows(samples, tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["input_ids"] for line in lines] == [sample.tolist() for sample in samples]


def test_grouping_keeps_a_turn_that_is_no_prefix_apart():
    turns = [(0, ids(1, 2)), (0, ids(1, 2, 3)), (0, ids(9, 9)), (1, ids(1, 2)), (1, ids(1, 2)), (2, ids(1, 2, 5))]
    found = [(longest.tolist(), ends) for longest, ends in workloads.grouped(turns)]
    assert found == [([1, 2, 3], [2, 3]), ([9, 9], [2]), ([1, 2], [2]), ([1, 2, 5], [3])]


def test_ratios_are_taken_round_by_round():
    speeds = {"prefill": [100, 50, 80], "ours": [98, 50], "connector": [90, 45, 70]}
    made = [
        {"workload": "uniform", "contestant": who, "round": n, "tokens_per_s": float(speed), "tokens": 10}
        | {"computed": 5, "bytes": 40}
        for who, values in speeds.items()
        for n, speed in enumerate(values)
    ]
    found = rounds.summary(made)["uniform"]
    assert found["ratios"]["ours / prefill"] == {"median": 0.99, "min": 0.98, "max": 1.0, "rounds": 2}
    assert found["ratios"]["connector / prefill"]["median"] == 0.9
    assert found["tokens_per_s"]["prefill"] == {"median": 80, "min": 50, "max": 100, "rounds": 3}
    assert found["counted"]["ours"] == {"computed_per_token": 0.5, "bytes_per_token": 4.0}
    assert "prefill / ours" not in found["ratios"]


def test_contestants_and_parts_are_read_and_wrong_ones_refused():
    ours, alone = rounds.entries("ours,ours-alone:0.25")
    assert (ours.engine, ours.share, ours.part) == ("ours", True, 1.0)
    assert (alone.engine, alone.share, alone.part) == ("ours", False, 0.25)
    with pytest.raises(ValueError, match="theirs"):
        rounds.entries("theirs")
    assert parse_part("8b:uniform+turns@300") == ("8b", ["uniform", "turns"], 300.0)
    assert parse_part("dsv3") == ("dsv3", ["uniform", "turns", "system"], 540.0)
    for wrong in ("70b:uniform", "8b:other", "8b:"):
        with pytest.raises(ValueError, match="is no part"):
            parse_part(wrong)


def test_a_contestant_that_fails_says_why_and_the_result_is_kept(tmp_path):
    spec = Spec("prefill", str(tmp_path / "none"), [1], "float32", "float32", str(tmp_path), str(tmp_path))
    session = rounds.Session({"prefill": spec}, tmp_path / "run", tmp_path / "out.json", {"part": "x"})
    workload = workloads.Workload("uniform", [ids(4, 5, 6)])
    session.specs["prefill"] = Spec(**{**spec.__dict__, "kind": "ours"})  # fails before it imports vLLM
    result = session.run([(workload, rounds.entries("prefill"))], 1)
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert "ModelError" in result["failed"]["prefill"]
    assert result["rounds"] == [] and result["complete"] is False


def test_bucket_holds_all_threads_together_to_its_rate():
    bucket, began = sinks.TokenBucket(1_000_000), time.monotonic()
    threads = [threading.Thread(target=bucket.take, args=(50_000,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.2


def test_files_count_once_their_lock_is_released(tmp_path):
    import fcntl

    lock = (tmp_path / "a.safetensors.lock").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    with sinks.FileConsumer(tmp_path, 1, delete=True) as files:
        time.sleep(3 * sinks.POLL_S)
        assert files.count == 0
        lock.close()
        files.finish(10)
    assert (files.count, files.nbytes) == (1, 5)
    assert list(tmp_path.iterdir()) == []


def test_files_that_never_come_are_an_error(tmp_path):
    with sinks.FileConsumer(tmp_path, 1, delete=False) as files, pytest.raises(TimeoutError, match="0 of 1"):
        files.finish(0.1)


def test_shapes_have_the_layers_that_they_capture_and_tiny_ones_are_the_same_kind():
    for shape in SHAPES.values():
        assert shape.layers == sorted(set(shape.layers)) and shape.layers[-1] == shape.config["num_hidden_layers"]
        tiny = shape.tiny()
        assert tiny.layers[-1] == tiny.config["num_hidden_layers"]
        assert tiny.config["architectures"] == shape.config["architectures"]
