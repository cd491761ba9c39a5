import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extract_core.checks import rows as module
from extract_core.checks.rows import RowFailure, SampleStats, ShardChecker, check_sample_rows

LAYERS = [2, 15, 30]


def example(n=40, hidden=64, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 10.0, 100.0])[None, :, None]
    states = (torch.randn(n, 3, hidden, generator=generator) * scale).to(dtype)
    return states, torch.arange(n)


def check(states, tokens, expected=None, layer_ids=LAYERS):
    return check_sample_rows(states, tokens, tokens if expected is None else expected, layer_ids=layer_ids)


@given(n=st.integers(1, 70), dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
@settings(max_examples=30, deadline=None)
def test_statistics(n, dtype):
    states, tokens = example(n, dtype=dtype)
    found = check(states, tokens)
    assert isinstance(found, SampleStats)
    norms = states.double().norm(dim=-1)
    assert found.norm_mean == pytest.approx(norms.mean(0).tolist(), rel=1e-5)
    assert found.norm_max == pytest.approx(norms.amax(0).tolist(), rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 3 * 64, 3 * 64 * 7, 2**20])
def test_chunks_do_not_matter(monkeypatch, chunk):
    states, tokens = example()
    whole = check(states, tokens)
    bad = states.clone()
    bad[33, 1] = 0
    monkeypatch.setattr(module, "_CHUNK_VALUES", chunk)
    assert check(states, tokens) == whole
    assert check(bad, tokens) == RowFailure("zero_row", "layer 15, position 33: all 64 channels are 0")


def with_value(position, layer, value, channel=slice(None)):
    def change(states, tokens):
        states[position, layer, channel] = value

    return change


def same_rows(states, tokens):
    states[:, 1] = states[0, 1]


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        (with_value(7, 1, 0), "zero_row", "layer 15, position 7"),
        (with_value(7, 1, -0.0), "zero_row", "layer 15, position 7"),
        (with_value(7, 2, float("nan"), 5), "not_finite", "layer 30, position 7: value nan at channel 5"),
        (with_value(39, 0, float("-inf"), 0), "not_finite", "layer 2, position 39: value -inf at channel 0"),
        (with_value(3, 0, 3e38), "not_finite", "layer 2, position 3: norm overflows"),
        (with_value(3, 0, 1.5), "constant_row", "layer 2, position 3: all 64 channels are 1.5"),
        (same_rows, "identical_rows", "layer 15: all 40 positions"),
        (lambda states, tokens: states.zero_(), "zero_row", "layer 2, position 0"),
    ],
)
def test_bad_rows(change, reason, detail):
    states, tokens = example()
    change(states, tokens)
    found = check(states, tokens)
    assert isinstance(found, RowFailure)
    assert found.reason == reason
    assert detail in found.detail


def test_tokens_and_counts():
    states, tokens = example()
    wrong = tokens.clone()
    wrong[9] = 777
    assert check(states, wrong, tokens) == RowFailure(
        "token_echo", "position 9: token 777 came with the row, 9 was asked for"
    )
    assert check(states, tokens[:-1], tokens).reason == "token_echo"
    assert check(states[:-1], tokens[:-1], tokens) == RowFailure("row_count", "39 rows for 40 tokens")
    assert check(states[:0], tokens[:0]).reason == "row_count"
    assert check(states, tokens, layer_ids=[1]).reason == "shape"
    assert check(states[0], tokens).reason == "shape"
    assert check(states.to(torch.int32), tokens).reason == "shape"
    assert isinstance(check(states, tokens.to(torch.int32), tokens, layer_ids=None), SampleStats)


def test_honest_oddities_pass():
    states, tokens = example()
    states[0, 1] *= 500  # the first token of a sequence is often huge in the middle layers
    states[5, 1, [0, 1, 32, 63]] = 2.0  # agreeing where the quick look for constant rows looks
    assert isinstance(check(states, tokens), SampleStats)
    states[:] = states[0].clone()  # one token repeated: identical rows are right in the embeddings at least
    assert isinstance(check(states, torch.full((40,), 3)), SampleStats)
    one, token = example(1)
    assert isinstance(check(one, token), SampleStats)
    assert isinstance(check_sample_rows(torch.ones(1, 1, 1), token, token), SampleStats)


def test_zero_embeddings():
    """Layer 0 is the embedding table: a token may have a zero row there, but then everywhere."""
    states, _ = example()
    tokens = torch.arange(40) % 4
    layers = [0, 15, 30]
    states[tokens == 2, 0] = 0
    assert isinstance(check(states, tokens, layer_ids=layers), SampleStats)
    states[5, 0] = 0  # token 1, which has a row elsewhere
    assert check(states, tokens, layer_ids=layers) == RowFailure(
        "zero_row", "layer 0, position 5: all channels are 0 (token 1)"
    )
    states[:, 0] = 0
    assert check(states, tokens, layer_ids=layers).reason == "zero_row"


class Stored:
    """Rows of a shard; counts those that are read."""

    def __init__(self, states, tokens):
        self.states, self.tokens, self.read = states, tokens, 0

    def rows(self, first_row, rows):
        self.read += rows
        return self.states[first_row : first_row + rows]

    def token_ids(self, first_row, rows):
        return self.tokens[first_row : first_row + rows]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from(["sound", "zero", "nan", "constant", "echo", "identical"]),
    st.integers(0, 44),
)
@settings(max_examples=100, deadline=None)
def test_a_sample_in_segments_is_judged_as_a_whole(sizes, fault, at):
    """The pieces lie in the shard in reverse."""
    states, tokens = example(sum(sizes))
    at %= len(states)
    if fault == "identical":
        states[:, 1] = states[0, 1].clone()
    elif fault != "sound" and fault != "echo":
        states[at, 1] = {"zero": 0.0, "nan": float("nan"), "constant": 2.0}[fault]
    places, behind = [], len(states)
    stored, echo = states.clone(), tokens.clone()
    begin = 0
    for size in sizes:
        behind -= size
        places.append((behind, size))
        stored[behind : behind + size] = states[begin : begin + size]
        echo[behind : behind + size] = tokens[begin : begin + size]
        begin += size
    expected = tokens.clone()
    if fault == "echo":
        expected[at] += 1
    found = ShardChecker(Stored(stored, echo), LAYERS).check(places, expected)
    assert found == check(states, tokens, expected)
    assert isinstance(found, SampleStats) == (fault == "sound" or (fault == "identical" and len(states) == 1))


def test_shared_rows_are_read_once():
    states, tokens = example(60)
    shard = Stored(states, tokens)
    checker = ShardChecker(shard, LAYERS)
    for first, rows in [(40, 10), (50, 10)]:
        whole = torch.cat((states[:40], states[first : first + rows]))
        ids = torch.cat((tokens[:40], tokens[first : first + rows]))
        assert checker.check([(0, 40), (first, rows)], ids) == check(whole, ids)
    assert shard.read == 60 + 2 * 2, "and two of each sample that are compared"
    assert checker.check([(0, 40)], tokens[:41]) == RowFailure("row_count", "40 rows for 41 tokens")


def test_zero_embeddings_of_shared_rows():
    states, tokens = example(20)
    states[[3, 12], 0] = 0
    tokens[12] = tokens[3]
    layers = [0, 15, 30]
    checker = ShardChecker(Stored(states, tokens), layers)
    assert isinstance(checker.check([(0, 10), (10, 10)], tokens), SampleStats)
    tokens[15] = tokens[3]
    checker = ShardChecker(Stored(states, tokens), layers)
    assert checker.check([(0, 10), (10, 10)], tokens) == check(states, tokens, layer_ids=layers)
    assert isinstance(checker.check([(0, 10)], tokens[:10]), SampleStats)
