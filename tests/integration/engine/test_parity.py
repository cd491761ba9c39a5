"""Captured rows against a Hugging Face float32 forward of the same weights, on 32 real chats."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.parity import compare, table
from extract_core.engine.supervisor import EngineSupervisor

from .conftest import LAYERS, Capture, run_job

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
"""Largest relative error of a float32 row (norm of the difference over norm of the reference)."""


@pytest.fixture(scope="module")
def many(
    engine_f32: EngineSupervisor, sequences: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> Capture:
    return run_job(engine_f32, tmp_path_factory.mktemp("many"), sequences)


def _report(title: str, capture: Capture, hf_rows: list[np.ndarray], record_property) -> float:
    errors = compare(capture.rows, hf_rows, LAYERS)
    print("\n" + table(title, errors))
    for error in errors:
        record_property(f"layer {error.layer} max relative error", f"{error.max_relative:.3e}")
    return max(error.max_relative for error in errors)


def _complete(capture: Capture, sequences: list[np.ndarray]) -> None:
    for ids, echo in zip(sequences, capture.token_ids, strict=True):
        np.testing.assert_array_equal(ids, echo)
    assert len(capture.done.greedy) == len(sequences)
    assert capture.done.counters["rows"] == sum(map(len, sequences))
    assert capture.done.counters["rows_again"] == 0


def test_float32_rows_equal_hugging_face(many, hf_rows, sequences, record_property):
    _complete(many, sequences)
    assert _report("float32, many chats in flight", many, hf_rows, record_property) < TOLERANCE
    assert many.done.greedy == many.done.top1


def test_chunked_prefill_gives_the_same_rows(engine_chunked, many, hf_rows, sequences, tmp_path, record_property):
    chunked = run_job(engine_chunked, tmp_path, sequences)
    _complete(chunked, sequences)
    assert chunked.done.counters["steps"] >= sum(map(len, sequences)) / 48
    assert _report("float32, steps of 48 tokens", chunked, hf_rows, record_property) < TOLERANCE
    assert max(error.max_relative for error in compare(chunked.rows, many.rows, LAYERS)) < TOLERANCE
    assert chunked.done.greedy == many.done.greedy


def test_one_at_a_time_gives_the_same_rows(engine_f32, many, hf_rows, sequences, tmp_path, record_property):
    alone = run_job(engine_f32, tmp_path, sequences, solo=True)
    _complete(alone, sequences)
    assert alone.done.counters["steps"] >= len(sequences)
    assert _report("float32, one chat at a time", alone, hf_rows, record_property) < TOLERANCE
    assert max(error.max_relative for error in compare(alone.rows, many.rows, LAYERS)) < TOLERANCE
    assert alone.done.greedy == many.done.greedy


def test_bfloat16_rows_are_close(engine_bf16, hf_rows, sequences, tmp_path, record_property):
    """bfloat16 keeps 8 bits: single rows differ by percents, the direction hardly. Half of the chats: CPUs are slow."""
    sequences, hf_rows = sequences[:16], hf_rows[:16]
    capture = run_job(engine_bf16, tmp_path, sequences)
    _complete(capture, sequences)
    assert _report("bfloat16, many chats in flight", capture, hf_rows, record_property) < 0.15
    errors = compare(capture.rows, hf_rows, LAYERS)
    assert all(error.mean_relative < 0.03 and error.mean_cosine > 0.999 for error in errors)
    agree = sum(capture.done.greedy[s] == capture.done.top1[s] for s in capture.done.greedy)
    assert agree >= 0.9 * len(sequences)
