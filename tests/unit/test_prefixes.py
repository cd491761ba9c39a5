"""Shared prefixes: samples reassemble from their segments, and what the engine's cache may serve is stored once."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from extract_core.planning.prefixes import MIN_SHARED, along_trie, into_shards, lay_out, trie_order

Tokens = tuple[int, ...]


@st.composite
def conversations(draw: st.DrawFn) -> list[Tokens]:
    """Samples of few different pieces, so that many share prefixes, end inside each other, or are equal."""
    pieces = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=5))
    whole = [tuple(piece) for piece in pieces]
    made = st.lists(st.sampled_from(whole), min_size=1, max_size=5).map(lambda parts: tuple(itertools.chain(*parts)))
    return draw(st.lists(made, min_size=1, max_size=30))


def common(a: Tokens, b: Tokens) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def places(segments: list[tuple[int, int]]) -> list[int]:
    return [row for first, rows in segments for row in range(first, first + rows)]


def flat(samples: list[Tokens]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths = np.array([len(ids) for ids in samples], dtype=np.int64)
    return np.array(list(itertools.chain(*samples)), np.int32), np.cumsum(lengths) - lengths, lengths


def cut(lengths, same, *, most_rows: int, most_samples: int, most_tokens: int = 10**9) -> list[tuple[int, int]]:
    return into_shards(lengths, same, most_rows=most_rows, most_samples=most_samples, most_tokens=most_tokens)


def ordered(samples: list[Tokens]) -> tuple[list[Tokens], list[int]]:
    order, same = trie_order(*flat(samples))
    return [samples[at] for at in order], same.tolist()


@given(conversations())
@example([(1,) * 200, (1,) * 200, (1,) * 80, (1,) * 16, (1,) * 15])
@examples(deadline=None, max_examples=300)
def test_every_sample_reassembles(samples: list[Tokens]) -> None:
    made = lay_out(samples, share=True)
    shard: dict[int, Tokens] = {}
    for ids, segments in zip(samples, made.segments, strict=True):
        rows = places(segments)
        assert len(rows) == len(ids) and all(count > 0 for _, count in segments)
        for position, row in enumerate(rows):
            assert shard.setdefault(row, ids[: position + 1]) == ids[: position + 1], "a row is that of one prefix"
    assert sorted(shard) == list(range(made.rows))
    assert made.rows <= sum(map(len, samples))


@given(conversations())
@examples(deadline=None, max_examples=300)
def test_who_shares_what(samples: list[Tokens]) -> None:
    """As much as the engine's cache could serve, and a whole sample where it is a prefix of the other."""
    made = lay_out(samples, share=True)
    for (a, ours), (b, theirs) in itertools.combinations(zip(samples, made.segments, strict=True), 2):
        same = common(a, b)
        shared = sum(x == y for x, y in zip(places(ours), places(theirs), strict=False))
        on_the_way = [len(c) for c in samples if len(c) <= same and c == a[: len(c)]]
        expected = max([same // MIN_SHARED * MIN_SHARED, *on_the_way])
        assert shared == (expected if expected >= MIN_SHARED else 0)
        assert shared >= min(same, min(len(a), len(b)) - 1) // MIN_SHARED * MIN_SHARED
        if same == min(len(a), len(b)) >= MIN_SHARED:
            assert shared == same


@given(conversations())
@examples(deadline=None, max_examples=300)
def test_nodes(samples: list[Tokens]) -> None:
    """A node is used as a whole; it ends where a block does, or a sample."""
    made = lay_out(samples, share=True)
    users = defaultdict(set)
    for number, segments in enumerate(made.segments):
        for segment in segments:
            users[segment].add(number)
    spans = sorted(users)
    assert [first for first, _ in spans] == [0, *itertools.accumulate(rows for _, rows in spans)][:-1]
    assert sum(rows for _, rows in spans) == made.rows
    lengths = {len(ids) for ids in samples}
    for ids, segments in zip(samples, made.segments, strict=True):
        depth = 0
        for segment in segments:
            depth += segment[1]
            if len(users[segment]) > 1:
                assert depth >= MIN_SHARED and (depth % MIN_SHARED == 0 or depth in lengths)
        assert depth == len(ids)


@given(conversations(), st.randoms(use_true_random=False))
@examples(deadline=None)
def test_the_layout_depends_on_the_order_of_families_alone(samples: list[Tokens], random) -> None:
    """Where equal samples and families come first in the same order, whatever came between."""
    families: dict[Tokens, list[Tokens]] = defaultdict(list)
    for ids in samples:
        families[ids[:MIN_SHARED] if len(ids) >= MIN_SHARED else (*ids, -len(families))].append(ids)
    heads = [members[0] for members in families.values()]
    rest = [ids for members in families.values() for ids in members[1:]]
    random.shuffle(rest)
    shuffled = heads + rest
    before, after = ordered(heads + [ids for members in families.values() for ids in members[1:]]), ordered(shuffled)
    assert before == after
    assert lay_out(before[0], share=True) == lay_out(after[0], share=True)


@given(conversations())
@examples(deadline=None)
def test_along_the_trie_is_the_layout_of_a_shard(samples: list[Tokens]) -> None:
    inorder, same = ordered(samples)
    assert same[0] == 0
    for at in range(1, len(inorder)):
        found = common(inorder[at - 1], inorder[at])
        assert same[at] == (found if found >= MIN_SHARED else 0)
    whole, along = lay_out(inorder, share=True), along_trie(map(len, inorder), same)
    assert (whole.segments, whole.rows, whole.computed) == (along.segments, along.rows, along.computed)
    assert ordered(inorder) == (inorder, same)


@given(conversations(), st.integers(1, 300), st.integers(1, 8))
@examples(deadline=None, max_examples=300)
def test_shards_hold_the_target(samples: list[Tokens], most_rows: int, most_samples: int) -> None:
    inorder, same = ordered(samples)
    shards = cut(list(map(len, inorder)), same, most_rows=most_rows, most_samples=most_samples)
    assert [start for start, _ in shards] == [0, *(stop for _, stop in shards)][:-1] and shards[-1][1] == len(inorder)
    home: dict[int, set[int]] = defaultdict(set)
    family = np.cumsum([value < MIN_SHARED for value in same])
    for number, (start, stop) in enumerate(shards):
        held = inorder[start:stop]
        made = lay_out(held, share=True)
        assert len(held) == 1 or (made.rows <= most_rows and len(held) <= most_samples)
        for name in family[start:stop]:
            home[name].add(number)
    for name, numbers in home.items():
        members = [inorder[at] for at in np.flatnonzero(family == name)]
        if lay_out(members, share=True).rows <= most_rows and len(members) <= most_samples:
            assert len(numbers) == 1, "a family that fits stays together"


def test_samples_without_anything_in_common_keep_their_order() -> None:
    samples = [(7 - n, *range(20)) for n in range(8)]
    assert ordered(samples) == (samples, [0] * 8)
    assert cut([21] * 8, [0] * 8, most_rows=63, most_samples=100) == [(0, 3), (3, 6), (6, 8)]
    assert cut([21] * 8, [0] * 8, most_rows=1000, most_samples=5) == [(0, 5), (5, 8)]


def test_turns_and_answers() -> None:
    """Turns of a conversation are nodes; answers share the full blocks of their prompt."""
    chat = tuple(range(1000, 1100))
    turns = [chat[:30], chat[:45], chat]
    made = lay_out(turns, share=True)
    assert made.segments == [[(0, 30)], [(0, 30), (30, 15)], [(0, 30), (30, 15), (45, 55)]]
    assert made.rows == 100 and made.computed == 30 + (45 - 16) + (100 - 32)
    prompt = tuple(range(40))
    answers = lay_out([(*prompt, 7, 8, 9), (*prompt, 5), (*prompt, 7)], share=True)
    assert answers.segments == [[(0, 32), (41, 9), (50, 2)], [(0, 32), (32, 9)], [(0, 32), (41, 9)]]


def test_off_is_one_segment_after_the_other() -> None:
    made = lay_out([(1,) * 40, (1,) * 40, (2,)], share=False)
    assert made.segments == [[(0, 40)], [(40, 40)], [(80, 1)]] and made.rows == made.computed == 81


def test_a_large_family_is_cut_where_it_has_least_in_common() -> None:
    system = tuple(range(32))
    chats = [(*system, *[100 + n] * 20, *[200 + turn] * 16) for n in range(6) for turn in range(3)]
    inorder, same = ordered(chats)
    shards = cut(list(map(len, inorder)), same, most_rows=32 + 2 * 70 + 40, most_samples=100)
    assert all(start % 3 == 0 for start, _ in shards), shards
    assert len(shards) == 3


@pytest.mark.parametrize("count", [0, 1])
def test_few_samples(count: int) -> None:
    order, same = trie_order(*flat([(1, 2, 3)] * count))
    assert order.tolist() == same.tolist() == [0] * count
    assert cut([3] * count, [0] * count, most_rows=2, most_samples=1) == [(0, 1)] * count
    assert lay_out([(1, 2, 3)] * count, share=True).rows == 3 * count


def test_tokens_of_a_shard_are_bounded() -> None:
    assert cut([40] * 6, [0, 39, 39, 39, 39, 39], most_rows=10**6, most_samples=99, most_tokens=100) == [
        (0, 2),
        (2, 4),
        (4, 6),
    ]


def test_large_token_ids_and_zeros_sort_as_numbers() -> None:
    samples = [(2**31 - 1,), (0, 0), (0,), (256,), (1,)]
    shared = tuple([5] * 16)
    inorder, _ = ordered([(*shared, *ids) for ids in samples])
    assert [ids[16:] for ids in inorder] == [(0,), (0, 0), (1,), (256,), (2**31 - 1,)]
