"""Who extracts what: shares of equal rows, what happens to those of a dead worker, help for a slow one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extract_core.errors import SettingsError
from extract_core.shares import Board, as_ranges, balance, from_ranges


def names(*numbers: int) -> list[str]:
    return [f"{number:05d}" for number in numbers]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (names(0, 1, 2, 3), "0-3"),
        (names(3), "3"),
        (names(5, 4, 3, 9), "5-3,9"),
        (names(1, 3, 5), "1,3,5"),
        ([*names(0, 1), "00007.r1", "00008.r12", *names(9)], "0-1,7.r1,8.r12,9"),
        (names(100000, 100001), "100000-100001"),
        ([], ""),
    ],
)
def test_shares_are_short_texts(given: list[str], text: str) -> None:
    assert as_ranges(given) == text
    assert from_ranges(text) == given


@given(st.lists(st.integers(0, 300), unique=True))
def test_every_order_survives_its_text(numbers: list[int]) -> None:
    assert from_ranges(as_ranges(names(*numbers))) == names(*numbers)


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1-3.r1", "1..2", "1.r"])
def test_a_text_that_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is no shard; write numbers and ranges"):
        from_ranges(text)


@given(st.dictionaries(st.integers(0, 500), st.integers(1, 10_000), max_size=60), st.integers(1, 9))
def test_shares_hold_everything_once_and_are_even(rows: dict[int, int], workers: int) -> None:
    given = {f"{number:05d}": count for number, count in rows.items()}
    shares = balance(given, workers)
    assert sorted(name for share in shares for name in share) == sorted(given)
    assert len(shares) == min(workers, len(given))
    assert all(shares)
    order = list(given)
    assert all(share == sorted(share, key=order.index) for share in shares)
    if shares:
        loads = [sum(given[name] for name in share) for share in shares]
        assert max(loads) - min(loads) <= max(given.values()), "what longest-first guarantees"


def board(count: int = 8, rows: int = 100, **options: float) -> Board:
    return Board(dict.fromkeys(names(*range(count)), rows), **{"stall_s": 600, "help_s": 10, **options})


def test_everything_is_given_out_and_nothing_twice() -> None:
    it = board()
    shares = it.next_shares(3, 0)
    assert sorted(name for share in shares for name in share) == names(*range(8))
    for worker, share in enumerate(shares):
        it.began(worker, share, 0)
    assert it.next_shares(3, 1) == [], "no slot is free"
    assert it.next_shares(4, 1) == [], "nothing tells yet who is slow"


def test_what_a_dead_worker_left_goes_to_another() -> None:
    it = board()
    it.began("a", names(0, 1, 2, 3), 0)
    it.began("b", names(4, 5, 6, 7), 0)
    assert it.committed(names(0, 1, 4), 5) == 3
    assert it.committed(names(0, 1, 4), 6) == 0
    assert it.ended("a") == names(2, 3)
    assert it.next_shares(2, 7) == [names(2, 3)]
    it.began("c", names(2, 3), 7)
    it.committed(names(2, 3, 5, 6, 7), 20)
    assert it.open == []
    assert it.rows_done == 800
    assert it.next_shares(9, 21) == []


def test_a_free_slot_helps_the_slowest_from_its_end() -> None:
    it = board(10)
    it.began("fast", names(0, 1), 0)
    it.began("slow", names(2, 3, 4, 5, 6, 7, 8, 9), 0)
    it.committed(names(0, 1, 2, 3), 20)
    it.ended("fast")
    assert it.next_shares(2, 20) == [names(9, 8, 7)], "the second half of what is left, in reverse"
    it.began("help", names(9, 8, 7), 20)
    assert it.next_shares(3, 21) == [], "it is helped already"
    it.committed(names(4, 5, 6, 9, 8, 7), 30)
    assert it.ended("slow") == []


def test_no_help_where_an_engine_would_start_for_nothing() -> None:
    it = board(4, help_s=100)
    it.began("slow", names(0, 1, 2, 3), 0)
    it.committed(names(0), 20)
    assert it.next_shares(2, 20) == [], "a shard takes 20 s, and starting an engine is worth 100"
    it = board(2, help_s=1)
    it.began("slow", names(0, 1), 0)
    it.committed(names(0), 20)
    assert it.next_shares(2, 20) == [], "its last shard is at work"


def test_a_worker_that_commits_nothing_has_stalled() -> None:
    it = board(4, stall_s=100)
    it.began("a", names(0, 1), 0)
    it.began("b", names(2, 3), 0)
    it.committed(names(0), 90)
    assert it.stalled(101) == ["b"]
    assert it.ended("b") == names(2, 3)
    assert it.stalled(150) == []
    it.committed(names(1), 160)
    assert it.stalled(1000) == [], "it has nothing left"


def test_the_share_of_a_dead_helper_stays_with_the_helped() -> None:
    it = board(6)
    it.began("slow", names(0, 1, 2, 3, 4, 5), 0)
    it.began("help", names(5, 4), 0)
    assert it.ended("help") == [], "the other still has them"
