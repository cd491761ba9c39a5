"""Progress of long work in a terminal, as plain lines in a log, or not at all.

Each is an ``extract_core.progress.Reporter``; calls may come from several threads.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from extract_core.cli.common import duration, err, size
from extract_core.progress import Reporter, Silent, reporter, set_reporter
from extract_core.words import harmless

_WINDOW_S = 60.0


def amount(count: float, unit: str) -> str:
    """``12,345 tokens`` or ``9.5 MiB``."""
    if unit == "bytes":
        return size(count)
    number = f"{count:,.0f}"
    return f"{number} {unit.removesuffix('s') if number == '1' else unit}".rstrip()


class Pace:
    """Rate over the last minute and the time left."""

    def __init__(self, total: int | None) -> None:
        self.total, self.done = total, 0
        self.started = time.monotonic()
        self._seen: deque[tuple[float, int]] = deque([(self.started, 0)])

    def update(self, done: int) -> None:
        """``done`` in all, now; never goes back (a shard that is tried again counts once)."""
        self.done = max(self.done, done)
        now = time.monotonic()
        self._seen.append((now, self.done))
        while len(self._seen) > 2 and self._seen[1][0] < now - _WINDOW_S:
            self._seen.popleft()

    @property
    def rate(self) -> float:
        """Units per second; 0 as long as nothing is known."""
        (first, before), (last, done) = self._seen[0], self._seen[-1]
        return (done - before) / (last - first) if last > first else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None where it is unknown."""
        if self.total is None or self.rate <= 0:
            return None
        return max(0.0, (self.total - self.done) / self.rate)

    def words(self, unit: str) -> str:
        """``1,200 of 4,800 tokens (25 %), 300 tokens/s, 12 s left``."""
        parts = [amount(self.done, unit)]
        if self.total:
            whole = amount(self.total, unit)
            parts = [f"{amount(self.done, unit) if unit == 'bytes' else f'{self.done:,}'} of {whole}"]
            parts[0] += f" ({100 * self.done / self.total:.0f} %)"
        if self.rate > 0:
            parts.append(f"{amount(self.rate, unit)}/s")
        if (left := self.seconds_left) is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

    def short(self, unit: str) -> str:
        """The same beside a bar, where room is scarce: ``1,200/4,800 tokens, 300/s, 12 s left``."""
        plain = size if unit == "bytes" else "{:,.0f}".format
        text = plain(self.done) + (f"/{plain(self.total)}" if self.total else "")
        parts = [text if unit == "bytes" else f"{text} {unit}"]
        if self.rate > 0:
            parts.append(f"{plain(self.rate)}/s")
        if (left := self.seconds_left) is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)


class _PaceColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        pace: Pace = task.fields["pace"]
        if task.finished or pace.done == 0:
            done = f"{amount(pace.done, task.fields['unit'])} in " if pace.done else ""
            return Text(done + duration(task.finished_time or task.elapsed or 0.0), style="dim")
        return Text(pace.short(task.fields["unit"]))


class TerminalReporter:
    """One line per stage, the current one moving."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/green]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            _PaceColumn(),
            console=err(),
            refresh_per_second=4,
        )
        self._task: TaskID | None = None
        self._pace = Pace(None)
        self._name = ""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to draw."""
        self._progress.start()

    def stop(self, finished: bool) -> None:
        """Draw for the last time."""
        with self._lock:
            if finished:
                self._finish()
        self._progress.stop()

    def _finish(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, total=1, completed=1)

    def stage(self, name: str, total: int | None = None, unit: str = "") -> None:
        """A new line; the one before is done."""
        with self._lock:
            if name == self._name and total is None:
                return
            self._finish()
            self._pace, self._name = Pace(total), name
            self._task = self._progress.add_task(f"{name:<20}", total=total, pace=self._pace, unit=unit)

    def advance(self, done: int) -> None:
        """Move the bar."""
        with self._lock:
            self._pace.update(done)
            if self._task is not None:
                self._progress.update(self._task, completed=self._pace.done)

    def note(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(Text(f"  {text}", style="dim"))


class PlainReporter:
    """Lines for logs: each stage and note at once, progress every ``every_s`` seconds."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._pace, self._name, self._unit = Pace(None), "", ""
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def _line(self, text: str) -> None:
        print(harmless(text), file=sys.stderr, flush=True)

    def stage(self, name: str, total: int | None = None, unit: str = "") -> None:
        """Say what begins."""
        with self._lock:
            if name == self._name and total is None:
                return
            self._pace, self._name, self._unit = Pace(total), name, unit
            self._last = time.monotonic()
        self._line(f"{name}: {amount(total, unit)}" if total else name)

    def advance(self, done: int) -> None:
        """Say how far it is, now and then."""
        with self._lock:
            self._pace.update(done)
            now = time.monotonic()
            if now - self._last < self._every_s:
                return
            self._last = now
            text = f"{self._name}: {self._pace.words(self._unit)}"
        self._line(text)

    def note(self, text: str) -> None:
        """Pass it on."""
        self._line(f"  {text}")


class NotesOnly(Silent):
    """Nothing but notes; for ``--json``."""

    def note(self, text: str) -> None:
        """Pass it on."""
        print(harmless(text), file=sys.stderr, flush=True)


@contextmanager
def shown(*, quiet: bool = False, as_json: bool = False) -> Iterator[Reporter]:
    """Report progress to standard error in the way that fits, for as long as the block runs."""
    chosen: Reporter
    if quiet:
        chosen = Silent()
    elif as_json:
        chosen = NotesOnly()
    elif sys.stderr.isatty():
        chosen = TerminalReporter()
    else:
        chosen = PlainReporter()
    before = reporter()
    set_reporter(chosen)
    finished = False
    try:
        if isinstance(chosen, TerminalReporter):
            chosen.start()
        yield chosen
        finished = True
    finally:
        if isinstance(chosen, TerminalReporter):
            chosen.stop(finished)
        set_reporter(before)
