"""Whole runs with rows from the test where a run has its engine; plan, spool, commits, checks, publication are real."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from extract_core import local, pipeline
from extract_core.engine.protocol import FinalNorm, JobSample, Progress, ShardDone, ShardJob
from extract_core.engine.supervisor import KILLS_TO_QUARANTINE
from extract_core.errors import EngineCrashedError
from extract_core.job import Job
from extract_core.local import RunResult
from extract_core.progress import Reporter, reporter, set_reporter
from extract_core.settings import JobSettings
from extract_core.store.writer import ShardWriter
from tests.prefix_rows import prefix_rows

from .cli import kit


class Rows:
    """Stands where a run has its ``EngineSupervisor``: rows follow from the tokens up to their position.

    Args:
        job: the job.
        spoil: samples whose last segments are not finite.
        killers: samples that end the engine.
        salt: other rows for the same samples.
    """

    def __init__(self, job: Job, *, spoil: Collection[str] = (), killers: Collection[str] = (), salt: int = 0):
        self._job, self._spoil, self._deadly, self._salt = job, set(spoil), set(killers), salt
        self.preflight: dict[str, Any] = {"made_of": "the test"}
        self.info: dict[str, Any] = {"vllm": "none"}
        weight = np.full(job.model.hidden_size, 2.0, "<f4").tobytes()
        self.final_norm = FinalNorm("rms", 1e-5, 0.0, weight)
        self.kills: Counter[str] = Counter()
        self.blamed = 0
        self.start_seconds = [0.1]
        self.requests: list[ShardJob] = []

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def kill(self) -> None:
        """Nothing runs that could be ended."""

    def suspects(self) -> list[str]:
        return sorted(self.kills)

    def killers(self) -> list[str]:
        return sorted(sample for sample, times in self.kills.items() if times >= KILLS_TO_QUARANTINE)

    def _die(self, in_flight: Collection[str]) -> None:
        self.kills.update(in_flight)
        raise EngineCrashedError("the engine died")

    def begun(self, shard: str) -> None:
        """Nothing is given in advance."""

    def extract(
        self, request: ShardJob, on_progress: Callable[[Progress], None], following: Callable[[], object]
    ) -> ShardDone:
        self.requests.append(request)
        names = [sample.sample_id for sample in request.samples]
        for name in request.solo:
            if name in names and name in self._deadly:
                self._die([name])
            self.kills.pop(name, None)
        together = [name for name in names if name not in request.solo]
        if self._deadly.intersection(together):
            self._die(together)
        job = self._job
        writer = ShardWriter(
            Path(request.path),
            rows=request.rows,
            layer_ids=job.layer_ids,
            hidden_size=job.model.hidden_size,
            dtype=job.dtype,
        )
        written: set[tuple[int, int]] = set()
        for sample in request.samples:
            ids = np.frombuffer(sample.token_ids, "<i4")
            states, at = self._states(sample, ids), 0
            for node in sample.segments:
                first, count = node
                if node not in written:  # as the engine: who comes first
                    writer.write_rows(first, raw(states[at : at + count]))
                    writer.write_token_ids(first, ids[at : at + count])
                written.add(node)
                at += count
            assert at == len(ids)
        used = {row for sample in request.samples for first, n in sample.segments for row in range(first, first + n)}
        assert not writer.missing() or len(used) < request.rows, "rows of a sample were left out"
        writer.close()
        counters = {"tokens": float(request.rows), "engine_s": 1.0}
        return ShardDone(attempt=request.attempt, greedy={}, top1={}, refused={}, counters=counters)

    def _states(self, sample: JobSample, ids: np.ndarray) -> torch.Tensor:
        states = prefix_rows(ids, len(self._job.layer_ids), self._job.model.hidden_size, self._salt)
        states = states.to(getattr(torch, self._job.dtype))
        if sample.sample_id in self._spoil:
            states[-sample.segments[-1][1] :, 1] = float("nan")
        return states


def raw(states: torch.Tensor) -> memoryview:
    """The bytes of rows."""
    return memoryview(states.contiguous().view(torch.uint8).numpy().reshape(-1))


class Notes(Reporter):
    """Keeps what the user would read."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def stage(self, name: str, total: int | None = None, unit: str = "") -> None:
        pass

    def advance(self, done: int) -> None:
        pass

    def note(self, text: str) -> None:
        self.texts.append(text)


def run(settings: JobSettings, *, repair: bool = False, **options: Any) -> tuple[RunResult, list[Rows], str]:
    """A run in this process: its result, the engines that it started, its notes."""
    started: list[Rows] = []

    def supervisor(job: Job, folder: object) -> Rows:
        started.append(Rows(job, **options))
        return started[-1]

    before, notes = reporter(), Notes()
    set_reporter(notes)
    try:
        with mock.patch.object(pipeline, "make_supervisor", supervisor):
            result = local.run(settings, repair=repair)
    finally:
        set_reporter(before)
    return result, started, "\n".join(notes.texts)


def requested(engines: list[Rows]) -> list[list[str]]:
    """The samples of every request to the engines."""
    return [[sample.sample_id for sample in request.samples] for engine in engines for request in engine.requests]


def ten_chats(folder: Path) -> JobSettings:
    """A job of ten chats in several shards that publishes half of them if it must."""
    kit.make_model(folder / "model")
    kit.make_chats(folder / "chats.jsonl", 10)
    path = kit.write_job(folder / "job.yaml", layers=[1, 2, 5], store__shard_bytes="20KiB", completeness=0.5)
    return kit.settings(path)


def ids(job: Job, shard: int) -> list[str]:
    """Sample ids of a planned shard."""
    return [str(name) for name in job.plan.shard(shard)["sample_id"].to_pylist()]
