"""What counts as the same row, and what is found when it is another."""

from __future__ import annotations

import pytest
import torch

from extract_core.deep.compare import Comparison, agreement

LAYERS, HIDDEN, ROWS = (0, 2, 4), 64, 120


def states(seed: int, alike: float = 0.0) -> torch.Tensor:
    """Rows that share ``alike`` of a common direction, as the rows of deep layers do."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(1, len(LAYERS), HIDDEN, generator=torch.Generator().manual_seed(99))
    own = torch.randn(ROWS, len(LAYERS), HIDDEN, generator=generator)
    return common * alike + own * (1 - alike)


def noisy(rows: torch.Tensor, relative: float, seed: int = 5) -> torch.Tensor:
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))
    return rows + noise * relative * rows.norm(dim=-1, keepdim=True) / HIDDEN**0.5


def compared(*pairs: tuple[torch.Tensor, torch.Tensor], compute: str = "float32") -> Comparison:
    comparison = Comparison(LAYERS, compute, "bfloat16")
    for number, (stored, again) in enumerate(pairs):
        comparison.add(f"s{number}", stored.bfloat16(), again.bfloat16())
    return comparison


def wrong(comparison: Comparison) -> str:
    comparison.finish()
    return "\n".join(map(str, comparison.problems))


def test_equal_rows() -> None:
    comparison = compared(*((states(seed), states(seed)) for seed in range(4)))
    layers = comparison.finish()
    assert not comparison.problems and [layer.layer for layer in layers] == list(LAYERS)
    assert all((r.samples, r.rows, r.equal_rows, r.max_error, r.passed) == (4, 480, 480, 0.0, True) for r in layers)


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.9, 0.97])
@pytest.mark.parametrize(("compute", "relative"), [("float32", 3e-3), ("bfloat16", 3e-2)])
def test_noise_of_the_dtype_passes(compute: str, relative: float, alike: float) -> None:
    pairs = [(noisy(states(seed, alike), relative, seed), states(seed, alike)) for seed in range(6)]
    comparison = compared(*pairs, compute=compute)
    layers = comparison.finish()
    assert not comparison.problems
    assert all(0 < layer.median_error <= comparison.tolerance and layer.equal_rows < layer.rows for layer in layers)


@pytest.mark.parametrize("alike", [0.0, 0.9, 0.97])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", [-1, 1])
def test_off_by_one_position(step: int, compute: str, alike: float) -> None:
    right = states(1, alike)
    text = wrong(compared((noisy(right, 1e-3).roll(step, dims=0), right), compute=compute))
    assert "position" in text or "nearer to the row" in text
    assert ("after" if step < 0 else "before") in text


@pytest.mark.parametrize("alike", [0.0, 0.9, 0.97])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_swapped_samples(compute: str, alike: float) -> None:
    a, b, c = (states(seed, alike) for seed in (1, 2, 3))
    text = wrong(compared((b, a), (a, b), (c, c), compute=compute))
    assert "sample s0, layer 0: rows are those of sample s1" in text
    assert "sample s1, layer 4: rows are those of sample s0" in text and "sample s2" not in text


def test_swapped_layers_name_the_layers() -> None:
    right = states(1)
    comparison = compared((right[:, [0, 2, 1]], right))
    layers = comparison.finish()
    assert [layer.passed for layer in layers] == [True, False, False]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e30])
def test_one_bad_row_of_one_sample(value: float, compute: str) -> None:
    stored = states(1)
    stored[17, 1] = value
    comparison = compared((states(2), states(2)), (stored, states(1)), compute=compute)
    layers = comparison.finish()
    assert any("sample s1, layer 2: row 17 differs" in str(problem) for problem in comparison.problems)
    assert [layer.passed for layer in layers] == [True, False, True]
    assert layers[1].to_dict()["max_error"] is None or layers[1].max_error > 0.7


def test_two_rows_exchanged() -> None:
    right = states(1)
    stored = right.clone()
    stored[[40, 41]] = right[[41, 40]]
    assert "position after" in wrong(compared((stored, right))) and not wrong(compared((right, right)))


def test_a_sample_of_one_row() -> None:
    right = states(1)[:1]
    assert not wrong(compared((right, right)))
    assert "row 0 differs" in wrong(compared((states(2)[:1], right)))


def test_repeated_tokens_are_no_neighbours() -> None:
    rows = states(1)
    rows[10:60] = rows[10]
    assert not wrong(compared((noisy(rows, 2e-3), rows), (noisy(states(3), 2e-3), states(3))))


def test_agreement() -> None:
    assert agreement([1, 2, None, 4], [1, 9, 3, None]) == {"samples": 3, "same": 1, "share": 1 / 3, "least": 0.5}
    assert agreement([None], [3]) is None
