"""A Hugging Face forward of the same weights: the reference that captured rows are compared with.

Runs in a process of its own (``python -m benchmarks.reference MODEL IN.npz OUT.npz LAYERS``), never beside an engine:
vLLM changes torch's global state.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def hidden_states(
    model: Path, sequences: Sequence[np.ndarray], layers: Sequence[int], folder: Path
) -> list[np.ndarray]:
    """Float32 states ``[N, L, H]`` of each sequence, layer n before the final norm.

    Args:
        model: model folder.
        sequences: token ids, one array per sample.
        layers: layer ids in vLLM's numbering.
        folder: for the files that cross to the other process.
    """
    source, result = folder / "sequences.npz", folder / "reference.npz"
    np.savez(source, *sequences)
    command = [sys.executable, "-m", "benchmarks.reference", str(model), str(source), str(result)]
    subprocess.run([*command, ",".join(map(str, layers))], check=True, cwd=Path(__file__).parent.parent)
    with np.load(result) as stored:
        return [stored[name] for name in stored.files]


def _forward(model_path: str, source: str, result: str, layers: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = [int(k) for k in layers.split(",")]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval().model
    last: list[torch.Tensor] = []
    # Hugging Face's hidden_states[n] is after the final norm; the last block itself gives the stream before it.
    model.layers[-1].register_forward_hook(
        lambda _module, _args, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    outputs = []
    with np.load(source) as sequences, torch.inference_mode():
        for name in sequences.files:
            last.clear()
            ids_1n = torch.from_numpy(sequences[name].astype(np.int64))[None]
            states = model(input_ids=ids_1n, output_hidden_states=True, use_cache=False).hidden_states
            n = len(states) - 1
            final = last[-1] if last[-1].ndim == 3 else last[-1][None]
            outputs.append(torch.stack([final[0] if k == n else states[k][0] for k in ids], dim=1).numpy())
    np.savez(result, *outputs)


if __name__ == "__main__":
    _forward(*sys.argv[1:5])
