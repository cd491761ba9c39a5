"""The engine as a disposable child process group.

Start, watch, kill, replace. The child leads nothing: ``guard.py`` leads the group and kills all of it when this
process is gone. A crashed or hung engine raises; the caller decides what runs again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from extract_core import errors
from extract_core.engine import guard
from extract_core.engine.protocol import (
    EngineSpec,
    Event,
    Failed,
    Progress,
    Ready,
    ShardDone,
    ShardJob,
    Shutdown,
    Starting,
    receive_event,
    send,
)
from extract_core.errors import EngineCrashedError, EngineError, EngineHungError, EngineStartError

_GRACE_S = 10.0
_LOG_TAIL_LINES = 50


class EngineProcess:
    """One vLLM engine in its own process group.

    Args:
        spec: what to load.
        log: file that receives everything the engine prints.
        environment: variables set for the child on top of this process's own.
        start_timeout_s: limit from start to ready.
        step_timeout_s: limit between two signs of progress while a shard runs.
    """

    def __init__(
        self,
        spec: EngineSpec,
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        start_timeout_s: float = 900,
        step_timeout_s: float = 600,
    ):
        self.spec, self.log = spec, log
        self.info: dict[str, Any] = {}
        self._environment = environment or {}
        self._start_timeout_s, self._step_timeout_s = start_timeout_s, step_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.in_flight: set[str] = set()

    @property
    def pid(self) -> int | None:
        """Process-group id of the engine, None when none runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, on_stage: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
        """Start the engine and wait until it is ready; returns its info (versions, settings, runner).

        Raises:
            EngineStartError: it failed or timed out; carries root cause, traceback and log tail.
            EngineIncompatibleError: the installed vLLM cannot do what is asked.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        env = {
            **os.environ,
            **self._environment,
            "CORESAMPLE_ENGINE_FDS": str(theirs.fileno()),
            "PYTHONUNBUFFERED": "1",
        }
        command = [
            sys.executable,
            guard.__file__,
            sys.executable,
            "-m",
            "extract_core.engine.main",
            str(theirs.fileno()),
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        self._connection = Connection(ours.detach())
        try:
            send(self._connection, self.spec)
            deadline = time.monotonic() + self._start_timeout_s
            while not isinstance(event := self._next(deadline - time.monotonic(), EngineStartError), Ready):
                if isinstance(event, Starting):
                    on_stage(event.stage)
        except OSError as error:
            raise self._dead(EngineStartError, f"the engine process ended at once ({error})") from error
        self.info = event.info
        return event.info

    def extract(self, job: ShardJob, on_progress: Callable[[Progress], None] = lambda progress: None) -> ShardDone:
        """Run one shard to its end.

        Raises:
            EngineCrashedError: the process died or reported a failure; ``in_flight`` names the samples it held.
            EngineHungError: no progress within the limit; the group was killed.
            CaptureError: rows are missing or misplaced.
        """
        if self._connection is None:
            raise EngineError("the engine was not started")
        self.in_flight = set()
        try:
            send(self._connection, job)
        except OSError as error:
            raise self._dead(EngineCrashedError, f"the engine process is gone ({error})") from error
        try:
            while not isinstance(event := self._next(self._step_timeout_s, EngineCrashedError), ShardDone):
                if isinstance(event, Progress):
                    self.in_flight.update(event.entered)
                    self.in_flight.difference_update(event.finished)
                    on_progress(event)
            if event.attempt != job.attempt:
                raise EngineError(f"the engine answered attempt {event.attempt}, asked was {job.attempt}")
        except BaseException:
            self.kill()  # whoever left in mid-shard must not find its answer in place of the next one's
            raise
        self.in_flight = set()
        return event

    def close(self) -> None:
        """Ask the engine to end, then make sure that its whole group has."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                send(self._connection, Shutdown())
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the whole process group now; returns when all of it is gone, so that its memory is free."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()
        process.wait()
        deadline = time.monotonic() + _GRACE_S
        while _members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, timeout_s: float, dead: type[EngineError]) -> Event:
        assert self._connection is not None
        try:
            if not self._connection.poll(max(0.0, timeout_s)):
                hung = EngineStartError if dead is EngineStartError else EngineHungError
                raise self._dead(hung, f"no sign of life from the engine for {timeout_s:.0f} s; it was killed")
            event = receive_event(self._connection)
        except (EOFError, ConnectionError) as error:
            raise self._dead(dead, self._how_it_ended()) from error
        if isinstance(event, Failed):
            kind = getattr(errors, event.kind, dead) if event.kind else dead
            failure = self._dead(kind if issubclass(kind, EngineError) else dead, event.message, event.traceback)
            raise failure if isinstance(failure, kind) else kind(str(failure)) from failure
        return event

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "the engine process closed its connection"
        number = status - 128 if status > 128 else -status if status < 0 else 0
        if number:
            with contextlib.suppress(ValueError):
                name = signal.Signals(number).name
                hint = " (out of memory is the usual cause of SIGKILL)" if name == "SIGKILL" else ""
                return f"the engine process was ended by {name}{hint}"
        return f"the engine process ended with status {status} and no message"

    def _dead(self, kind: type[EngineError], message: str, engine_traceback: str = "") -> EngineError:
        tail = self.log_tail()
        self.kill()
        return kind(f"{message} (engine log: {self.log})", engine_traceback=engine_traceback, log_tail=tail)

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """The last lines that the engine printed."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 64 * 1024))
                return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
        except OSError:
            return ""


def _members(group: int) -> list[int]:
    """Processes of a group that have not ended; a zombie holds no memory and does not count."""
    import psutil

    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
