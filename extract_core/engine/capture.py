"""Which tensors of a step are the hidden states: native auxiliary states of the model class, or hooks on its blocks.

Layer id k is the residual stream after k decoder blocks (vLLM's own numbering): 0 the embeddings, n the last block
before the final norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from extract_core.engine.hooks import LayerHooks, decoder_blocks
from extract_core.engine.norm import difference, final_norm, norm_error, spread_rows, tolerance
from extract_core.errors import CaptureError, EngineIncompatibleError, LayerIdError


class LayerCapture:
    """The chosen layers of one model, whichever way they come.

    Args:
        model_runner: vLLM's, with the model loaded and no forward run yet.
        layer_ids: ascending.
        n: number of decoder blocks.
        hidden_size: H.
        hooks: take the layers with hooks instead of natively.

    Raises:
        EngineIncompatibleError: the model has no native states, or its decoder blocks were not found.
    """

    def __init__(self, model_runner: Any, layer_ids: Sequence[int], *, n: int, hidden_size: int, hooks: bool):
        self.model = model_runner.get_model()
        holder, blocks = decoder_blocks(self.model, n)
        self.norm = final_norm(holder, blocks)
        self._dtype = model_runner.model_config.dtype
        self._ids, self._n, self._hidden_size = list(layer_ids), n, hidden_size
        self._hooks: LayerHooks | None = None
        if hooks:
            self._hooks = LayerHooks(blocks, layer_ids, hidden_size)
            return
        if not hasattr(self.model, "set_aux_hidden_state_layers"):
            raise EngineIncompatibleError(
                f"{type(self.model).__name__} has no auxiliary hidden states in this vLLM (SupportsEagle3 is missing); "
                "set engine.capture: hooks"
            )
        self.model.set_aux_hidden_state_layers(tuple(layer_ids))
        # On runner V2 only after load_model: with the flag set earlier its load asserts a speculative config.
        model_runner.use_aux_hidden_state_outputs = True

    def begin(self) -> None:
        """Before a forward whose rows count."""
        if self._hooks is not None:
            self._hooks.begin()

    def end(self) -> None:
        """After it, also when it failed."""
        if self._hooks is not None:
            self._hooks.end()

    def states(self, state: Any, tokens: int) -> list[torch.Tensor]:
        """The layers of a step: L tensors [>= tokens, H] in the order of the ids.

        Args:
            state: the runner's ``execute_model_state``.
            tokens: tokens of the step.

        Raises:
            LayerIdError: not one tensor per layer id, or of another shape.
        """
        if self._hooks is not None:
            found = self._hooks.states(self.norm, state.hidden_states, tokens)
        else:
            found = state.aux_hidden_states
        check_layers(found, self._ids, tokens, self._hidden_size)
        return found

    def proof(self, states: Sequence[torch.Tensor], state: Any, tokens: int, *, first: bool) -> torch.Tensor | None:
        """Compare the norm of layer n with what the model itself returned for these tokens, without waiting for it.

        Args:
            states: the layers of the step.
            state: the runner's ``execute_model_state``.
            tokens: tokens of the step.
            first: whether to compare with the stream itself, too: once a shard is enough for what never changes.

        Returns:
            for ``judge``, on the device: float32 [2], the difference of the norm (NaN: nothing to compare) and of the
            stream; None without layer n.
        """
        if self._ids[-1] != self._n:
            return None
        rows = spread_rows(tokens, states[-1].device)
        stream, normed = states[-1][rows], state.hidden_states[rows]
        error = norm_error(self.norm, stream, normed)
        if first and stream.shape == normed.shape and not isinstance(self.norm, torch.nn.Identity):
            same = difference(stream, normed)
        else:
            same = torch.full_like(error, math.inf)
        return torch.stack((error.float(), same.float()))

    def judge(self, figures: Sequence[float]) -> None:
        """Judge a step by what ``proof`` found.

        Raises:
            CaptureError: what was captured is not the last block before the norm, of these tokens.
        """
        error, same = figures
        limit = tolerance(self._dtype)
        if error > limit:
            raise CaptureError(
                f"the final norm of layer {self._n} differs from the model's own output by {error:.2g} (relative, at "
                f"most {limit:g} expected): what was captured is not the last block before the norm, of these tokens"
            )
        if same <= limit:
            raise CaptureError(
                f"what was captured as layer {self._n} is the model's output after the final norm, expected is the "
                "last block before it; try engine.capture: hooks"
            )


def check_layers(aux: Sequence[torch.Tensor] | None, layer_ids: Sequence[int], tokens: int, hidden_size: int) -> None:
    """The step returned one tensor [>= tokens, hidden_size] per layer id; vLLM drops unreachable ids silently.

    Raises:
        LayerIdError: names the ids asked for and what came.
    """
    if aux is None or len(aux) != len(layer_ids):
        raise LayerIdError(
            f"asked the model for layers {list(layer_ids)}, it returned {0 if aux is None else len(aux)} tensors: "
            "an id is not reachable natively on this model in this vLLM; set engine.capture: hooks"
        )
    for k, tensor in zip(layer_ids, aux, strict=True):
        if tensor.ndim != 2 or tensor.shape[0] < tokens or tensor.shape[-1] != hidden_size:
            raise LayerIdError(
                f"layer {k} came as {tuple(tensor.shape)}, expected at least {tokens} rows of {hidden_size}"
            )
