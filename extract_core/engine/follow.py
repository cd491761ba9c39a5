"""Passes on what an engine warns of while it runs; everything else stays in its log file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from extract_core.engine.logs import warning_line

_EVERY_S = 1.0
_MOST_LINES = 200
"""Distinct lines that are passed on in all; an engine in trouble repeats itself."""

Tell = Callable[[int, str], None]
"""Called with a level of ``logging`` and a line, from a thread of its own."""


class LogFollower:
    """Reads the logs of all engines of a run as they grow, for as long as the block runs.

    Args:
        folder: where an ``EngineSupervisor`` writes a log per engine.
        tell: gets each distinct line that vLLM logged as a warning or worse.
    """

    def __init__(self, folder: Path, tell: Tell):
        self._folder, self._tell = folder, tell
        self._read: dict[Path, int] = {}
        self._told: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-log", daemon=True)

    def __enter__(self) -> LogFollower:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(5)
        self._look()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        for log in sorted(self._folder.glob("*.log")):
            try:
                with log.open("rb") as file:
                    file.seek(self._read.get(log, 0))
                    data = file.read()
            except OSError:
                continue  # removed with the folder of a run that went well
            whole = data[: data.rfind(b"\n") + 1]
            self._read[log] = self._read.get(log, 0) + len(whole)
            for line in whole.decode("utf-8", "replace").splitlines():
                self._pass_on(log, line)

    def _pass_on(self, log: Path, raw: str) -> None:
        found = warning_line(raw)
        if found is None or found[1] in self._told or len(self._told) > _MOST_LINES:
            return
        self._told.add(found[1])
        level, line = found
        if len(self._told) > _MOST_LINES:
            level, line = logging.WARNING, f"the engine goes on warning; the rest is in {log}"
        self._tell(level, f"engine: {line}")
