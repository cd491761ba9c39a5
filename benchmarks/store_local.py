"""The local write path against plain safetensors files, in one run.

Both write the same rows to the same disk and end when everything is durable. Ours: rows arrive in steps, as an engine
makes them (chunks of several samples at a time), are written to their places in a spool file, and a shard is sealed
(header, fsync, xxh3 of each sample, sha256) and put into the root by another thread while the next one is written, as
in a run. Plain: ``safetensors.torch.save_file`` of one shard after the other, each with fsync, and no checksum at all.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import save_file

from extract_core.store import layout
from extract_core.store.encoding import NONE
from extract_core.store.root import Root
from extract_core.store.seal import seal_shard, seal_target
from extract_core.store.shard import Segment
from extract_core.store.writer import ShardWriter

LAYERS, HIDDEN, STEP, IN_STEP = 4, 4096, 2048, 8
"""Rows of [4, 4096] bfloat16, 32 KiB each; steps of 2,048 rows from 8 samples at a time."""
THREADS = 2
QUIET = 0.2


@dataclass(frozen=True)
class Load:
    """Rows of one shard and how they arrive: per step, (source row, target row, rows)."""

    states: torch.Tensor
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    samples: list[Segment]
    steps: list[list[tuple[int, int, int]]]


def make_load(shard_bytes: int, seed: int = 0) -> Load:
    """Random rows in samples of 128 to 2,048, in the order in which an engine with 8 samples in flight makes them."""
    rows = shard_bytes // (LAYERS * HIDDEN * 2)
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, LAYERS, HIDDEN, generator=generator, dtype=torch.float32).to(torch.bfloat16)
    samples, first = [], 0
    while first < rows:
        size = min(rng.randint(128, 2048), rows - first)
        samples.append(Segment(first, size))
        first += size
    return Load(states, np.arange(rows, dtype=np.int32), samples, list(_steps(samples, rng)))


def _steps(samples: list[Segment], rng: random.Random) -> Iterator[list[tuple[int, int, int]]]:
    waiting = [[segment.first_row, segment.rows] for segment in samples]
    rng.shuffle(waiting)
    flying: list[list[int]] = []
    while waiting or flying:
        while waiting and len(flying) < IN_STEP:
            flying.append(waiting.pop())
        step, at = [], 0
        for sample in flying:
            count = min(sample[1], STEP // IN_STEP)
            step.append((sample[0], sample[0], count))
            sample[0], sample[1], at = sample[0] + count, sample[1] - count, at + count
        flying = [sample for sample in flying if sample[1]]
        yield step


class Ours:
    """Coresample's path; ``times`` sums the seconds of each part over all shards."""

    def __init__(self, folder: Path, spool: Path, load: Load) -> None:
        self.folder, self.spool, self.load = folder, spool, load
        self.times: dict[str, float] = {}

    def write(self, shards: int) -> None:
        """Write that many shards."""
        root = Root.open(str(self.folder))
        self.spool.mkdir(parents=True, exist_ok=True)
        pending: Future[None] | None = None
        with ThreadPoolExecutor(THREADS) as writers, ThreadPoolExecutor(1) as committer:
            for number in range(shards):
                path = self._capture(writers, number)
                if pending is not None:
                    started = time.perf_counter()
                    pending.result()
                    self._add("wait", started)
                pending = committer.submit(self._commit, root, path, number)
            assert pending is not None
            started = time.perf_counter()
            pending.result()
            self._add("last", started)

    def _capture(self, writers: ThreadPoolExecutor, number: int) -> Path:
        started = time.perf_counter()
        load = self.load
        path = self.spool / f"{number}-{os.getpid()}.tmp"
        writer = ShardWriter(
            path, rows=len(load.tokens), layer_ids=list(range(LAYERS)), hidden_size=HIDDEN, dtype="bfloat16"
        )
        raw = memoryview(load.states.view(torch.uint8).numpy().reshape(-1))
        width = writer.row_bytes

        def put(span: tuple[int, int, int]) -> None:
            source, target, rows = span
            writer.write_rows(target, raw[source * width : (source + rows) * width])
            writer.write_token_ids(target, load.tokens[source : source + rows])

        for step in load.steps:
            list(writers.map(put, step))
        writer.close()
        self._add("rows", started)
        return path

    def _commit(self, root: Root, path: Path, number: int) -> None:
        started = time.perf_counter()
        target = seal_target(root, path, NONE)
        sealed = seal_shard(path, keep=self.load.samples, metadata={"shard": str(number)}, target=target)
        self._add("seal", started)
        started = time.perf_counter()
        root.put_file(sealed.path, layout.shard_path(sealed.sha256), xxh3_128=sealed.xxh3_128)
        path.unlink(missing_ok=True)
        self._add("put", started)

    def _add(self, name: str, started: float) -> None:
        self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - started


def plain(folder: Path, load: Load, shards: int) -> None:
    """One safetensors file after the other, each durable before the next."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = torch.from_numpy(load.tokens)
    for number in range(shards):
        path = folder / f"{number}.safetensors"
        save_file({"hidden_states": load.states, "token_ids": tokens}, path, metadata={"shard": str(number)})
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _condition(folder: Path, load: Load, shards: int) -> None:
    """Leave memory and disk in the same state before each measurement: plain files, written and removed.

    What a file costs depends on the pages that those before it left behind: plain files after plain files were twice as
    fast as plain files after ours. So plain files get what is best for them.
    """
    plain(folder, load, shards)
    shutil.rmtree(folder)


def _wait_for_quiet(limit_s: float) -> None:
    """Until other processes use little of the machine, or the limit is reached."""
    deadline = time.monotonic() + limit_s
    while psutil.cpu_percent(0.5) > QUIET * 100 and time.monotonic() < deadline:
        pass


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def run(folder: Path, *, rounds: int, shards: int, shard_bytes: int, spool: Path | None = None) -> dict[str, Any]:
    """Rounds of both, in alternating order; bytes per second and the ratio of each pair.

    Pairs during which other processes took more than ``QUIET`` of the processors are kept in ``pairs`` and left out of
    the figures, unless that leaves none.
    """
    load = make_load(shard_bytes)
    size = shards * (load.states.nbytes + load.tokens.nbytes)
    pairs = []
    times: dict[str, float] = {}
    for number in range(rounds + 1):
        seconds: dict[str, float] = {}
        for name in ("ours", "plain") if number % 2 else ("plain", "ours"):
            _wait_for_quiet(3)
            _condition(folder / "before", load, shards)
            ours = Ours(folder / "ours", spool or folder / "ours" / ".spool", load)
            busy, cpu, started = _busy_s(), time.process_time(), time.perf_counter()
            if name == "ours":
                ours.write(shards)
            else:
                plain(folder / "plain", load, shards)
            seconds[name] = time.perf_counter() - started
            seconds[f"{name}_cpu"] = time.process_time() - cpu
            others = _busy_s() - busy - seconds[f"{name}_cpu"]
            seconds[f"{name}_others"] = max(0.0, others) / (seconds[name] * (os.cpu_count() or 1))
            if number:
                for part, took in ours.times.items():
                    times[part] = times.get(part, 0.0) + took
            shutil.rmtree(folder / name)
            if spool is not None:
                shutil.rmtree(spool, ignore_errors=True)
        if number:  # the first pair warms caches and allocators
            pairs.append({**seconds, "ratio": seconds["plain"] / seconds["ours"]})
    every = pairs
    pairs = [pair for pair in every if max(pair["ours_others"], pair["plain_others"]) <= QUIET] or every
    ratios = sorted(pair["ratio"] for pair in pairs)
    return {
        "bytes": size,
        "shards": shards,
        "spool": "apart" if spool else "beside the root",
        "pairs": every,
        "quiet_pairs": sum(max(pair["ours_others"], pair["plain_others"]) <= QUIET for pair in every),
        "ours_mb_s": size / 1e6 / median(pair["ours"] for pair in pairs),
        "plain_mb_s": size / 1e6 / median(pair["plain"] for pair in pairs),
        "ours_cpu_s_per_gb": median(pair["ours_cpu"] for pair in pairs) / (size / 1e9),
        "plain_cpu_s_per_gb": median(pair["plain_cpu"] for pair in pairs) / (size / 1e9),
        "ratio_median": median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "ratio_of_fastest": min(pair["plain"] for pair in pairs) / min(pair["ours"] for pair in pairs),
        "parts_s": {name: took / rounds for name, took in times.items()},
    }
