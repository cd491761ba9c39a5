"""The command line, whose engine is killed or stopped from outside at chosen moments.

``python -m tests.integration.engine.assassin BLOWS.json EVENTS.jsonl run JOB.YAML --no-prefect``. The run is the real
one; this module only watches what its engine does and strikes. A blow is ``{moment, signal, victim, delay}``; each is
dealt once, in order:

- ``importing`` and ``loading``: that stage of a start, when the engine has used ``delay`` seconds of processor time
  (a busy machine takes longer to come to the same point), or at its end
- ``preflight``, ``shard``: ``delay`` seconds after the self-test's, a shard's, first sign of progress
- ``between``: the engine is idle, and the next shard not yet sent
- ``closing``: before the engine is asked to end

The victim is the ``engine`` process, its ``guard``, or the whole ``group``. Every event is a line of EVENTS.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extract_core.engine import activity
from extract_core.engine.process import EngineProcess
from extract_core.engine.protocol import Progress, ShardDone, ShardJob

STAGES = {"importing vLLM": "importing", "loading the model": "loading"}


def cpu_s(group: int) -> float:
    """Processor time of a group."""
    return sum(sample.cpu_s for sample in activity.members(group).values())


class Assassin:
    """Deals the blows and writes down what happened when."""

    def __init__(self, blows: list[dict[str, Any]], events: Path):
        self._blows, self._events = blows, events
        self._doing = ""
        self._doomed: int | None = None
        self._lock = threading.Lock()

    def note(self, event: str, **more: Any) -> None:
        """One line of the events."""
        with self._lock, self._events.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "at": time.monotonic(), **more}) + "\n")

    def moment(self, name: str, engine: EngineProcess, *, now: bool = False) -> None:
        """A moment has come: strike if the next blow is for it, at once or after its delay."""
        self._doing = name
        self.note(name, group=engine.pid, cpu_s=cpu_s(engine.pid or 0))
        if not self._blows or self._blows[0]["moment"] != name or engine.pid in (None, self._doomed):
            return  # no blow for an engine that is to get one already: it would be gone before the second
        blow, group = self._blows.pop(0), engine.pid
        self._doomed = group
        if now:
            self._strike(blow, group)
            # An idle engine that was killed must be gone before the run goes on, or the blow falls into the shard.
            deadline = time.monotonic() + 5
            while blow["signal"] == "SIGKILL" and engine.pid is not None and time.monotonic() < deadline:
                time.sleep(0.01)
        elif name in STAGES.values():
            threading.Thread(target=self._strike_at_cpu, args=(blow, group), daemon=True).start()
        else:
            timer = threading.Timer(blow["delay"], self._strike, (blow, group))
            timer.daemon = True
            timer.start()

    def _strike_at_cpu(self, blow: dict[str, Any], group: int) -> None:
        while cpu_s(group) < blow["delay"] and self._doing in STAGES.values():
            time.sleep(0.02)
        self._strike(blow, group)

    def _strike(self, blow: dict[str, Any], group: int) -> None:
        number = signal.Signals[blow["signal"]]
        others = sorted(pid for pid in activity.members(group) if pid != group)
        if blow["victim"] == "engine" and others:
            os.kill(others[0], number)
        elif blow["victim"] == "guard":
            os.kill(group, number)
        else:
            os.killpg(group, number)
        self.note("blow", **{**blow, "hit": self._doing, "group": group})

    def follow(self) -> None:
        """Watch every engine of this process from now on."""
        start, extract, close = EngineProcess.start, EngineProcess.extract, EngineProcess.close

        def watched_start(engine: EngineProcess, on_stage: Callable[[str], None] = lambda stage: None) -> Any:
            def staged(stage: str) -> None:
                on_stage(stage)
                self.moment(STAGES.get(stage, stage), engine)

            result = start(engine, staged)
            self._doing = "ready"
            self.note("ready", group=engine.pid, cpu_s=cpu_s(engine.pid or 0))
            return result

        def watched_extract(
            engine: EngineProcess,
            job: ShardJob,
            on_progress: Callable[[Progress], None] = lambda progress: None,
            *following: Callable[[], ShardJob | None],
        ) -> ShardDone:
            preflight = "preflight" in job.path
            first = [True]

            def progressed(progress: Progress) -> None:
                if first:
                    first.clear()
                    self.moment("preflight" if preflight else "shard", engine)
                on_progress(progress)

            if not preflight:
                self.moment("between", engine, now=True)
            done = extract(engine, job, progressed, *following)
            self.note("done")
            self._doing = "idle"
            return done

        def watched_close(engine: EngineProcess) -> None:
            self.moment("closing", engine, now=True)
            close(engine)

        EngineProcess.start, EngineProcess.extract, EngineProcess.close = (  # type: ignore[method-assign]
            watched_start,
            watched_extract,
            watched_close,
        )


if __name__ == "__main__":
    plan, events, *words = sys.argv[1:]
    Assassin(json.loads(Path(plan).read_text()), Path(events)).follow()
    from extract_core.cli import main

    sys.argv = ["coresample", *words]
    main()
