"""Planning of many samples: ``python -m benchmarks.planner [--samples 10000,100000,1000000] [--system 1000]``.

Synthetic conversations, a sample per assistant turn, with lengths as ShareGPT has them (3.8 turns on average, some 400
tokens each, cut at 4,096: 1,100 tokens per sample, 2.8 times as many as there are distinct prefixes), in the order of
the input; ``--system`` puts one system prompt of that many tokens before all. Rows are 32 KiB, shards 512 MiB. Each
size runs in a process of its own. Seconds are those of the planner, from tokenized samples to the plan that was written
and read back: what the samples take to be made (here random numbers, else chat template and tokenizer) is left out.
``peak_mib`` is the resident memory of the whole process. Needs 7 GB of temporary files for 1,000,000 samples.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from extract_core.chat.types import Sample, Source
from extract_core.planning.fingerprint import JobSpec
from extract_core.planning.making import make_plan
from extract_core.store.root import Root

RESULTS = Path(__file__).parent / "results" / "planner.json"
ROW_BYTES, SHARD_BYTES, LONGEST, VOCABULARY = 32 * 2**10, 512 * 2**20, 4096, 128_000
TURNS, USER, ANSWER = 2.8, 4.0, 5.6  # mean turns after the first; logarithms of the median lengths of their two sides
SPREAD = 0.7


class Samples:
    """Makes samples and counts the seconds that this takes."""

    def __init__(self, count: int, system: int) -> None:
        self._count, self._system = count, system
        self.seconds = self.cpu_s = 0.0

    def __iter__(self) -> Iterator[Sample]:
        began, used = time.perf_counter(), time.process_time()
        for sample in self._conversations():
            self.seconds += time.perf_counter() - began
            self.cpu_s += time.process_time() - used
            yield sample
            began, used = time.perf_counter(), time.process_time()

    def _conversations(self) -> Iterator[Sample]:
        random = np.random.default_rng(0)
        head = random.integers(0, VOCABULARY, self._system, dtype=np.int32)
        made = row = 0
        while made < self._count:
            row += 1
            turns = int(random.poisson(TURNS)) + 1
            sides = np.exp(random.normal((USER, ANSWER), SPREAD, (turns, 2))).astype(int) + 1
            ends = np.minimum(self._system + np.cumsum(sides.sum(axis=1)), LONGEST)
            ids = np.concatenate([head, random.integers(0, VOCABULARY, int(ends[-1]) - self._system, dtype=np.int32)])
            for turn, end in enumerate(dict.fromkeys(ends.tolist())):
                mask = np.zeros(end, np.uint8)
                mask[-1] = 1
                yield Sample(f"{made:032x}", ids[:end], mask, Source("chats", row, turn), "train", "prefix", False)
                made += 1
                if made == self._count:
                    return


def measure(count: int, system: int, share: bool) -> dict[str, Any]:
    """Plan so many samples in this process; peak memory is the process's."""
    layout = {"row_bytes": ROW_BYTES, "shard_bytes": SHARD_BYTES, "share_prefixes": share}
    spec = JobSpec({"model": {"name": "none"}, "inputs": {}, "layout": layout})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(prefix="coresample-bench-") as folder:
        samples, began, used = Samples(count, system), time.perf_counter(), time.process_time()
        plan = make_plan(Root.open(folder), spec, iter(samples), shard_bytes=SHARD_BYTES)
        seconds = time.perf_counter() - began - samples.seconds
        cpu_s = time.process_time() - used - samples.cpu_s
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    meta = plan.meta
    return {
        "samples": meta.samples,
        "system": system,
        "share_prefixes": share,
        "tokens": meta.tokens,
        "rows": meta.rows,
        "computed": meta.computed,
        "shards": len(meta.shards),
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "making_samples_s": round(samples.seconds, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "before_mib": before // 1024,
        "plan_mib": size // 2**20,
    }


def main() -> None:
    """Measure each size and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", default="10000,100000", help="sizes, one after the other")
    parser.add_argument("--system", type=int, default=0, help="tokens of a system prompt that all samples begin with")
    parser.add_argument("--off", action="store_true", help="without sharing")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(int(options.samples), options.system, not options.off)))
        return
    sizes(options.samples.split(","), system=options.system, share=not options.off)


def sizes(counts: list[str], *, system: int, share: bool) -> list[dict[str, Any]]:
    """Measure each size in a process of its own, print the figures and keep them."""
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"runs": []}
    found = []
    for count in counts:
        words = [sys.executable, "-m", "benchmarks.planner", "--one", "--samples", count]
        words += ["--system", str(system), *([] if share else ["--off"])]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(found[-1]), flush=True)
        same = ("samples", "system", "share_prefixes")
        runs = [run for run in known["runs"] if any(run[name] != found[-1][name] for name in same)]
        key = [found[-1] | {"date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "cpu": platform.machine()}]
        known["runs"] = sorted(runs + key, key=lambda run: [run[name] for name in same])
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
