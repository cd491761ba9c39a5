"""How long work tells what it is doing, without knowing who listens (terminal, Prefect, nobody)."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receives stages, amounts and notes; every method returns at once and never raises."""

    def stage(self, name: str, total: int | None = None, unit: str = "") -> None:
        """A new stage begins; ``total`` in ``unit`` where it is known."""

    def advance(self, done: int) -> None:
        """``done`` of the current stage's total is done (absolute, not a step)."""

    def note(self, text: str) -> None:
        """One line for the user."""


class Silent:
    """Listens and says nothing."""

    def stage(self, name: str, total: int | None = None, unit: str = "") -> None:
        """Ignored."""

    def advance(self, done: int) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""


_current: list[Reporter] = [Silent()]


def reporter() -> Reporter:
    """The reporter of this process; a flow cannot take one as a parameter, since parameters are serialized."""
    return _current[-1]


def set_reporter(new: Reporter) -> None:
    """Choose who listens from now on."""
    _current[:] = [new]
