"""Hooks on decoder blocks of every calling convention in vLLM, on small torch modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from extract_core.engine.hooks import LayerHooks, decoder_blocks
from extract_core.errors import CaptureError, EngineIncompatibleError

N, H, TOKENS = 4, 8, 5


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, H))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        stream = x if residual is None else x + residual
        normed = stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed if residual is None else (normed, stream)


class Block(torch.nn.Module):
    """``style`` is what the block returns: "pair" (hidden, residual), "stale" (stream, old residual) or "stream"."""

    def __init__(self, style: str, shard: bool = False) -> None:
        super().__init__()
        self.style, self.shard = style, shard
        self.mix = torch.nn.Linear(H, H)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: Any, scaling: Any = None) -> Any:
        stream = hidden_states.clone() if residual is None or self.style == "stale" else hidden_states + residual
        update = torch.tanh(self.mix(stream))
        if hidden_states.shape[0]:  # as vLLM's fused kernels do: the buffers of the block before are overwritten
            hidden_states.fill_(777)
        if residual is not None:
            residual.fill_(777)
        if self.style == "pair":
            return (update[:2], stream[:2]) if self.shard else (update, stream)
        return (stream + update, torch.full_like(stream, 5)) if self.style == "stale" else (stream + update)


class Decoder(torch.nn.Module):
    def __init__(self, style: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(32, H)
        self.layers = torch.nn.ModuleList([Block(style, **options) for _ in range(N)])
        self.norm = Norm()
        self.style = style

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed(ids), None
        for layer in self.layers:
            output = layer(ids, hidden, residual=residual, scaling=2)
            hidden, residual = output if isinstance(output, tuple) else (output, None)
        return self.norm(hidden) if self.style == "stale" or residual is None else self.norm(hidden, residual)[0]


class Model(torch.nn.Module):
    def __init__(self, style: str, **options: Any) -> None:
        super().__init__()
        self.model = Decoder(style, **options)


def _reference(model: Model, ids: torch.Tensor) -> list[torch.Tensor]:
    stream = model.model.embed(ids)
    streams = [stream]
    for layer in model.model.layers:
        stream = stream + torch.tanh(layer.mix(stream))
        streams.append(stream)
    return streams


@pytest.mark.parametrize("style", ["pair", "stale", "stream"])
@torch.inference_mode()
def test_every_calling_convention_gives_the_residual_stream(style: str) -> None:
    model = Model(style)
    hooks = LayerHooks(model.model.layers, [0, 1, 3], H)
    for seed in range(3):  # the rule is found in the first step and kept
        ids = torch.randint(0, 32, (TOKENS,), generator=torch.Generator().manual_seed(seed))
        hooks.begin()
        normed = model.model(ids)
        hooks.end()
        states = hooks.states(model.model.norm, normed, TOKENS)
        reference = _reference(model, ids)
        for k, state in zip([0, 1, 3], states, strict=True):
            torch.testing.assert_close(state, reference[k])


@torch.inference_mode()
def test_steps_that_do_not_count_leave_nothing_behind() -> None:
    model = Model("pair")
    hooks = LayerHooks(model.model.layers, [N], H)
    model.model(torch.arange(3))  # profiling
    hooks.begin()
    hooks.end()
    with pytest.raises(CaptureError, match=r"layers \[4\] did not run.*engine.enforce_eager: true"):
        hooks.states(model.model.norm, torch.zeros(3, H), 3)


@torch.inference_mode()
def test_rows_spread_over_ranks_are_refused() -> None:
    model = Model("pair", shard=True)
    hooks = LayerHooks(model.model.layers, [1], H)
    hooks.begin()
    model.model.layers[0](torch.arange(TOKENS), torch.randn(TOKENS, H), None)
    model.model.layers[3](torch.arange(TOKENS), torch.randn(TOKENS, H), None)
    hooks.end()
    with pytest.raises(EngineIncompatibleError, match="sequence parallelism"):
        hooks.states(model.model.norm, torch.zeros(TOKENS, H), TOKENS)


@torch.inference_mode()
def test_a_stream_that_the_norm_does_not_explain_is_refused() -> None:
    model = Model("pair")
    hooks = LayerHooks(model.model.layers, [1, N], H)
    hooks.begin()
    normed = model.model(torch.arange(TOKENS))
    hooks.end()
    with pytest.raises(EngineIncompatibleError, match="not what the model returns.*sum .*, first "):
        hooks.states(model.model.norm, normed.flip(0), TOKENS)


@torch.inference_mode()
def test_a_block_that_runs_twice_in_a_step_is_refused() -> None:
    model = Model("pair")
    hooks = LayerHooks(model.model.layers, [1], H)
    hooks.begin()
    model.model(torch.arange(TOKENS))
    with pytest.raises(CaptureError, match="ran twice"):
        model.model(torch.arange(TOKENS))


def test_blocks_are_found_beside_experts_and_towers() -> None:
    model = Model("pair")
    model.model.layers[0].experts = torch.nn.ModuleList([torch.nn.Identity() for _ in range(N)])
    model.vision_tower = torch.nn.ModuleList([torch.nn.Identity() for _ in range(N)])
    holder, blocks = decoder_blocks(model, N)
    assert holder is model.model and blocks is model.model.layers
    model.other = torch.nn.ModuleList([torch.nn.Identity() for _ in range(N)])
    with pytest.raises(
        EngineIncompatibleError, match=r"expected one list of 4 decoder blocks, found \['model.layers', 'other'\]"
    ):
        decoder_blocks(model, N)
    with pytest.raises(EngineIncompatibleError, match=r"found \[\]"):
        decoder_blocks(model, N + 1)


@torch.inference_mode()
def test_a_rule_is_not_guessed_from_states_that_are_not_finite() -> None:
    model = Model("pair")
    hooks = LayerHooks(model.model.layers, [1], H)
    model.model.layers[-1].mix.bias.fill_(torch.nan)
    hooks.begin()
    normed = model.model(torch.arange(TOKENS))
    hooks.end()
    with pytest.raises(CaptureError, match="not finite in any of 5 rows"):
        hooks.states(model.model.norm, normed, TOKENS)
