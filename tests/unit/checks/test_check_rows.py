import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extract_core.checks import rows as module
from extract_core.checks.rows import RowFailure, SampleStats, check_sample_rows

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
