"""The lossless encoding on real hidden states: ratio, and speed of one core.

The states are those of a published dataset (the demo's: SmolLM2-135M on real chats). Encoding and decoding take turns,
sample by sample as a shard holds them, in one thread pinned to one core. Speeds are bytes of plain rows per second of
this thread's processor time, so that other work on the machine counts less; wall time is kept, too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from extract_core.reader import HiddenStatesDataset
from extract_core.store.encoding import BF16_SPLIT_ZSTD, FrameEncoder, decode_frame


def load(root: Path, most_bytes: int) -> tuple[list[np.ndarray[Any, np.dtype[np.uint16]]], HiddenStatesDataset]:
    """Rows of samples as bits of bfloat16 ``[N, L, H]``, in a fixed random order, up to about ``most_bytes``."""
    dataset = HiddenStatesDataset(root)
    samples, size = [], 0
    for position in np.random.default_rng(0).permutation(len(dataset)):
        rows = dataset[int(position)]["hidden_states"]
        samples.append(rows.contiguous().view(torch.uint16).numpy().copy())
        size += samples[-1].nbytes
        if size >= most_bytes:
            break
    return samples, dataset


class _Frames:
    """Makes frames one after another in the same memory, as a writer hands them on."""

    def __init__(self, layers: int, hidden_size: int, most_bytes: int) -> None:
        self._encoder = FrameEncoder(layers, hidden_size)
        self._buffer = memoryview(bytearray(most_bytes + 2**20))

    def make(self, sample: np.ndarray[Any, np.dtype[np.uint16]]) -> memoryview:
        """The frame of a sample; valid until the next one."""
        at = 0
        for piece in self._encoder.blocks(sample):
            self._buffer[at : at + len(piece)] = piece
            at += len(piece)
        return self._buffer[:at]


def run(root: Path, *, rounds: int, most_bytes: int = 64 * 2**20) -> dict[str, Any]:
    """Encode and decode every sample ``rounds`` times; ratio, medians and spread."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    samples, dataset = load(root, most_bytes)
    _, layers, hidden = samples[0].shape
    size = sum(sample.nbytes for sample in samples)
    encoder = _Frames(layers, hidden, max(sample.nbytes for sample in samples))
    speeds: dict[str, list[float]] = {name: [] for name in ("encode", "encode_wall", "decode", "decode_wall")}
    frames = [bytes(encoder.make(sample)) for sample in samples]
    for frame, sample in zip(frames, samples, strict=True):
        if not np.array_equal(decode_frame(frame, len(sample), layers, hidden, "frame"), sample):
            raise AssertionError("the encoding lost something")
    for _ in range(rounds):
        for name, work in (
            ("encode", lambda number: encoder.make(samples[number])),
            ("decode", lambda number: decode_frame(frames[number], len(samples[number]), layers, hidden, "frame")),
        ):
            wall, cpu = time.perf_counter(), time.thread_time()
            for number in range(len(samples)):
                work(number)
            speeds[name].append(size / 1e6 / (time.thread_time() - cpu))
            speeds[f"{name}_wall"].append(size / 1e6 / (time.perf_counter() - wall))
    packed = sum(map(len, frames))
    by_layer = {}
    for at, layer in enumerate(dataset.layer_ids):
        single = _Frames(1, hidden, max(sample.nbytes for sample in samples))
        alone = sum(len(single.make(np.ascontiguousarray(sample[:, at : at + 1]))) for sample in samples)
        by_layer[str(layer)] = size / layers / alone
    return {
        "encoding": BF16_SPLIT_ZSTD,
        "model": dataset.manifest.provenance.get("model", "").rpartition("/")[2],
        "layer_ids": list(dataset.layer_ids),
        "hidden_size": hidden,
        "samples": len(samples),
        "rows": sum(len(sample) for sample in samples),
        "bytes": size,
        "encoded_bytes": packed,
        "ratio": size / packed,
        "ratio_by_layer": by_layer,
        "rounds": rounds,
        **{
            f"{name}_mb_s": {"median": median(values), "min": min(values), "max": max(values)}
            for name, values in speeds.items()
        },
    }
