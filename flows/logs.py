"""What the work says of itself, in the logs of its Prefect run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.logging import get_run_logger

from extract_core.errors import EngineError
from extract_core.progress import Silent, reporter, set_reporter
from extract_core.words import harmless

_MOST = 20_000
"""Characters of one record; Prefect refuses a megabyte."""


class LogReporter(Silent):
    """Stages and notes become log lines of the run; progress goes to artifacts.

    Args:
        logger: of the run. It is kept, since threads of ours have no run of their own to ask for one.
    """

    def __init__(self, logger: Any):
        self._logger = logger

    def stage(self, name: str, total: int | None = None, unit: str = "") -> None:
        """Say what begins."""
        self._logger.info(harmless(f"{name}: {total:,} {unit}" if total else name))

    def note(self, text: str) -> None:
        """Pass it on."""
        self._logger.info(harmless(text))

    def warn(self, level: int, text: str) -> None:
        """A line of the engine, with its own level."""
        self._logger.log(level, harmless(text))


@contextmanager
def told_to_run() -> Iterator[LogReporter]:
    """Inside a flow run: whoever reports is heard in its logs, and a failure leaves the engine's own words there."""
    told = LogReporter(get_run_logger())
    before = reporter()
    set_reporter(told)
    try:
        yield told
    except EngineError as error:
        for what, text in (("traceback", error.engine_traceback), ("last lines", error.log_tail)):
            if text:
                told.warn(logging.ERROR, f"{what} of the engine:\n{text[-_MOST:]}")
        if error.report is not None:
            told.warn(logging.ERROR, "\n".join(f"{name}: {value}" for name, value in error.report.rows())[-_MOST:])
        raise
    finally:
        set_reporter(before)
