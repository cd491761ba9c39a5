"""The engine as a disposable child process group.

Start, watch, kill, replace. The child leads nothing: ``guard.py`` leads the group and kills all of it when this
process is gone. A crashed or hung engine raises; the caller decides what runs again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from extract_core import errors
from extract_core.engine import activity, guard, logs
from extract_core.engine.protocol import (
    EngineSpec,
    Event,
    Failed,
    FinalNorm,
    Progress,
    Ready,
    ShardDone,
    ShardJob,
    Shutdown,
    Starting,
    receive_event,
    send,
)
from extract_core.engine.versions import installed_engine
from extract_core.errors import (
    CoresampleError,
    EngineCrashedError,
    EngineError,
    EngineHungError,
    EngineIncompatibleError,
    EngineKilledError,
    EngineReport,
    EngineStartError,
)

COMMAND = [sys.executable, "-m", "extract_core.engine.main"]
"""What the guard runs, before the file descriptor."""

_GRACE_S = 10.0
_DUMP_S = 0.5
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that no process gets by a fault of its own; others (SIGSEGV, SIGABRT) come again with the next start."""
_SECRET = re.compile(r"token$|secret|passw|credential|(^|_)key$", re.IGNORECASE)


class EngineProcess:
    """One vLLM engine in its own process group.

    Args:
        spec: what to load.
        log: file that receives everything the engine prints.
        environment: variables set for the child on top of this process's own.
        start_timeout_s: while the engine starts, limit on the time in which its processes neither compute nor read;
            ``activity.BUSY_LIMITS`` times as long is the limit in all.
        step_timeout_s: limit between two messages of progress while a shard runs.
        on_note: told what the user should know while the engine is waited for.
    """

    def __init__(
        self,
        spec: EngineSpec,
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        start_timeout_s: float = 900,
        step_timeout_s: float = 600,
        on_note: Callable[[str], None] = lambda text: None,
    ):
        self.spec, self.log = spec, log
        self.info: dict[str, Any] = {}
        self.final_norm: FinalNorm | None = None
        self.startup: dict[str, float] = {}
        """Where the time of the start went, seconds by stage."""
        self._environment = environment or {}
        self._start_timeout_s, self._step_timeout_s = start_timeout_s, step_timeout_s
        self._on_note = on_note
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stage = "starting"
        self.in_flight: set[str] = set()
        self._given: dict[str, ShardDone | None] = {}
        self._told_stopped: list[int] = []

    @property
    def pid(self) -> int | None:
        """Process-group id of the engine, None when none runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, on_stage: Callable[[str], None] = lambda stage: None) -> dict[str, Any]:
        """Start the engine and wait until it is ready; returns its info (versions, settings, runner).

        Raises:
            EngineStartError: it failed or hung; carries root cause, traceback, log tail and report.
            EngineKilledError: a signal from outside ended or stopped it.
            EngineIncompatibleError: the installed vLLM cannot do what is asked.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        env = {
            **os.environ,
            **self._environment,
            guard.FDS: str(theirs.fileno()),
            guard.PARENT: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, guard.__file__, *COMMAND, str(theirs.fileno())]
        with self.log.open("ab") as log:
            self._process = _launch(
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
        patience = activity.Patience(self._process.pid, self._start_timeout_s, activity=True)
        try:
            try:
                send(self._connection, self.spec)
            except OSError as error:
                raise self._ended(EngineStartError) from error
            while not isinstance(event := self._next(patience, EngineStartError), Ready):
                if isinstance(event, Starting):
                    self._stage = event.stage
                    on_stage(event.stage)
        except BaseException:
            self.kill()  # an engine that nobody waits for any more would go on loading
            raise
        self.info, self.final_norm, self._stage = event.info, event.final_norm, "ready"
        self.startup = event.startup
        return event.info

    def extract(
        self,
        job: ShardJob,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        following: Callable[[], ShardJob | None] = lambda: None,
    ) -> ShardDone:
        """Run one shard to its end.

        Args:
            job: the shard; it may have been given before, as what ``following`` gave.
            on_progress: told of this shard's progress.
            following: asked after each message until it gives the shard to go on with, so that the engine does not wait
                between the two.

        Raises:
            EngineCrashedError: the process died or reported a failure; ``in_flight`` names the samples it held.
            EngineHungError: no progress within the limit; the group was killed.
            CaptureError: rows are missing or misplaced.
        """
        if self._connection is None or self._process is None:
            raise EngineError("the engine was not started")
        self._stage = f"running {len(job.samples)} samples, {job.rows} tokens"
        try:
            self._give(job)
            ahead = None
            patience = activity.Patience(self._process.pid, self._step_timeout_s, activity=False)
            while self._given[job.attempt] is None:
                if ahead is None and (ahead := following()) is not None:
                    self._give(ahead)
                event = self._next(patience, EngineCrashedError)
                if isinstance(event, Progress):
                    self.in_flight.update(event.entered)
                    self.in_flight.difference_update(event.finished)
                    if event.attempt == job.attempt:
                        on_progress(event)
                elif isinstance(event, ShardDone):
                    if event.attempt not in self._given:
                        raise EngineError(f"the engine answered attempt {event.attempt}, which it was not asked for")
                    self._given[event.attempt] = event
        except BaseException:
            self.kill()  # whoever left in mid-shard must not find its answer in place of the next one's
            raise
        done = self._given.pop(job.attempt)
        assert done is not None
        self._stage = "ready"
        return done

    def holds(self, job: ShardJob) -> bool:
        """Whether the engine was given this job, and its result has not been taken."""
        return job.attempt in self._given

    def _give(self, job: ShardJob) -> None:
        if self.holds(job):
            return
        assert self._connection is not None
        try:
            send(self._connection, job)
        except OSError as error:
            raise self._ended(EngineCrashedError) from error
        self._given[job.attempt] = None

    def close(self) -> None:
        """Ask the engine to end, then make sure that its whole group has."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                send(self._connection, Shutdown())
            if self._process is not None:
                deadline = time.monotonic() + _GRACE_S
                while self._process.poll() is None and time.monotonic() < deadline:
                    if activity.stopped(activity.members(self._process.pid)):
                        break  # it will not end by itself
                    time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """Kill the whole process group now; returns when all of it is gone, so that its memory is free."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        self._given.clear()
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
        while activity.members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, patience: activity.Patience, dead: type[EngineError]) -> Event:
        """The next message; ``dead`` is the kind of failure where the engine died or reported one."""
        assert self._connection is not None
        try:
            while not self._connection.poll(patience.slice_s):
                patience.look()
                if patience.stopped and patience.stopped != self._told_stopped:
                    self._on_note(f"{_are_stopped(patience.stopped)}; waiting {patience.limit_s:.0f} s for it to go on")
                self._told_stopped = patience.stopped
                if patience.idle or patience.endless:
                    raise self._hung(patience, dead)
            event = receive_event(self._connection)
        except (EOFError, ConnectionError) as error:
            raise self._ended(dead) from error
        except EngineError as error:
            if type(error) is not EngineError:  # ours, of a hang
                raise
            raise self._dead(dead, str(error)) from error  # a message that is none
        patience.heard()
        if isinstance(event, Failed):
            raise self._failed(event, dead)
        return event

    def _hung(self, patience: activity.Patience, dead: type[EngineError]) -> EngineError:
        starting = dead is EngineStartError
        limit = f"{patience.limit_s:.0f} s"
        if patience.stopped:
            kind = EngineKilledError if starting else EngineHungError
            return self._dead(kind, f"{_are_stopped(patience.stopped)} and did not go on within {limit}; it was killed")
        dump = self._stacks()
        if not starting:
            return self._dead(EngineHungError, f"no sign of life from the engine for {limit}; it was killed", dump)
        if patience.endless:
            return self._dead(
                EngineStartError,
                f"the engine was still busy ({self._stage}) after {activity.BUSY_LIMITS * patience.limit_s:.0f} s, "
                f"{activity.BUSY_LIMITS} times engine.start_timeout_s; it was killed. Raise engine.start_timeout_s if "
                "it needs longer",
                dump,
            )
        return self._dead(
            EngineStartError,
            f"no sign of life from the engine for {limit} ({self._stage}): its processes neither computed nor read "
            "anything; it was killed. Raise engine.start_timeout_s if it waits for something slow",
            dump,
        )

    def _failed(self, event: Failed, dead: type[EngineError]) -> CoresampleError:
        """What the engine process reported, as the exception that it was where that is one of ours."""
        message, engine_traceback = event.message, event.traceback
        if not event.kind and logs.is_consequence(message):
            text = logs.read_tail(self.log)
            block = logs.root_block(text, known=engine_traceback)
            if block is not None:
                message = f"{block.cause} ({block.who})" if block.who else block.cause
                engine_traceback = logs.chained(block.text, engine_traceback)
            elif line := logs.last_error(text):
                message = f"{line}; {message}"
        kind = getattr(errors, event.kind, None) if event.kind else None
        if not (isinstance(kind, type) and issubclass(kind, CoresampleError)):
            kind = dead
        failure = self._dead(kind if issubclass(kind, EngineError) else dead, message, engine_traceback)
        if isinstance(failure, kind):
            return failure
        try:
            other: CoresampleError = kind(str(failure))
        except TypeError:  # a kind that takes more than a message
            return failure
        other.__cause__ = failure
        return other

    def _ended(self, dead: type[EngineError]) -> EngineError:
        """The process is gone without a word."""
        message, number = self._how_it_ended()
        if number in _FROM_OUTSIDE and dead is EngineStartError:
            dead = EngineKilledError
        return self._dead(dead, message, logs.stack_dump(logs.read_tail(self.log)))

    def _how_it_ended(self) -> tuple[str, int | None]:
        """In words, and the signal that ended it."""
        assert self._process is not None
        try:
            status = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "the engine process closed its connection", None
        # The guard gives 128 and the number for the engine's signal; negative is the guard's own.
        number = status - 128 if status > 128 else -status if status < 0 else 0
        while_doing = "" if self._stage == "ready" else f" ({self._stage})"
        if not number:
            return f"the engine process ended with status {status} and no message{while_doing}", None
        who = "guard process of the engine" if status < 0 else "engine process"
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        hint = "; out of memory is the usual cause of SIGKILL" if number == signal.SIGKILL else ""
        return f"the {who} was ended by {name}{while_doing}{hint}", number

    def _stacks(self) -> str:
        """Where a hung engine hangs: every Python process of the group prints its stacks to the log when asked."""
        if self._process is None:
            return ""
        for pid in activity.members(self._process.pid):
            if pid != self._process.pid:  # the guard does not listen to it, and its death ends the others
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(_DUMP_S)
        return logs.stack_dump(logs.read_tail(self.log))

    def _dead(self, kind: type[EngineError], message: str, engine_traceback: str = "") -> EngineError:
        self.kill()
        return kind(
            f"{message} (engine log: {self.log})",
            engine_traceback=engine_traceback,
            log_tail=logs.tail(logs.read_tail(self.log), known=engine_traceback),
            report=self.report(),
        )

    def report(self) -> EngineReport:
        """What a failure shows beside its cause."""
        try:
            versions = installed_engine()
        except EngineIncompatibleError:
            versions = {}
        named = {"vllm", "torch", "transformers"}
        versions = {**versions, **{name: str(self.info[name]) for name in named & self.info.keys()}}
        return EngineReport(
            stage=self._stage,
            log=str(self.log),
            versions={name: version for name, version in versions.items() if name in named},
            settings=_settings(self.spec, self.info),
            in_flight=tuple(sorted(self.in_flight)),
        )


def _settings(spec: EngineSpec, info: dict[str, Any]) -> dict[str, Any]:
    """What was asked of the engine and differs from the defaults, completed by what it chose itself."""
    asked = msgspec.structs.asdict(spec)
    always = ("model", "dtype", "layer_ids", "max_model_len", "tensor_parallel_size", "capture")
    defaults = {
        field.name: field.default
        for field in msgspec.structs.fields(EngineSpec)
        if field.default is not msgspec.NODEFAULT
    }
    shown = {name: value for name, value in asked.items() if name in always or value != defaults.get(name, {})}
    for name in ("max_num_batched_tokens", "max_num_seqs", "enforce_eager"):
        shown.setdefault(name, info.get(name, "default"))
    extra = {name: "***" if _SECRET.search(name) else value for name, value in shown.pop("extra", {}).items()}
    return {**shown, **({"extra": extra} if extra else {})}


def _are_stopped(pids: list[int]) -> str:
    what = "engine process" if len(pids) == 1 else "engine processes"
    return f"the {what} {', '.join(map(str, pids))} {'is' if len(pids) == 1 else 'are'} stopped (SIGSTOP)"


def _launch(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start the guard from a thread that lives as long as it does.

    The kernel sends PR_SET_PDEATHSIG when the thread that started a process ends, and the caller's may be one of a
    pool; this one ends with its child or with this process.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def hold() -> None:
        try:
            process = subprocess.Popen(command, **options)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    threading.Thread(target=hold, name="engine-parent", daemon=True).start()
    return started.result()
