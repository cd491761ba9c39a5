"""Names and texts of strangers on the screen: shown, never obeyed."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.text import Text

from extract_core.chat.types import Source
from extract_core.cli import common
from extract_core.cli.progress import PlainReporter
from extract_core.store import layout
from extract_core.words import harmless

NASTY = (
    "\x1b[2J\x1b]0;title\x07", "\x9b31m", "a\rb", "\u202egnp.exe", "\u2066x\u2069", "\ud800", "\x00\x08\x7f", "\u2028",
    "a\nb", "\x1b]52;c;aGk=\x07", "x" * 255, "\x1bP$q\x1b\\", "\x85",
)  # fmt: skip
OBEYED = set("\x00\x07\x08\x0d\x1b\x7f\x85\x9b\u202e\u2066\u2069\u2028\ud800")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("name", NASTY)
def test_no_console_passes_an_escape_on(name: str, terminal: bool, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    for console, stream in ((common.out(), "out"), (common.err(), "err")):
        console._force_terminal = terminal
        console.print(Text(f"sample {name} failed"))
        common.fields(console, [("source", str(Source(name, 3))), (name, name)])
        shown = getattr(capsys.readouterr(), stream)
        assert "failed" in shown
        assert not OBEYED & set(shown), shown


@pytest.mark.parametrize("name", NASTY)
def test_messages_and_progress_do_not_either(name: str, capsys) -> None:
    common.note(name)
    PlainReporter().note(name)
    PlainReporter().stage(name)
    assert not OBEYED & set(capsys.readouterr().err)


@pytest.mark.parametrize("name", NASTY)
def test_json_is_the_same_value_without_the_characters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    common.emit({"name": name, name: [name]})
    text = stream.getvalue()
    text.encode("utf-8")
    assert not OBEYED & set(text)
    assert json.loads(text) == {"name": name, name: [name]}


def test_harmless_leaves_honest_text_alone() -> None:
    honest = "Grüße, 你好, مرحبا, שלום, 🙂👩‍👩‍👧\tcode {x}\nline"
    assert harmless(honest) == honest
    assert harmless("\x1b[31mred\x1b[0m") == "red"


@pytest.mark.parametrize(
    "name", [*NASTY, "../../etc/passwd", "..", ".", "/", "", "CON", "é" * 200, "a" * 120, "a" * 121]
)
def test_sample_ids_become_file_names_of_their_own(name: str) -> None:
    path = layout.quarantine_path("ab" * 32, name)
    folder, _, file = path.rpartition("/")
    assert folder == layout.quarantine_dir("ab" * 32)
    assert file.isprintable() and file.isascii() and len(file) <= 125 and not file.startswith(".")
