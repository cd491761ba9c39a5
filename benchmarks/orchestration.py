"""What Prefect costs: 200 shards of one second each, with the engine's place taken by a clock and random rows.

Everything else is real: a Prefect server with its database (Postgres where it is installed), the flow, its tasks, the
plan, row checks, sealing, commit records, publication. Run in a process of its own for each mode, beside the server.
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
                        f"{mode:5} {pair[mode]['wall_s']:8.1f} s wall, {pair[mode]['overhead']:.2%} beside the engine"
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
    from tests.faults.storejob import RandomRows

    class Clocked(RandomRows):
        """An engine whose shards take exactly ``SHARD_S``."""

        seconds = 0.0

        def extract(self, request: Any, on_progress: Any) -> Any:
            """Fill the file, then wait for the rest of the time."""
            began = time.perf_counter()
            done = super().extract(request, on_progress)
            time.sleep(max(0.0, SHARD_S - (time.perf_counter() - began)))
            Clocked.seconds += time.perf_counter() - began
            return done

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
        mock.patch.object(pipeline, "make_supervisor", lambda job, folder: Clocked(job)),
        mock.patch.object(pipeline, "preflight", lambda job, engine, folder: {}),
    ):
        if mode == "loop":
            began = time.perf_counter()
            result = local.run(settings)
        else:
            from flows.extract import run_flow

            began = time.perf_counter()
            result = run_flow(settings)
        wall = time.perf_counter() - began
    if len(result.manifest.shards) != shards:
        raise RuntimeError(f"{len(result.manifest.shards)} shards, expected {shards}")
    overhead = (wall - Clocked.seconds) / Clocked.seconds
    print(json.dumps({"wall_s": wall, "engine_s": Clocked.seconds, "overhead": overhead}))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
