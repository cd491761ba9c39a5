"""A Hugging Face forward of the same weights: the reference that captured rows are compared with.

It runs in a process of its own (``python -m extract_core.engine.reference REQUEST.json SEQUENCES.npz RESULT.npz``),
never beside an engine: vLLM changes torch's global state. Nothing here imports vLLM.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from extract_core.engine import guard
from extract_core.engine.hooks import decoder_blocks
from extract_core.errors import EngineError, LayerIdError

Ids = np.ndarray[Any, np.dtype[Any]]
Rows = np.ndarray[Any, np.dtype[np.float32]]

_TAIL = 4000
_LOOK_S = 0.5


class ReferenceFailedError(EngineError):
    """The Hugging Face forward did not come to an end; says nothing about the captured rows."""


@dataclass(frozen=True)
class Reference:
    """What the forward gave, per sequence.

    Attributes:
        rows: float32 ``[N, L, H]``, in the order of the layers asked for.
        greedy: the argmax of the logits after the last token; empty where the class has no head.
    """

    rows: list[Rows]
    greedy: list[int]


def compute(
    model: Path,
    sequences: Sequence[Ids],
    layers: Sequence[int],
    folder: Path,
    *,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    timeout_s: float = 1800,
    stop: threading.Event | None = None,
) -> Reference:
    """``forward`` in a process of its own.

    Args:
        model: model folder.
        sequences: token ids, one array per sample.
        layers: layer ids in vLLM's numbering.
        folder: an existing folder for the files that cross to the other process; they are removed.
        dtype: what the forward computes in.
        trust_remote_code: run model code that lies in the model folder.
        timeout_s: seconds until the process is given up.
        stop: when set, the process is killed.

    Raises:
        ReferenceFailedError: the process failed or took too long; carries the end of what it printed.
    """
    request, source, result = (folder / f"reference.{name}" for name in ("json", "in.npz", "out.npz"))
    package = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))}
    try:
        what = {"model": str(model), "layers": list(layers), "dtype": dtype, "trust_remote_code": trust_remote_code}
        request.write_text(json.dumps(what), encoding="utf-8")
        np.savez(source, *sequences)
        command = [sys.executable, "-m", "extract_core.engine.reference", str(request), str(source), str(result)]
        printed = _run(
            command, environment, timeout_s, stop or threading.Event(), f"the Hugging Face forward of {model}"
        )
        if not result.exists():
            lines = printed.strip().splitlines() or ["no message"]
            raise ReferenceFailedError(
                f"the Hugging Face forward of {model} failed: {lines[-1]}", log_tail=printed[-_TAIL:]
            )
        with np.load(result) as stored:
            return Reference([stored[f"rows{n}"] for n in range(len(sequences))], stored["greedy"].tolist())
    finally:
        for path in (request, source, result):
            path.unlink(missing_ok=True)


def _run(command: list[str], environment: dict[str, str], timeout_s: float, stop: threading.Event, what: str) -> str:
    """What the command printed as errors when it ended, however it ended."""
    # The process ends with this one, also when this one is killed (guard.die_with_parent).
    process = subprocess.Popen(
        command,
        env=environment | {guard.PARENT: str(os.getpid())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    deadline = time.monotonic() + timeout_s
    reason = ""
    while True:
        try:
            _, printed = process.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            if stop.is_set() or time.monotonic() > deadline:
                reason = "was stopped" if stop.is_set() else f"was given up after {timeout_s:.0f} s"
                process.kill()
            continue
        except BaseException:
            process.kill()
            process.wait()
            raise
        if reason:
            raise ReferenceFailedError(f"{what} {reason}", log_tail=printed[-_TAIL:])
        return printed


def forward(
    model_path: str,
    sequences: Sequence[Ids],
    layers: Sequence[int],
    *,
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> Reference:
    """States of every sequence, in this process, one sequence at a time.

    Id k < n is the input of block k, which is Hugging Face's ``hidden_states[k]``; id n is the output of the last
    block, which Hugging Face returns only after the final norm.

    Raises:
        LayerIdError: an id is not in 0..n.
        EngineIncompatibleError: the decoder blocks were not found.
    """
    import torch

    model = _load(model_path, dtype, trust_remote_code)
    n = model.config.get_text_config().num_hidden_layers
    _, blocks = decoder_blocks(model, n)
    if not set(layers) <= set(range(n + 1)):
        raise LayerIdError(f"layers {list(layers)} are not all in 0..{n}")
    seen: dict[int, Any] = {}

    def keep_input(k: int) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[k] = (args[0] if args else kwargs["hidden_states"]).detach().float().clone()

        return hook

    def keep_output(_module: Any, _args: Any, output: Any) -> None:
        seen[n] = (output[0] if isinstance(output, tuple) else output).detach().float().clone()

    for k in set(layers) - {n}:
        blocks[k].register_forward_pre_hook(keep_input(k), with_kwargs=True)
    blocks[-1].register_forward_hook(keep_output)
    options: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    rows: list[Rows] = []
    greedy: list[int] = []
    with torch.inference_mode():
        for ids in sequences:
            seen.clear()
            output = model(input_ids=torch.from_numpy(np.asarray(ids, dtype=np.int64))[None], **options)
            rows.append(torch.stack([seen[k].reshape(len(ids), -1) for k in layers], dim=1).numpy())
            if getattr(output, "logits", None) is not None:
                greedy.append(int(output.logits[0, -1].argmax()))
    return Reference(rows, greedy)


def _load(model_path: str, dtype: str, trust_remote_code: bool) -> Any:
    import torch
    import transformers

    config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    named = getattr(transformers, (config.get("architectures") or [""])[0], None)
    # Eager attention is the only one that every class computes in full (soft caps, sinks).
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    if named is None or (trust_remote_code and "auto_map" in config):
        loader = transformers.AutoModelForCausalLM
        options["trust_remote_code"] = trust_remote_code
    else:
        # The class that the checkpoint names, under its own model type: a checkpoint's may be unknown to transformers
        # although its class is not (Kimi-K2 is a DeepSeek-V3), and decides how weights are renamed.
        loader = named
        kind = named.config_class
        options["config"] = kind.from_dict({**config, "model_type": kind.model_type})
    model, loaded = loader.from_pretrained(model_path, output_loading_info=True, **options)
    for problem in ("missing_keys", "mismatched_keys"):
        if loaded[problem]:
            names = sorted(map(str, loaded[problem]))
            raise ReferenceFailedError(
                f"transformers {transformers.__version__} would leave {len(names)} weights of {type(model).__name__} "
                f"random ({problem}: {', '.join(names[:3])}): no reference"
            )
    return model.eval()


def main(request: str, source: str, result: str) -> None:
    """Run the command line: read the request and the sequences, write rows and greedy tokens."""
    what = json.loads(Path(request).read_text(encoding="utf-8"))
    with np.load(source) as stored:
        sequences = [stored[name] for name in stored.files]
    made = forward(
        what["model"],
        sequences,
        what["layers"],
        dtype=what["dtype"],
        trust_remote_code=what["trust_remote_code"],
    )
    arrays: dict[str, Any] = {f"rows{n}": rows for n, rows in enumerate(made.rows)}
    np.savez(result, **arrays, greedy=np.array(made.greedy, dtype=np.int64))


if __name__ == "__main__":
    guard.die_with_parent()
    main(*sys.argv[1:])
