"""Progress in a terminal, in a log, and not at all."""

import io
import threading

import pytest
from rich.console import Console

from extract_core.cli import progress as module
from extract_core.cli.progress import NotesOnly, Pace, PlainReporter, TerminalReporter, amount, shown
from extract_core.progress import Silent, reporter


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_pace(clock):
    pace = Pace(1000)
    assert pace.rate == 0 and pace.seconds_left is None and pace.words("tokens") == "0 of 1,000 tokens (0 %)"
    clock[0] += 10
    pace.update(200)
    assert pace.rate == 20 and pace.seconds_left == 40
    assert pace.words("tokens") == "200 of 1,000 tokens (20 %), 20 tokens/s, 40 s left"
    assert pace.short("tokens") == "200/1,000 tokens, 20/s, 40 s left"
    assert pace.short("bytes") == "200 B/1000 B, 20 B/s, 40 s left"
    pace.update(150)  # a shard that is tried again
    assert pace.done == 200
    clock[0] += 600
    pace.update(200)
    clock[0] += 10
    pace.update(400)
    assert pace.rate < 20  # the last minute counts, and it was slow


def test_amounts():
    assert amount(1234, "tokens") == "1,234 tokens" and amount(2**20, "bytes") == "1.0 MiB" and amount(3, "") == "3"


def test_plain_lines(clock, capsys):
    plain = PlainReporter(every_s=10)
    plain.stage("Extracting", total=1000, unit="tokens")
    for _ in range(30):
        clock[0] += 1
        plain.advance(int(clock[0] - 100) * 10)
    plain.note("engine: ready")
    plain.stage("Checking")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "Extracting: 1,000 tokens",
        "Extracting: 100 of 1,000 tokens (10 %), 10 tokens/s, 90 s left".replace("90 s", "2 min"),
        "Extracting: 200 of 1,000 tokens (20 %), 10 tokens/s, 80 s left",
        "Extracting: 300 of 1,000 tokens (30 %), 10 tokens/s, 70 s left",
        "  engine: ready",
        "Checking",
    ]


def test_terminal_lines_from_many_threads(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(module, "err", lambda: Console(file=screen, force_terminal=True, width=120))
    with_bars = TerminalReporter()
    with_bars.start()
    with_bars.stage("Planning")
    with_bars.stage("Extracting", total=4000, unit="tokens")
    threads = [
        threading.Thread(target=lambda n=n: [with_bars.advance(k * 4 + n) for k in range(1000)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with_bars.note("a [note]")
    with_bars.stop(finished=True)
    text = screen.getvalue()
    assert "Planning" in text and "Extracting" in text and "a [note]" in text and "tokens" in text


def test_the_reporter_that_fits(capsys):
    before = reporter()
    with shown(quiet=True) as chosen:
        assert type(chosen) is Silent and reporter() is chosen
    with shown(as_json=True) as chosen:
        assert type(chosen) is NotesOnly
        chosen.stage("Planning")
        chosen.note("a note")
    with pytest.raises(ValueError), shown() as chosen:
        assert type(chosen) is PlainReporter  # tests have no terminal
        raise ValueError
    assert reporter() is before
    written = capsys.readouterr()
    assert (written.out, written.err) == ("", "a note\n")
