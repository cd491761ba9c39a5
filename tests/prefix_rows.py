"""Rows that follow from the tokens up to their position, as a model's do; shared prefixes have the same rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_WORD = 2**64 - 1


def prefix_rows(token_ids: Sequence[int] | np.ndarray, layers: int, hidden_size: int, salt: int = 0) -> torch.Tensor:
    """Float32 ``[N, L, H]`` with values up to 1.7 times the layer's number; another salt gives other rows."""
    state, states = salt & _WORD, []
    for token in token_ids:
        state = ((state ^ (int(token) + 1)) * 0x100000001B3 + 0x9E3779B97F4A7C15) & _WORD
        states.append(state)
    steps = np.arange(1, layers * hidden_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = np.array(states, dtype=np.uint64)[:, None] + steps
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    values = ((bits >> np.uint64(40)).astype(np.float32) / 2**23 - 1) * np.float32(1.7)
    scale = np.arange(1, layers + 1, dtype=np.float32)[:, None]
    return torch.from_numpy(values.reshape(-1, layers, hidden_size) * scale)
