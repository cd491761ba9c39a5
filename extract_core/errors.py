"""The exception types of Coresample, one per kind of failure.

The tree follows what a caller does next: correct the job (exit 2), retry, replace the engine, quarantine a sample, or
stop. Whether a retry can help is the class attribute ``retryable``; the process exit code is ``exit_code``. Every
message says what was expected, what came and what to do.
"""

from __future__ import annotations

from typing import ClassVar


def shortened(text: str, limit: int = 200) -> str:
    """A user's value for a message: cut in the middle where it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]} ... {text[-(limit - head) :]} ({len(text):,} characters)"


class CoresampleError(Exception):
    """Base of every failure that Coresample itself reports; its text is meant for the user."""

    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1


class SettingsError(CoresampleError):
    """The job file, a flag or an environment variable is wrong; names the field."""

    exit_code = 2


class InputDataError(CoresampleError):
    """The chat data as a whole cannot be used; names file, row and field where there is one."""

    exit_code = 2

    def __init__(self, message: str, *, file: str | None = None, row: int | None = None, field: str | None = None):
        self.file, self.row, self.field = file, row, field
        where = ", ".join(
            part
            for part in (
                file,
                None if row is None else f"row {row}",
                None if field is None else f"field {field!r}",
            )
            if part is not None
        )
        super().__init__(f"{where}: {message}" if where else message)


class TemplateError(CoresampleError):
    """The chat template is missing or fails on every conversation."""

    exit_code = 2


class ModelError(CoresampleError):
    """The model cannot be found, read or used for what the job asks."""

    exit_code = 2


class LayerIdError(ModelError):
    """A layer id is out of range, repeated, or not reachable on this model and engine."""


class RootConflictError(CoresampleError):
    """The output root holds something that this job must not touch."""

    exit_code = 2


class StoreError(CoresampleError):
    """Reading or writing the dataset root failed for good."""


class StoreUnavailableError(StoreError):
    """The store did not answer; the same call may succeed later."""

    retryable = True


class NoSpaceError(StoreError):
    """A disk or quota is full; committed shards are kept and the same command resumes."""


class RootError(StoreError):
    """The dataset root (or the spool) names a place that cannot be used: wrong path, link, type or permissions."""

    exit_code = 2


class NoSuchVersionError(StoreError):
    """The dataset root has no such published version; names those that it has."""

    exit_code = 2


class AlreadyExistsError(StoreError):
    """An exclusive create found the name taken; carries the bytes that are there."""

    def __init__(self, path: str, existing: bytes):
        super().__init__(f"{path} exists already; it is written once and never replaced")
        self.path, self.existing = path, existing


class CorruptDataError(StoreError):
    """Stored bytes do not match their checksum, count or schema; names the object."""


class EngineError(CoresampleError):
    """The inference engine failed.

    Args:
        message: what happened, in one line, with the engine's own root cause.
        engine_traceback: the innermost traceback of the engine process, verbatim.
        log_tail: the last lines that the engine process printed.
    """

    def __init__(self, message: str, *, engine_traceback: str = "", log_tail: str = ""):
        super().__init__(message)
        self.engine_traceback, self.log_tail = engine_traceback, log_tail


class EngineStartError(EngineError):
    """The engine did not start: the same settings will fail again."""


class EngineIncompatibleError(EngineError):
    """The installed vLLM lacks something the capture needs; names it."""

    exit_code = 2


class EngineCrashedError(EngineError):
    """The engine process died or broke in mid-shard; a new one may finish the shard."""

    retryable = True


class EngineHungError(EngineCrashedError):
    """The engine made no progress for longer than the job allows and was killed."""


class CaptureError(EngineError):
    """Rows are missing, repeated or in the wrong place: never published, never guessed."""


class PreflightError(EngineError):
    """The self-test on the real model failed; nothing was extracted."""


class CheckFailedError(CoresampleError):
    """A published row would not satisfy a check; names check, shard and samples."""


class IncompleteError(CoresampleError):
    """Finished, but below the completeness threshold: nothing is published."""

    exit_code = 3
