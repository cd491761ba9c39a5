"""Continuous extraction with faults at random: ``python -m tests.faults.soak --minutes 45``.

One process runs job after job with a real engine that stays up between them, into moto through the fault proxy. At
random the engine is killed, a run in another process is killed, and requests fail. Memory and open files of the
process, and tokens a second, are sampled; after a warm-up their fitted lines must be flat.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from extract_core import local, pipeline, retries, spool
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.errors import CoresampleError
from extract_core.job import prepare
from extract_core.settings import load_job
from extract_core.store.root import Root
from extract_core.store.verify import verify
from tests import tiny
from tests.faults import kit, record, servers
from tests.faults.proxy import FaultProxy
from tests.faults.storejob import rss

RATES = {"500": 0.01, "503": 0.01, "reset": 0.01, "500 after": 0.005, "reset after": 0.005, "truncated": 0.005}
CHATS = 40
RESULT = record.ROOT / "benchmarks" / "results" / "soak.json"
LIMITS = {"memory MiB": 100.0, "open files": 20.0, "tokens a second": None}
"""Most growth from warm-up to end; throughput may lose a fifth of its mean."""


FEWEST_JOBS = 12
"""Jobs without which nothing can be said of throughput."""
PROBE = bytes(16 * 2**20)


class Sampler:
    """Takes memory, open files and the machine's speed every few seconds, and the rate of each job.

    Other programs come and go on a shared machine: a job's tokens a second are told as they would have been at the
    machine's usual speed, which is that of one thread hashing ``PROBE``.
    """

    def __init__(self, interval_s: float):
        self.interval_s, self.started = interval_s, time.monotonic()
        self.rows: list[tuple[float, float, float]] = []
        self.speeds: list[tuple[float, float]] = []
        self.rates: list[tuple[float, float, float]] = []
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._ended.wait(self.interval_s):
            self.rows.append((self.now, rss() / 2**20, len(os.listdir("/proc/self/fd"))))
            began = time.perf_counter()
            hashlib.sha256(PROBE).digest()
            self.speeds.append((self.now, len(PROBE) / 1e6 / (time.perf_counter() - began)))

    def job(self, began: float, tokens: int) -> None:
        """A job that began at ``now`` seconds has ended."""
        during = [speed for at, speed in self.speeds if at >= began]
        speed = float(np.mean(during)) if during else self.speeds[-1][1] if self.speeds else 1.0
        self.rates.append((self.now, tokens / (self.now - began), speed))

    def at_usual_speed(self) -> list[tuple[float, float]]:
        """Seconds and tokens a second of each job."""
        usual = float(np.median([speed for _, _, speed in self.rates]))
        return [(at, rate * usual / speed) for at, rate, speed in self.rates]

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def stop(self) -> None:
        """No more samples."""
        self._ended.set()


def fitted(points: list[tuple[float, float]], limit: float | None, seconds: float) -> dict[str, Any]:
    """A straight line through samples, and whether it is flat.

    Args:
        points: seconds and value.
        limit: most growth over the whole time; None: at most a fifth of the mean may be lost.
        seconds: from the first sample to the last.
    """
    times, values = np.array(points).T
    slope, start = np.polyfit(times, values, 1)
    doubt = 2 * _slope_error(times, values)
    hours = seconds / 3600
    if limit is None:
        most = -0.2 * float(values.mean()) / hours
        flat = (slope + doubt) * 3600 >= most
    else:
        most = limit / hours
        flat = (slope - doubt) * 3600 <= most
    return {
        "first": float(start + slope * times[0]),
        "last": float(start + slope * times[-1]),
        "slope_per_hour": float(slope * 3600),
        "limit_per_hour": most,
        "flat": bool(flat),
        "samples": len(points),
    }


def _slope_error(times: Any, values: Any) -> float:
    """Standard error of the slope."""
    if len(times) < 3:
        return 0.0
    slope, start = np.polyfit(times, values, 1)
    rest = values - (slope * times + start)
    return float(np.sqrt((rest**2).sum() / (len(times) - 2) / ((times - times.mean()) ** 2).sum()))


class Soak:
    """Everything that runs meanwhile."""

    def __init__(self, folder: Path, minutes: float, seed: int, interval_s: float):
        self.folder, self.seconds = folder, minutes * 60
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.jobs = self.tokens = self.versions = 0
        self.sampler = Sampler(interval_s)
        self.case = kit.Case("soak", f"{minutes:g} minutes", folder)
        self.model = tiny.make_model(folder / "model")
        self.server = servers.start("moto")
        self.proxy = FaultProxy(self.server.endpoint, seed).start()
        self.engine: EngineSupervisor | None = None
        self._over = threading.Event()

    def job(self, number: int) -> tuple[Path, str]:
        """A job with chats of its own, and its root."""
        chats = tiny.write_chats(self.folder / "chats.jsonl", CHATS, seed=number)
        url = self.server.url()
        path = tiny.write_job(
            self.folder / "job.yaml",
            model=self.model,
            chats=chats,
            root=Path("unused"),
            chat={"max_length": tiny.LIMIT - 1},  # the engine of the first job then fits every other
            preflight={"reference": "never"},
            engine={
                "kv_cache_bytes": "256MiB",
                "max_num_batched_tokens": 256,
                "max_num_seqs": 8,
                "step_timeout_s": 30,
            },
            store={
                "shard_bytes": "2MiB",
                "spool": str(self.folder / "spool"),
                "storage_options": self.server.options(self.proxy.endpoint),
            },
        )
        return path, url

    def run(self) -> dict[str, Any]:
        """Jobs until the time is over."""
        trouble = threading.Thread(target=self._trouble, daemon=True)
        trouble.start()
        spool_folder = spool.RunFolder(self.folder / "spool-engine")
        number = 0
        try:
            while self.sampler.now < self.seconds:
                number += 1
                self._one(number, spool_folder)
        finally:
            self._over.set()
            trouble.join(60)
            if self.engine is not None:
                self.engine.close()
            spool_folder.close()
            self.sampler.stop()
            self.proxy.stop()
            self.server.stop()
        self.case.no_orphans()
        return self._document()

    def _one(self, number: int, folder: spool.RunFolder) -> None:
        path, url = self.job(number)
        settings = load_job(path, {"root": url})
        began = self.sampler.now
        self.proxy.rates = dict(RATES)
        for _ in range(5):
            try:
                job = retries.with_retries(lambda: prepare(settings))
                if self.engine is None:
                    self.engine = pipeline.make_supervisor(job, folder)
                local.extract(job, self.engine)
                report = retries.with_retries(lambda job=job: pipeline.validate(job))
                manifest = retries.with_retries(lambda job=job, report=report: pipeline.publish(job, report))
                break
            except CoresampleError as error:
                self.faults["runs refused"] += 1
                print(f"  {type(error).__name__}: {error}", file=sys.stderr)
        else:
            raise AssertionError(f"job {number} did not come to its end in 5 runs")
        self.jobs += 1
        self.tokens += manifest.totals.tokens
        self.sampler.job(began, manifest.totals.tokens)
        self.proxy.quiet()
        if number % 3 == 0:
            self._killed_run(number)
        root = Root.open(url, self.server.options())
        found = verify(root)
        assert found.ok, [str(problem) for problem in found.problems[:5]]
        assert manifest.accounting.total == CHATS
        self.versions += 1
        _remove(root)

    def _killed_run(self, number: int) -> None:
        """A run in another process is killed, and this process takes its job over."""
        path, url = self.job(100_000 + number)
        other = self.case.start(str(path), url, "--stop-at", "2", module="tests.faults.storejob")
        kit.wait_stopped(other)
        other.send_signal(signal.SIGKILL)
        other.wait()
        self.faults["workers killed"] += 1
        outcome = self.case.job(path, url)
        assert outcome.code == 0, outcome.text
        root = Root.open(url, self.server.options())
        assert verify(root).ok
        self.versions += 1
        _remove(root)

    def _trouble(self) -> None:
        """Kill the engine now and then."""
        while not self._over.wait(self.random.uniform(30, 120)):
            engine = self.engine
            pid = engine._engine.pid if engine is not None and engine._engine is not None else None
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                    self.faults["engines killed"] += 1

    def _document(self) -> dict[str, Any]:
        jobs = [at for at, _, _ in self.sampler.rates]
        warm_up = min(max(min(self.seconds / 4, 300.0), *jobs[:4]), self.sampler.now * 0.6)
        rows = [row for row in self.sampler.rows if row[0] >= warm_up]
        usual = self.sampler.at_usual_speed()
        rates = [row for row in usual if row[0] >= warm_up] or usual
        series = {
            "memory MiB": [(t, memory) for t, memory, _ in rows],
            "open files": [(t, files) for t, _, files in rows],
            "tokens a second": rates,
        }
        lines = {
            name: fitted(points, LIMITS[name], self.sampler.now - warm_up)
            for name, points in series.items()
            if len(points) >= (FEWEST_JOBS if name == "tokens a second" else 2)
        }
        return {
            "minutes": self.sampler.now / 60,
            "jobs": self.jobs,
            "tokens": self.tokens,
            "versions": self.versions,
            "faults": {**self.faults, "requests failed": self.proxy.injected},
            "interval_s": self.sampler.interval_s,
            "warm_up_s": warm_up,
            "lines": lines,
            "rates": [[round(value, 1) for value in row] for row in self.sampler.rates],
            "samples": [
                [round(value, 1) for value in row] for row in self.sampler.rows[:: 1 + len(self.sampler.rows) // 200]
            ],
        }


def _remove(root: Root) -> None:
    """moto keeps everything in memory, which would slow it down."""
    fs, target = root._open_remote()
    fs.rm(target, recursive=True)


def main() -> int:
    """Run, write JSON, print a summary; 1 where something is not flat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interval", type=float, default=5, help="seconds between samples")
    parser.add_argument("--json", type=Path, help="where figures go; default: benchmarks/results from 30 minutes on")
    chosen = parser.parse_args()
    os.environ.update(servers.CREDENTIALS)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="coresample-soak-") as folder:
        document = Soak(Path(folder), chosen.minutes, chosen.seed, chosen.interval).run()
    long = chosen.minutes >= 30
    path = chosen.json or (RESULT if long else record.CACHE / "soak.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(
        f"{document['minutes']:.1f} minutes, {document['jobs']} jobs, {document['tokens']:,} tokens, "
        f"{document['faults']}"
    )
    for name, line in document["lines"].items():
        verdict = "flat" if line["flat"] else "NOT FLAT"
        print(
            f"  {name}: {line['first']:,.0f} to {line['last']:,.0f}, {line['slope_per_hour']:+,.1f} an hour: {verdict}"
        )
    print(f"  {path}")
    return int(not all(line["flat"] for line in document["lines"].values()))


if __name__ == "__main__":
    sys.exit(main())
