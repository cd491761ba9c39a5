"""Many samples: ``python -m benchmarks.scale [--samples 10000,100000,1000000] [--parts planner,reader] [--dir DIR]``.

``planner`` runs ``benchmarks.planner`` for each size. ``reader`` publishes a version of so many samples with the store
itself (lengths as there, rows of two bytes, 1,000 samples per shard; 10 GB of disk for 1,000,000), then opens it
in fresh processes and reads one sample at random: with its files out of the page cache (``cold``), and in it. Seconds
are without importing torch and Coresample, which is said apart; peak memory is that of the whole process. Figures go to
``benchmarks/results/``; seconds per 1,000 samples of each size, which say whether cost is linear, are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import planner
from extract_core.store import layout
from extract_core.store.index import INDEX_SCHEMA, write_index
from extract_core.store.records import Accounting, Manifest, ShardRef, Totals
from extract_core.store.root import Root
from extract_core.store.seal import seal_shard
from extract_core.store.shard import SealedShard, Segment
from extract_core.store.versions import publish
from extract_core.store.writer import ShardWriter

RESULTS = Path(__file__).parent / "results" / "scale.json"
SIZES = "10000,100000,1000000"
PER_SHARD, REPEATS = 1000, 3
FINGERPRINT = "5ca1e" * 8


class Version:
    """Makes a version, a shard at a time; counts what the manifest has to say."""

    def __init__(self, folder: Path, count: int) -> None:
        self.root, self.count = Root.open(str(folder)), count
        self.shards: list[ShardRef] = []
        self.tokens = 0

    def tables(self) -> Iterator[pa.Table]:
        """The index, and the shards on the way."""
        samples = iter(planner.Samples(self.count, 0))
        while held := list(islice(samples, PER_SHARD)):
            lengths = [len(sample.token_ids) for sample in held]
            tokens = np.concatenate([sample.token_ids for sample in held])
            sealed = self._shard(lengths, tokens)
            columns = {
                "sample_id": [sample.sample_id for sample in held],
                "source_file": [sample.source.file for sample in held],
                "source_row": [sample.source.row for sample in held],
                "source_turn": [sample.source.turn for sample in held],
                "split": ["train" if n % 10 else "test" for n in range(len(held))],
                "n_tokens": lengths,
                "token_ids": pa.ListArray.from_arrays(np.cumsum([0, *lengths]).astype(np.int32), tokens),
                "loss_mask": [sample.loss_mask for sample in held],
                "mask_method": [sample.mask_method for sample in held],
                "truncated": [sample.truncated for sample in held],
                "segments": [
                    [
                        {
                            "shard": sealed.sha256,
                            "first_row": s.first_row,
                            "rows": s.rows,
                            "byte_offset": s.byte_offset,
                            "byte_length": s.byte_length,
                            "xxh3": s.xxh3,
                        }
                    ]
                    for s in sealed.segments
                ],
                "norm_mean": [[1.0]] * len(held),
                "norm_max": [[1.0]] * len(held),
                "greedy_token": [None] * len(held),
                "top1_token": [None] * len(held),
            }
            yield pa.table(columns, INDEX_SCHEMA)

    def _shard(self, lengths: list[int], tokens: np.ndarray[Any, Any]) -> SealedShard:
        path = Path(self.root.url) / f".tmp-{uuid.uuid4().hex}"
        writer = ShardWriter(path, rows=len(tokens), layer_ids=[1], hidden_size=1, dtype="bfloat16")
        writer.write_rows(0, tokens.astype(np.uint16).data.cast("B"))
        writer.write_token_ids(0, tokens)
        writer.close()
        starts = np.cumsum([0, *lengths]).tolist()
        keep = [Segment(first, rows) for first, rows in zip(starts, lengths, strict=False)]
        sealed = seal_shard(path, keep=keep, metadata={"fingerprint": FINGERPRINT}, durable=False)
        path.rename(self._place(sealed))
        place = layout.shard_path(sealed.sha256)
        self.shards.append(ShardRef(path=place, sha256=sealed.sha256, nbytes=sealed.nbytes, rows=sealed.rows))
        self.tokens += len(tokens)
        return sealed

    def _place(self, sealed: SealedShard) -> Path:
        """Renamed, not ``put_file``: a thousand fsyncs are no part of what is measured."""
        place = Path(self.root.url) / layout.shard_path(sealed.sha256)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def publish(self) -> dict[str, Any]:
        """Write everything; seconds are those of index and manifest without making samples and shards."""
        making = _Clock(self.tables())
        began = time.perf_counter()
        Path(self.root.url).mkdir(parents=True, exist_ok=True)
        index = write_index(self.root, making)
        attempt = uuid.uuid4().hex

        def build(version: int) -> Manifest:
            return Manifest(
                version=version,
                attempt=attempt,
                coresample_version="0",
                fingerprint=FINGERPRINT,
                spec={"model": {"name": "none"}},
                layer_ids=[1],
                n_layers=2,
                hidden_size=1,
                dtype="bfloat16",
                index=index,
                shards=self.shards,
                accounting=Accounting(input=self.count, published=self.count),
                totals=Totals(samples=self.count, tokens=self.tokens, bytes=sum(s.nbytes for s in self.shards)),
            )

        publish(self.root, build, attempt)
        return {
            "tokens": self.tokens,
            "shards": len(self.shards),
            "index_mib": index.nbytes // 2**20,
            "index_and_publish_s": round(time.perf_counter() - began - making.seconds, 2),
            "publish_peak_mib": _peak_mib(),
        }


class _Clock:
    """Counts the seconds that an iterator takes."""

    def __init__(self, items: Iterator[pa.Table]) -> None:
        self._items, self.seconds = items, 0.0

    def __iter__(self) -> Iterator[pa.Table]:
        return self

    def __next__(self) -> pa.Table:
        began = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - began


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def read_one(folder: str) -> dict[str, Any]:
    """Open the version and read a sample at random, in this process."""
    began = time.perf_counter()
    import torch  # noqa: F401

    from extract_core.reader import HiddenStatesDataset

    imported, before, used = time.perf_counter(), _peak_mib(), time.process_time()
    data = HiddenStatesDataset(folder)
    opened = time.perf_counter()
    position = int(np.random.default_rng().integers(len(data)))
    item = data[position]
    done = time.perf_counter()
    assert len(item["input_ids"]) == len(item["hidden_states"])
    return {
        "import_s": round(imported - began, 2),
        "open_s": round(opened - imported, 3),
        "first_sample_s": round(done - opened, 3),
        "cpu_s": round(time.process_time() - used, 2),
        "before_mib": before,
        "peak_mib": _peak_mib(),
    }


def more(folder: str) -> dict[str, Any]:
    """Other ways to use it, in one process: further samples at random, in order, and one split."""
    from extract_core.reader import HiddenStatesDataset

    data = HiddenStatesDataset(folder)
    chosen = np.random.default_rng(0).integers(0, len(data), 200).tolist()
    times = {}
    for name, positions in (("random", chosen), ("in_order", range(2000))):
        began = time.perf_counter()
        for position in positions:
            data[position]
        times[f"{name}_ms"] = round(1000 * (time.perf_counter() - began) / len(positions), 2)
    began = time.perf_counter()
    assert len(HiddenStatesDataset(folder, split="test")) == len(data) // 10
    return times | {"open_split_s": round(time.perf_counter() - began, 2), "more_peak_mib": _peak_mib()}


def _forget(folder: Path) -> None:
    """Let the system drop the pages of all files, so that they are read from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file, contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _alone(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", *words], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def reader(count: int, where: Path | None) -> dict[str, Any]:
    """Publish a version of so many samples, and use it; every figure from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="coresample-scale-", dir=where) as name:
        folder = Path(name) / "data"
        made = _alone("--make", str(folder), "--samples", str(count))
        cold, warm = [], []
        for _ in range(REPEATS):
            _forget(folder)
            cold.append(_alone("--read", str(folder)))
            warm.append(_alone("--read", str(folder)))
        slowest = {
            f"{kind}_{name}": max(run[name] for run in runs)
            for kind, runs in (("cold", cold), ("warm", warm))
            for name in ("open_s", "first_sample_s", "cpu_s", "import_s", "peak_mib")
        }
        result = {"samples": count, **made, **slowest, "before_mib": cold[0]["before_mib"]}
        result |= _alone("--more", str(folder))
        shutil.rmtree(folder)
    return result


def linearity(runs: list[dict[str, Any]], name: str) -> str:
    """Seconds per 1,000 samples of each size."""
    each = (f"{run['samples']:,}: {1000 * run[name] / run['samples']:.4f}" for run in runs)
    return f"{name} per 1,000 samples: " + ", ".join(each)


def main() -> None:
    """Measure each size and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", default=SIZES, help="sizes, one after the other")
    parser.add_argument("--parts", default="planner,reader", help="what to measure")
    parser.add_argument("--dir", type=Path, help="where the version is made; default: the folder for temporary files")
    for name in ("make", "read", "more"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        print(json.dumps(Version(Path(options.make), int(options.samples)).publish()))
    elif options.read:
        print(json.dumps(read_one(options.read)))
    elif options.more:
        print(json.dumps(more(options.more)))
    else:
        _measure(options)


def _measure(options: argparse.Namespace) -> None:
    if "planner" in options.parts:
        runs = planner.sizes(options.samples.split(","), system=0, share=True)
        print(linearity(runs, "seconds"), linearity(runs, "cpu_s"), sep="\n", flush=True)
    if "reader" not in options.parts:
        return
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"reader": []}
    runs = []
    for count in map(int, options.samples.split(",")):
        found = reader(count, options.dir)
        runs.append(found)
        print(json.dumps(found), flush=True)
        about = {"date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "cpu": platform.machine()}
        others = [run for run in known["reader"] if run["samples"] != count]
        known["reader"] = sorted([*others, found | about], key=lambda run: int(run["samples"]))
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(linearity(runs, "index_and_publish_s"))
    print("opening and one sample, cold:", *(round(r["cold_open_s"] + r["cold_first_sample_s"], 3) for r in runs), "s")


if __name__ == "__main__":
    main()
