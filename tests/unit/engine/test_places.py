"""Rows go to the segments of their sample, once, whatever comes twice or in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from extract_core.engine.places import Place, Span, runs_of
from extract_core.engine.sink import OpenShard, RowSink
from extract_core.errors import CaptureError, NoSpaceError
from extract_core.store.unsealed import UnsealedShard
from extract_core.store.writer import ShardWriter

RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=6)


def segments_of(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    at, made = 0, []
    for gap, rows in gaps:
        made.append((at + gap, rows))
        at += gap + rows
    return made


@given(RUNS, st.integers(0, 60), st.integers(0, 60), st.integers(0, 100))
def test_spans_are_the_rows_of_the_positions(
    gaps: list[tuple[int, int]], position: int, count: int, source: int
) -> None:
    segments = segments_of(gaps)[::-1]  # a prefix may lie behind what follows it
    rows = [row for first, n in segments for row in range(first, first + n)]
    place = Place(segments)
    assert place.rows == len(rows)
    spans = place.spans(source, position, count)
    found = [(s.source + i, s.target + i) for s in spans for i in range(s.rows)]
    expected = rows[position : position + count]
    assert found == list(zip(range(source, source + len(expected)), expected, strict=True))
    assert all(span.rows > 0 for span in spans)


@given(RUNS)
def test_flags(gaps: list[tuple[int, int]]) -> None:
    segments = segments_of(gaps)
    flags = np.zeros(100, dtype=bool)
    place = Place(segments)
    assert not place.filled(flags)
    place.mark(flags)
    assert place.filled(flags) and flags.sum() == place.rows
    assert sum(count for _, count in runs_of(flags)) == place.rows
    assert all(flags[first : first + count].all() for first, count in runs_of(flags))
    flags[segments[0][0]] = False
    assert not place.filled(flags)


def sink(slot_rows: int = 4, judge: Callable[[Sequence[float]], None] = lambda figures: None) -> RowSink:
    width = 2 * 3 * 4
    return RowSink(
        max_tokens=64,
        layers=2,
        hidden_size=3,
        dtype=torch.float32,
        staging=None,
        pool_bytes=8 * slot_rows * width,
        threads=2,
        judge=judge,
    )


def shard_of(path: Path, rows: int) -> OpenShard:
    writer: Future[ShardWriter] = Future()
    writer.set_result(ShardWriter(path, rows=rows, layer_ids=[1, 2], hidden_size=3, dtype="float32"))
    return OpenShard(writer, rows)


def take(rows: RowSink, first: int, places: list[tuple[OpenShard, list[Span]]], total: int, **proof: Any) -> None:
    values = torch.arange(first, first + total).float()[:, None].expand(-1, 3)
    rows.take([values.clone(), values + 0.5], torch.arange(first, first + total, dtype=torch.int32), places, **proof)


def stored(shard: OpenShard) -> tuple[torch.Tensor, list[int]]:
    assert shard.idle.wait(10)
    writer = shard.writer.result()
    writer.close()
    with UnsealedShard(writer.path) as file:
        return file.rows(0, writer.rows), file.token_ids(0, writer.rows).tolist()


def test_rows_that_are_there_stay_and_the_rest_is_written(tmp_path: Path) -> None:
    shard, rows = shard_of(tmp_path / "shard", 12), sink()
    take(rows, 0, [(shard, [Span(0, 2, 5)])], 6)
    take(rows, 100, [(shard, [Span(0, 0, 4), Span(4, 5, 4)])], 8)  # of rows 2, 3, 5, 6 come others
    take(rows, 200, [(shard, [Span(0, 0, 9)])], 9)
    assert runs_of(~shard.taken) == [(9, 3)]
    take(rows, 300, [(shard, [Span(0, 9, 2), Span(2, 9, 3)])], 5)  # twice in one step
    states, ids = stored(shard)
    assert shard.taken.all()
    assert ids == [100, 101, 0, 1, 2, 3, 4, 106, 107, 300, 301, 304]
    assert states[:, 0, 0].tolist() == ids and (states[:, 1] == states[:, 0] + 0.5).all()
    assert shard.counters["rows"] == 12 and shard.counters["rows_again"] == 4 + 9 + 2
    assert shard.counters["computed"] == 5 + 8 + 9 + 5 and shard.counters["steps"] == 4


def test_a_step_may_hold_rows_of_two_shards(tmp_path: Path) -> None:
    one, two, rows = shard_of(tmp_path / "one", 5), shard_of(tmp_path / "two", 7), sink()
    take(rows, 0, [(one, [Span(0, 0, 3)])], 3)
    take(rows, 10, [(one, [Span(5, 3, 2)]), (two, [Span(0, 2, 5), Span(7, 0, 1)])], 8)  # mixed in the batch
    states, ids = stored(one)
    assert ids == [0, 1, 2, 15, 16] and states[:, 0, 0].tolist() == ids
    take(rows, 30, [(two, [Span(0, 1, 1)])], 1)  # goes on while the other is closed
    states, ids = stored(two)
    assert ids == [17, 30, 10, 11, 12, 13, 14] and states[:, 0, 0].tolist() == ids
    assert (one.counters["rows"], two.counters["rows"]) == (5, 7)
    assert (one.counters["steps"], two.counters["steps"]) == (2, 2)


def test_a_step_without_new_rows_takes_no_buffer(tmp_path: Path) -> None:
    shard, rows = shard_of(tmp_path / "shard", 4), sink()
    take(rows, 0, [(shard, [Span(0, 0, 4)])], 4)
    assert shard.idle.wait(10)
    for _ in range(50):
        take(rows, 0, [(shard, [Span(0, 0, 4)])], 4)
    assert shard.taken.all() and shard.counters["rows"] == 4


def test_a_writer_that_fails_fails_the_next_step_and_leaves_no_shard_waiting(tmp_path: Path) -> None:
    def judge(figures: Sequence[float]) -> None:
        if figures[0] > 1:
            raise CaptureError(f"judged {figures[0]}")

    one, two, rows = shard_of(tmp_path / "one", 9), shard_of(tmp_path / "two", 9), sink(judge=judge)
    take(rows, 0, [(one, [Span(0, 0, 4)])], 4, proof=torch.tensor([0.5, float("inf")]))
    assert one.idle.wait(10)
    rows.raise_failure()
    take(rows, 0, [(one, [Span(0, 4, 2)]), (two, [Span(2, 0, 2)])], 4, proof=torch.tensor([2.0, float("inf")]))
    assert one.idle.wait(10) and two.idle.wait(10)
    with pytest.raises(CaptureError, match=r"judged 2\.0"):
        take(rows, 0, [(two, [Span(0, 2, 4)])], 4)
    no_room: Future[ShardWriter] = Future()
    no_room.set_exception(NoSpaceError("full"))
    full, rows = OpenShard(no_room, 4), sink()
    take(rows, 0, [(full, [Span(0, 0, 4)])], 4)
    assert full.idle.wait(10)
    with pytest.raises(NoSpaceError, match="full"):
        rows.raise_failure()


@pytest.mark.parametrize("segments", [[(3, 5)], [(3, 5), (0, 1)]])
def test_an_output_token_has_no_place(segments: list[tuple[int, int]]) -> None:
    place = Place(segments)
    assert place.spans(0, place.rows, 1) == []
    (span,) = place.spans(7, place.rows - 1, 2)
    assert (span.source, span.rows) == (7, 1)
