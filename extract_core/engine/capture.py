"""Which tensors of the model are the hidden states, and how to read the next token from them.

Layer id k is the residual stream after k decoder blocks (vLLM's own numbering): 0 the embeddings, n the last block
before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from extract_core.errors import EngineIncompatibleError, LayerIdError


def enable_capture(model_runner: Any, layer_ids: Sequence[int]) -> None:
    """Ask the model for the residual stream at ``layer_ids``; to be called before the first forward.

    Raises:
        EngineIncompatibleError: the model class has no native auxiliary hidden states.
    """
    model = model_runner.get_model()
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not supports_eagle3(model) or not hasattr(model, "set_aux_hidden_state_layers"):
        raise EngineIncompatibleError(
            f"{type(model).__name__} has no auxiliary hidden states in this vLLM (SupportsEagle3 is missing); try "
            'engine.extra: {model_impl: "transformers"}, or a model whose class in vLLM supports EAGLE-3'
        )
    model.set_aux_hidden_state_layers(tuple(layer_ids))
    # On runner V2 only after load_model: with the flag set earlier its load asserts a speculative config.
    model_runner.use_aux_hidden_state_outputs = True


def check_layers(aux: Sequence[torch.Tensor] | None, layer_ids: Sequence[int], tokens: int, hidden_size: int) -> None:
    """The step returned one tensor [>= tokens, hidden_size] per layer id; vLLM drops unreachable ids silently.

    Raises:
        LayerIdError: names the ids asked for and what came.
    """
    if aux is None or len(aux) != len(layer_ids):
        raise LayerIdError(
            f"asked the model for layers {list(layer_ids)}, it returned {0 if aux is None else len(aux)} tensors: "
            "an id is not reachable on this model in this vLLM (the last block is missing in some model classes)"
        )
    for k, tensor in zip(layer_ids, aux, strict=True):
        if tensor.shape[0] < tokens or tensor.shape[-1] != hidden_size:
            raise LayerIdError(
                f"layer {k} came as {tuple(tensor.shape)}, expected at least {tokens} rows of {hidden_size}"
            )


def final_norm(model: torch.nn.Module) -> torch.nn.Module:
    """The model's last norm, between block n and lm_head.

    Raises:
        EngineIncompatibleError: no module with a known name.
    """
    inner = model
    for name in ("language_model", "model", "transformer", "model"):
        inner = getattr(inner, name, inner)
    for name in ("norm", "final_layernorm", "ln_f", "norm_f", "final_norm"):
        norm = getattr(inner, name, None)
        if isinstance(norm, torch.nn.Module):
            return norm
    raise EngineIncompatibleError(f"{type(model).__name__}: no final norm found for the next-token check")


@torch.inference_mode()
def next_tokens(model: Any, h_n: torch.Tensor, chunk: int = 64) -> list[int]:
    """``argmax(lm_head(norm(h_n)))`` for rows [S, H] of the last block, with the model's own modules.

    Off-by-one layers, rows of another request, zeros, partial sums and a wrong norm all show up here.
    """
    norm = final_norm(model)
    result: list[int] = []
    for rows in h_n.split(chunk):
        normed = norm(rows)
        logits = model.compute_logits(normed[0] if isinstance(normed, tuple) else normed)
        if logits is not None:  # tensor-parallel ranks that do not gather return nothing
            result.extend(logits.argmax(dim=-1).tolist())
    return result
