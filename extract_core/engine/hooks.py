"""Forward hooks on the decoder blocks, for layers that a model class does not return by itself.

Most blocks of vLLM return ``(hidden, residual)`` and the stream is their sum, some return the finished stream beside a
stale residual, some a single tensor. Which of these a model does is not looked up but measured: the final norm of the
true stream is what the model itself returned for the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from extract_core.engine.norm import norm_error, spread_rows, tolerance
from extract_core.errors import CaptureError, EngineIncompatibleError

_OTHER_STACKS = ("vision", "visual", "audio", "image", "mtp", "draft")


def decoder_blocks(model: torch.nn.Module, n: int) -> tuple[torch.nn.Module, torch.nn.ModuleList]:
    """The list of the ``n`` decoder blocks and the module that holds it.

    Raises:
        EngineIncompatibleError: no list, or several, of that length.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == n
        and not any(word in name.lower() for word in _OTHER_STACKS)
    ]
    outer = [(name, m) for name, m in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    if len(outer) != 1:
        raise EngineIncompatibleError(
            f"{type(model).__name__}: expected one list of {n} decoder blocks, found {[name for name, _ in outer]}; "
            "layers of this model cannot be captured"
        )
    name, blocks = outer[0]
    return model.get_submodule(name.rpartition(".")[0]), blocks


class LayerHooks:
    """Takes the residual stream at some layer ids out of every step.

    The hooks fire in vLLM's profiling and warm-up too, so they do nothing outside ``begin`` and ``states``. Eager mode
    only: inside a compiled graph a hook fires once or never.

    Args:
        blocks: the model's decoder blocks.
        layer_ids: ascending.
        hidden_size: H.
    """

    def __init__(self, blocks: torch.nn.ModuleList, layer_ids: Sequence[int], hidden_size: int):
        n = len(blocks)
        self._ids, self._n, self._hidden_size = list(layer_ids), n, hidden_size
        self._active = False
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._adds: bool | None = None
        for k in sorted({*layer_ids, n}):  # block n is watched until the rule is known
            if k == 0:
                blocks[0].register_forward_pre_hook(self._on_input, with_kwargs=True)
            else:
                blocks[k - 1].register_forward_hook(partial(self._on_output, k))

    def begin(self) -> None:
        """A step that counts starts."""
        self._taken.clear()
        self._active = True

    def end(self) -> None:
        """The forward is over, whatever came of it."""
        self._active = False

    def states(self, norm: torch.nn.Module, normed: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        """The streams of the step, one [>= tokens, H] per layer id.

        Args:
            norm: the model's final norm.
            normed: what the model returned, [>= tokens, H].
            tokens: tokens of the step.

        Raises:
            CaptureError: a block did not run.
            EngineIncompatibleError: neither rule explains what the model returned, or rows are spread over ranks.
        """
        missing = [k for k in self._ids if k not in self._taken]
        if missing:
            raise CaptureError(
                f"the blocks of layers {missing} did not run in this step: their hooks never fired. Hooks need eager "
                "mode (engine.enforce_eager: true)"
            )
        short = {k: len(pair[0]) for k, pair in self._taken.items() if len(pair[0]) < tokens}
        if short:
            raise EngineIncompatibleError(
                f"a step of {tokens} tokens gave {short} rows at these layers: the tokens are spread over ranks "
                "(sequence parallelism) and one rank holds only a part. Turn expert parallelism off, or use "
                "engine.capture: native"
            )
        if self._adds is None:
            self._decide(norm, normed, tokens)
        streams = [_sum(*self._taken[k], self._adds is not False) for k in self._ids]
        self._taken.clear()
        return streams

    def _decide(self, norm: torch.nn.Module, normed: torch.Tensor, tokens: int) -> None:
        hidden, residual = self._taken[self._n]
        rows = spread_rows(tokens, hidden.device)
        hidden, residual = hidden[rows], None if residual is None else residual[rows]
        rules = (True, False) if residual is not None else (True,)
        errors = {adds: float(norm_error(norm, _sum(hidden, residual, adds), normed[rows])) for adds in rules}
        known = {adds: error for adds, error in errors.items() if not math.isnan(error)}
        if not known:
            if residual is None:
                return  # there is nothing to choose
            raise CaptureError(
                f"the states of the last block are not finite in any of {len(rows)} rows of the first step: which part "
                "of a block's output is the stream cannot be known. Compute in bfloat16 or float32 (model.dtype)"
            )
        best = min(known, key=lambda adds: known[adds])
        if known[best] > tolerance(hidden.dtype):
            shown = ", ".join(f"{'sum' if a else 'first'} {e:.2g}" for a, e in known.items())
            raise EngineIncompatibleError(
                f"the final norm of what the last decoder block returns is not what the model returns (relative "
                f"difference: {shown}; at most {tolerance(hidden.dtype):g} expected): the block's output is not the "
                "residual stream, or only this rank's share of it. Try engine.capture: native, or one GPU per model"
            )
        self._adds = best

    def _on_input(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._active:
            return
        found = kwargs.get("hidden_states")
        streams = [found] if found is not None else self._streams((*args, *kwargs.values()))
        if not streams:
            raise CaptureError("the first decoder block was called without a tensor of hidden states")
        self._keep(0, streams[0], None)

    def _on_output(self, k: int, _module: Any, _args: Any, output: Any) -> None:
        if not self._active or (k == self._n and k not in self._ids and self._adds is not None):
            return
        streams = self._streams(output if isinstance(output, tuple | list) else (output,))
        if not streams:
            raise CaptureError(f"decoder block {k} returned no tensor of hidden states")
        residual = streams[1] if len(streams) > 1 and streams[1].shape == streams[0].shape else None
        self._keep(k, streams[0], residual)

    def _streams(self, values: Sequence[Any]) -> list[torch.Tensor]:
        return [
            value
            for value in values
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[-1] == self._hidden_size
        ]

    def _keep(self, k: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        if k in self._taken:
            raise CaptureError(f"the block of layer {k} ran twice in one step: rows of its two parts would be mixed")
        hidden = hidden.reshape(-1, self._hidden_size)
        residual = None if residual is None else residual.reshape(-1, self._hidden_size)
        # Copied here: the next block overwrites both tensors in place.
        if residual is None or self._adds is False:
            self._taken[k] = hidden.clone(), None
        elif self._adds is None:
            self._taken[k] = hidden.clone(), residual.clone()
        else:
            self._taken[k] = hidden + residual, None


def _sum(hidden: torch.Tensor, residual: torch.Tensor | None, adds: bool) -> torch.Tensor:
    return hidden + residual if adds and residual is not None else hidden
