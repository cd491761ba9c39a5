"""The final norm: found in a model, described as a formula, told apart from others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from extract_core.engine.norm import describe_norm, difference, final_norm, norm_error
from extract_core.errors import EngineIncompatibleError

H, CPU = 16, torch.device("cpu")


class PlusOne(torch.nn.Module):
    """Gemma's: the weight is an offset from 1; returns a pair as vLLM's fused norms may."""

    def __init__(self) -> None:
        super().__init__()
        self.variance_epsilon = 1e-5
        self.weight = torch.nn.Parameter(torch.linspace(-0.5, 0.5, H))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (1 + self.weight), x


def _rms() -> torch.nn.RMSNorm:
    norm = torch.nn.RMSNorm(H, eps=1e-3)
    norm.weight.data = torch.linspace(0.5, 2, H)
    return norm


def _layer() -> torch.nn.LayerNorm:
    norm = torch.nn.LayerNorm(H, eps=1e-5)
    norm.weight.data, norm.bias.data = torch.linspace(0.5, 2, H), torch.linspace(-1, 1, H)
    return norm


@pytest.mark.parametrize(
    ("norm", "kind", "offset", "epsilon"),
    [
        (_rms(), "rms", 0.0, 1e-3),
        (PlusOne(), "rms", 1.0, 1e-5),
        (_layer(), "layer", 0.0, 1e-5),
        (torch.nn.Identity(), "none", 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_described_by_its_formula(norm, kind, offset, epsilon, dtype) -> None:
    found = describe_norm(norm.to(dtype), H, dtype, CPU)
    assert (found.kind, found.offset, found.epsilon) == (kind, offset, epsilon)
    if kind != "none":
        np.testing.assert_array_equal(np.frombuffer(found.weight, "<f4"), norm.weight.detach().float().numpy())
    assert (len(found.bias) > 0) == (kind == "layer")


def test_another_kind_of_norm_is_refused() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x)

    with pytest.raises(EngineIncompatibleError, match=r"\(Odd\) is neither an RMS norm nor a layer norm"):
        describe_norm(Odd(), H, torch.float32, CPU)


def test_the_final_norm_is_the_last_beside_the_blocks() -> None:
    class Holder(torch.nn.Module):
        pass

    blocks = torch.nn.ModuleList([torch.nn.Identity()])
    holder = Holder()
    holder.embedding_norm, holder.layers = torch.nn.LayerNorm(H), blocks
    assert final_norm(holder, blocks) is holder.embedding_norm  # as OPT registers its final norm
    holder.norm = _rms()
    assert final_norm(holder, blocks) is holder.norm
    bare = Holder()
    bare.layers = blocks
    assert isinstance(final_norm(bare, blocks), torch.nn.Identity)


def test_one_wrong_row_shows() -> None:
    norm, stream = _rms(), torch.randn(6, H)
    normed = norm(stream)
    assert float(norm_error(norm, stream, normed)) < 1e-6
    normed[4] = norm(stream[:1])
    assert float(norm_error(norm, stream, normed)) > 0.5
    assert float(norm_error(norm, stream, normed[:3])) == float("inf")


def test_rows_of_a_stream_that_is_not_finite_prove_nothing() -> None:
    norm, stream = _rms(), torch.randn(3, H)
    stream[1, 2] = torch.nan
    assert float(norm_error(norm, stream, norm(stream))) < 1e-6
    assert torch.isnan(norm_error(norm, torch.full((2, H), torch.nan), torch.ones(2, H)))


def test_a_finite_stream_under_an_output_that_is_not_is_wrong() -> None:
    norm, stream = _rms(), torch.randn(3, H)
    normed = norm(stream)
    normed[1, 2] = torch.inf  # a stale buffer: what the model computed now overflowed
    assert float(norm_error(norm, stream, normed)) == float("inf")
    assert float(difference(normed, normed)) == 0.0


def test_epsilon_is_part_of_the_check() -> None:
    norm = _rms()
    norm.norm_eps, norm.eps = 1e-2, None

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2) * norm.weight

    norm.forward = forward
    assert describe_norm(norm, H, torch.float32, CPU).epsilon == 0.01
    del norm.norm_eps
    with pytest.raises(EngineIncompatibleError, match="closest formula"):
        describe_norm(norm, H, torch.float32, CPU)
