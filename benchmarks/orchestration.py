"""What Prefect costs: 200 shards of one second each, with the engine's place taken by a clock and random rows.

Everything else is real: a Prefect server with its database (Postgres where it is installed), the flow, its tasks, the
plan, row checks, sealing, commit records, publication. Run in a process of its own for each mode, beside the server.
The clock goes on without a gap to a shard that it was given in advance, as the engine does, and stands still while it
has none.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHARDS, SHARD_S = 200, 1.0
_STEP_S = 0.02
"""The engine reports, and is then asked to go on, so often."""
MODES = ("flow", "loop")
"""The flow of ``coresample run``, and the same steps in a plain loop."""


def run(rounds: int, shards: int = SHARDS) -> dict[str, Any]:
    """Pairs of flow and loop, and what the server's database has grown by.

    Args:
        rounds: pairs.
        shards: of each run.
    """
    from tests import tiny
    from tests.e2e.prefect_site.site import Site

    with tempfile.TemporaryDirectory(prefix="coresample-orchestration-") as name:
        folder = Path(name)
        model = tiny.make_model(folder / "model")
        site = Site(folder / "site").start()
        try:
            sizes, pairs = [_size(site)], []
            for number in range(rounds):
                pair = {}
                for mode in MODES if number % 2 == 0 else MODES[::-1]:
                    pair[mode] = _measure(mode, model, folder / f"{mode}-{number}", shards, site.api)
                    print(
                        f"{mode:5} {pair[mode]['wall_s']:8.1f} s wall, {pair[mode]['overhead']:.2%} beside the engine: "
                        f"{pair[mode]['before_s']:.1f} s before it, {pair[mode]['idle_s']:.1f} s between shards, "
                        f"{pair[mode]['after_s']:.1f} s after it; {pair[mode]['cpu_s']:.1f} s of CPU"
                    )
                sizes.append(_size(site))
                pairs.append(pair)
        finally:
            site.stop()
    overheads = {mode: sorted(pair[mode]["overhead"] for pair in pairs) for mode in MODES}
    growth = [(after - before) * 1000 / shards for before, after in itertools.pairwise(sizes)]
    return {
        "shards": shards,
        "shard_s": SHARD_S,
        "database": "postgres" if site.database is not None else "sqlite",
        "overhead": overheads,
        "database_bytes_per_1000_shards": growth,
        "pairs": pairs,
    }


def _size(site: Any) -> int:
    if site.database is not None:
        return int(site.database.size())
    return sum(path.stat().st_size for path in (site.folder / "server").rglob("*.db*"))


def _measure(mode: str, model: Path, folder: Path, shards: int, api: dict[str, str]) -> dict[str, float]:
    folder.mkdir()
    words = [sys.executable, "-m", "benchmarks.orchestration", mode, str(model), str(folder), str(shards)]
    done = subprocess.run(words, env={**os.environ, **api}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main(mode: str, model: str, folder: str, shards: int) -> None:
    """One run in this process; the last line printed is the result."""
    from unittest import mock

    from extract_core import local, pipeline
    from extract_core.settings import load_job
    from tests import tiny

    kind = _clocked()
    engines: list[Any] = []

    def make(job: Any, folder: Any) -> Any:
        engines.append(kind(job))
        return engines[-1]

    where = Path(folder)
    chats = where / "rows.jsonl"
    chats.write_text(
        "".join(json.dumps({"input_ids": [n % 500, n // 500, *range(20, 120)]}) + "\n" for n in range(shards))
    )
    job = tiny.write_job(
        where / "job.yaml",
        model=Path(model),
        chats=chats,
        root=where / "root",
        store={"shard_bytes": "64KiB"},
        preflight={"reference": "never"},
    )
    settings = load_job(job)
    with (
        mock.patch.object(pipeline, "make_supervisor", make),
        mock.patch.object(pipeline, "preflight", lambda job, engine, folder: {}),
    ):
        if mode == "loop":
            began, cpu = time.perf_counter(), time.process_time()
            result = local.run(settings)
        else:
            from flows.extract import run_flow

            began, cpu = time.perf_counter(), time.process_time()
            result = run_flow(settings)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
    if len(result.manifest.shards) != shards:
        raise RuntimeError(f"{len(result.manifest.shards)} shards, expected {shards}")
    engine, wall = engines[0], ended - began
    found = {
        "wall_s": wall,
        "engine_s": engine.seconds,
        "before_s": engine.first - began,
        "idle_s": engine.ends - engine.first - engine.seconds,
        "after_s": ended - engine.ends,
        "cpu_s": cpu,
        "given_in_advance": engine.given,
        "overhead": (wall - engine.seconds) / engine.seconds,
    }
    print(json.dumps(found))


def _clocked() -> Any:
    """The class of an engine whose shards take exactly ``SHARD_S``; made here, since its base imports torch."""
    from tests.faults.storejob import RandomRows

    class Clocked(RandomRows):
        """Works at what it was given in advance from the moment at which the shard before it ended."""

        def __init__(self, job: Any) -> None:
            super().__init__(job)
            self._ahead: Any = None
            self.given = 0
            self.seconds = self.first = self.ends = 0.0

        def begun(self, shard: str) -> Any:
            """What it was given in advance, if that is this shard."""
            return self._ahead if self._ahead is not None and self._ahead.shard == shard else None

        def extract(self, request: Any, on_progress: Any, following: Any) -> Any:
            """Fill the file, ask for the next shard as a real engine does, wait for the rest of the time."""
            begins = time.perf_counter()
            if self._ahead is not None and self._ahead.attempt == request.attempt:
                begins = self.ends
                self.given += 1
            self._ahead, self.first = None, self.first or begins
            done = super().extract(request, on_progress, following)
            self.ends = max(begins + SHARD_S, time.perf_counter())
            while (left := self.ends - time.perf_counter()) > 0:
                self._ahead = self._ahead or following()
                time.sleep(min(left, _STEP_S))
            self.seconds += SHARD_S
            return done

    return Clocked


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
