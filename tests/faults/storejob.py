"""Whole jobs without an engine: real plan, spool, commits, checks and publication, with rows from a random generator.

What stands in for the engine fills the shard file through the same writer, and is as repeatable: the same shard gives
the same bytes. So thousands of store operations can be put through faults in the time of one engine start.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from extract_core import local, pipeline, retries
from extract_core.cli.common import understood
from extract_core.engine.protocol import FinalNorm, Progress, ShardDone, ShardJob
from extract_core.job import Job
from extract_core.settings import load_job
from extract_core.store.records import Manifest
from extract_core.store.writer import ShardWriter
from tests.prefix_rows import prefix_rows

DELAYS_S = (0.05, 0.2, 0.5)
"""Pauses between tries; as many tries as a run has."""


class RandomRows:
    """Stands where a run has its engine (``EngineSupervisor``).

    Args:
        job: the job.
        before: called before each shard.
        salt: other rows for the same samples.
    """

    def __init__(self, job: Job, *, before: Callable[[int], None] = lambda shard: None, salt: int = 0):
        self._job, self._before, self._salt = job, before, salt
        self.preflight: dict[str, Any] = {"made_of": "random rows"}
        self.info: dict[str, Any] = {"vllm": "none", "made_of": "random rows"}
        self.final_norm = FinalNorm("rms", 1e-5, 0.0, np.ones(job.model.hidden_size, "<f4").tobytes())
        self.kills: Counter[str] = Counter()
        self.blamed = 0
        self.shards = 0
        self.start_seconds: list[float] = []

    def __enter__(self) -> RandomRows:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def kill(self) -> None:
        """Nothing to end."""

    def suspects(self) -> list[str]:
        """No engine died."""
        return []

    def killers(self) -> list[str]:
        """No engine died."""
        return []

    def begun(self, shard: str) -> None:
        """Nothing is given in advance."""

    def extract(
        self, request: ShardJob, on_progress: Callable[[Progress], None], following: Callable[[], object]
    ) -> ShardDone:
        """Fill the file of a shard."""
        self._before(self.shards)
        self.shards += 1
        job = self._job
        dtype = getattr(torch, job.dtype)
        writer = ShardWriter(
            Path(request.path),
            rows=request.rows,
            layer_ids=job.layer_ids,
            hidden_size=job.model.hidden_size,
            dtype=job.dtype,
        )
        for sample in request.samples:
            ids = np.frombuffer(sample.token_ids, "<i4")
            rows = prefix_rows(ids, len(job.layer_ids), job.model.hidden_size, self._salt).to(dtype)
            at = 0
            for first, count in sample.segments:
                part = rows[at : at + count].reshape(-1).view(torch.uint8)
                writer.write_rows(first, memoryview(part.numpy()))
                writer.write_token_ids(first, ids[at : at + count])
                at += count
        writer.close()
        tokens = {sample.sample_id: 7 for sample in request.samples}
        on_progress(Progress(request.attempt, [], list(tokens), request.rows, 1))
        return ShardDone(request.attempt, tokens, dict(tokens), {}, {"engine_s": 0.1})


def run(path: Path, root: str, *, repair: bool = False, **options: Any) -> Manifest:
    """``local.run`` itself, with random rows where its engine would be and short pauses between its tries.

    Args:
        path: the job file.
        root: the dataset root.
        repair: as ``coresample run --repair``.
        options: for ``RandomRows``.
    """
    settings = load_job(path, {"root": root})
    with (
        mock.patch.object(pipeline, "make_supervisor", lambda job, folder: RandomRows(job, **options)),
        mock.patch.dict(retries.with_retries.__kwdefaults__, delays_s=DELAYS_S),
    ):
        return local.run(settings, repair=repair).manifest


def attempt(path: Path, root: str, **options: Any) -> tuple[Manifest | None, str]:
    """Run it once: the manifest, or the message that a user would get.

    Raises:
        Exception: whatever a user would see as a traceback.
    """
    try:
        return run(path, root, **options), ""
    except Exception as error:
        known = understood(error)
        if known is None or not str(known).strip():
            raise
        return None, f"{type(known).__name__}: {known}"


class Watcher:
    """Resident memory of this process and bytes in a spool, sampled by a thread; the peaks, in bytes."""

    def __init__(self, spool: Path | None = None) -> None:
        self.peak = self.spooled = 0
        self._spool = spool
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.peak = max(self.peak, rss())
            if self._spool is not None:
                self.spooled = max(self.spooled, sum(map(_allocated, self._spool.glob("run-*/*"))))

    def stop(self) -> int:
        """The peak of memory."""
        self._ended.set()
        return max(self.peak, rss())


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def rss() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    """``python -m tests.faults.storejob JOB ROOT``: one run in a process of its own; JSON on the last line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("root")
    parser.add_argument("--stop-at", type=int, help="stop (SIGSTOP) before this shard, until SIGCONT comes")
    parser.add_argument("--salt", type=int, default=0, help="other rows for the same samples")
    parser.add_argument("--repair", action="store_true")
    parser.add_argument("--spool", type=Path, help="folder whose size is watched")
    chosen = parser.parse_args()

    idle = 0

    def before(shard: int) -> None:
        nonlocal idle
        idle = idle or rss()  # everything is imported, and nothing was sent
        if shard == chosen.stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)

    started = time.monotonic()
    watcher = Watcher(chosen.spool)
    manifest, message = attempt(chosen.job, chosen.root, before=before, salt=chosen.salt, repair=chosen.repair)
    document = {
        "version": manifest.version if manifest else None,
        "message": message,
        "rss_before": idle,
        "rss_peak": watcher.stop(),
        "spool_peak": watcher.spooled,
        "seconds": time.monotonic() - started,
    }
    print(json.dumps(document), flush=True)
    if message:
        print(f"error: {message}", file=sys.stderr)
    return 0 if manifest else 1


if __name__ == "__main__":
    sys.exit(main())
