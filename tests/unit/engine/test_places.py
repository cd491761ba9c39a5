"""Rows go to the segments of their sample, once, whatever comes twice or in pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from extract_core.engine.places import Place, Span, runs_of
from extract_core.engine.sink import RowSink
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


def sink(slot_rows: int = 4) -> RowSink:
    width = 2 * 3 * 4
    return RowSink(
        max_tokens=64,
        layers=2,
        hidden_size=3,
        dtype=torch.float32,
        staging=None,
        pool_bytes=8 * slot_rows * width,
        threads=2,
    )


def test_rows_that_are_there_stay_and_the_rest_is_written(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "shard", rows=12, layer_ids=[1, 2], hidden_size=3, dtype="float32")
    rows = sink()
    rows.open(writer, 12)

    def step(first: int, spans: list[Span], total: int) -> None:
        values = torch.arange(first, first + total).float()[:, None].expand(-1, 3)
        rows.take([values.clone(), values + 0.5], torch.arange(first, first + total, dtype=torch.int32), spans)

    step(0, [Span(0, 2, 5)], 6)
    step(100, [Span(0, 0, 4), Span(4, 5, 4)], 8)  # of rows 2, 3, 5, 6 come others
    step(200, [Span(0, 0, 9)], 9)
    assert runs_of(~rows.covered()) == [(9, 3)]
    step(300, [Span(0, 9, 2), Span(2, 9, 3)], 5)  # twice in one step
    assert rows.close().all()
    writer.close()
    with UnsealedShard(tmp_path / "shard") as shard:
        states, ids = shard.rows(0, 12), shard.token_ids(0, 12)
    assert ids.tolist() == [100, 101, 0, 1, 2, 3, 4, 106, 107, 300, 301, 304]
    assert states[:, 0, 0].tolist() == ids.tolist() and (states[:, 1] == states[:, 0] + 0.5).all()
    assert rows.counters["rows"] == 12 and rows.counters["rows_again"] == 4 + 9 + 2
    assert rows.counters["computed"] == 5 + 8 + 9 + 5 and rows.counters["steps"] == 4


def test_a_step_without_new_rows_takes_no_buffer(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "shard", rows=4, layer_ids=[1, 2], hidden_size=3, dtype="float32")
    rows = sink()
    rows.open(writer, 4)
    values, ids = torch.ones(4, 3), torch.zeros(4, dtype=torch.int32)
    rows.take([values, values], ids, [Span(0, 0, 4)])
    rows.covered()
    for _ in range(50):
        rows.take([values, values], ids, [Span(0, 0, 4)])
    assert rows.close().all() and rows.counters["rows"] == 4
    writer.close()


@pytest.mark.parametrize("segments", [[(3, 5)], [(3, 5), (0, 1)]])
def test_an_output_token_has_no_place(segments: list[tuple[int, int]]) -> None:
    place = Place(segments)
    assert place.spans(0, place.rows, 1) == []
    (span,) = place.spans(7, place.rows - 1, 2)
    assert (span.source, span.rows) == (7, 1)
