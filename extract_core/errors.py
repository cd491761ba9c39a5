"""The exception types of Coresample, one per kind of failure.

The tree follows what a caller does next: correct the job (exit 2), retry, replace the engine, quarantine a sample, or
stop. Whether a retry can help is the class attribute ``retryable``; the process exit code is ``exit_code``. Every
message says what was expected, what came and what to do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


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


class MemoryPlanError(SettingsError):
    """The job does not fit the memory of this machine; names what needs how much, and the numbers to lower."""


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


class TemplateOverrunError(TemplateError):
    """The chat template does not end, or takes memory without bound; names the row where there is one."""


class ModelError(CoresampleError):
    """The model cannot be found, read or used for what the job asks."""

    exit_code = 2


class LayerIdError(ModelError):
    """A layer id is out of range, repeated, or not reachable on this model and engine."""


class RootConflictError(CoresampleError):
    """The output root holds something that this job must not touch."""

    exit_code = 2


class RootBusyError(RootConflictError):
    """Another run publishes to a root whose store cannot keep two apart."""


class StoreError(CoresampleError):
    """Reading or writing the dataset root failed for good."""


class StoreUnavailableError(StoreError):
    """The store did not answer; the same call may succeed later."""

    retryable = True


class UploadMismatchError(StoreUnavailableError):
    """A store reports other bytes than were sent; the upload was undone, and another may succeed."""


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


@dataclass(frozen=True)
class EngineReport:
    """The circumstances of an engine's failure, beside its cause.

    Args:
        stage: what the engine was doing.
        log: file with everything that this engine process printed.
        versions: of vLLM, torch and transformers.
        settings: how the engine was built; its own figures where it was up.
        in_flight: samples that it held.
    """

    MOST_NAMES: ClassVar[int] = 8

    stage: str = ""
    log: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    in_flight: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for people; what is unknown is left out, and so is the log, which the message names."""
        names = ", ".join(self.in_flight[: self.MOST_NAMES])
        more = len(self.in_flight) - self.MOST_NAMES
        rows = [
            ("stage", self.stage),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
            ("settings", ", ".join(f"{name}={value}" for name, value in self.settings.items())),
            ("in flight", f"{names} and {more:,} more" if more > 0 else names),
        ]
        return [(name, text) for name, text in rows if text]

    def to_dict(self) -> dict[str, Any]:
        """As an object of JSON."""
        return asdict(self) | {"in_flight": list(self.in_flight)}


class EngineError(CoresampleError):
    """The inference engine failed.

    Args:
        message: what happened, in one line, with the engine's own root cause.
        engine_traceback: the innermost traceback of the engine process, verbatim.
        log_tail: the last lines that the engine process printed, and the traceback that says why.
        report: versions, settings, samples in flight; None where no engine process was involved.
    """

    def __init__(
        self, message: str, *, engine_traceback: str = "", log_tail: str = "", report: EngineReport | None = None
    ):
        super().__init__(message)
        self.engine_traceback, self.log_tail, self.report = engine_traceback, log_tail, report


class EngineStartError(EngineError):
    """The engine did not start: the same settings will fail again."""


class EngineKilledError(EngineStartError):
    """Something outside killed or stopped the engine while it started; another start may succeed."""


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
