"""The root cause of a failure: of an exception, or dug out of what the engine printed.

With tensor parallelism vLLM's own workers fail, log their traceback, and tell the process that asked only "Worker
failed with error ..., please check the stack trace above for the root cause".
"""

from __future__ import annotations

import logging
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

from extract_core.errors import shortened

TAIL_LINES = 50
_READ_BYTES = 512 * 1024
_MOST_BLOCK_LINES = 120
_AFTER_BLOCK_LINES = 15
_LONGEST_LINE = 400

_START = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^(?:\((?P<who>[^()]*)\) )?(?:(?P<level>[A-Z]+) [\d-]+ [\d:.]+ )?(?:\[[\w./]+:\d+\] ?)?")
"""``(Worker_TP1 pid=7) ERROR 11-30 04:05:04 [multiproc_executor.py:953]`` before every line of a logged traceback."""
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)')
LINKS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_CONSEQUENCES = re.compile(
    r"stack trace above|[Ss]ee stack trace|[Ss]ee root cause above|Worker failed with error|WorkerProc initialization"
    r"|Engine core initialization failed|EngineDeadError|BrokenPipeError|ConnectionResetError|Executor failed|cancelled"
)
"""What is raised because another process failed; the reason is elsewhere in the log."""


@dataclass
class Block:
    """A traceback, or a chain of them, of one process: its lines without vLLM's prefixes, and where they were."""

    who: str
    lines: list[str]
    first: int
    last: int
    ended: bool = False
    """The exception line has come."""

    @property
    def text(self) -> str:
        """As Python prints it."""
        return "\n".join(self.lines)

    @property
    def cause(self) -> str:
        """The exception line of the innermost one, with the source line that raised it."""
        where = code = ""
        for number, line in enumerate(self.lines[1:], 1):
            if match := _FRAME.match(line):
                code = self.lines[number + 1].strip() if number + 1 < len(self.lines) else ""
                where = f" at {Path(match['file']).name}:{match['line']}" + (f" `{code}`" if code else "")
            elif line and not line[0].isspace():
                return f"{line}{where}"
        return ""


def root_cause(error: BaseException) -> str:
    """The innermost exception of the chain in one line, never empty: an AssertionError gets its source line."""
    inner = error
    while (cause := inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)) is not None:
        inner = cause
    text = str(inner).strip()
    frames = traceback.extract_tb(inner.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} `{frames[-1].line}`" if frames else ""
    return f"{type(inner).__name__}: {text}{where}" if text else f"{type(inner).__name__}{where}"


def chained(inner: str, outer: str) -> str:
    """Two tracebacks as Python prints a cause and what was raised from it."""
    return f"{inner.strip()}\n\n{LINKS[0]}\n\n{outer.strip()}\n" if outer.strip() else inner


def is_consequence(message: str) -> bool:
    """Whether a message only says that another process failed."""
    return _CONSEQUENCES.search(message) is not None


def read_tail(log: Path) -> str:
    """The end of a log, as much of it as is searched; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _READ_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def tracebacks(text: str) -> list[Block]:
    """Every traceback chain of a log, in the order of their ends; lines of several processes may be mixed."""
    growing: dict[str, Block] = {}
    found: list[Block] = []
    for number, raw in enumerate(text.splitlines()):
        match = _PREFIX.match(raw)
        who, line = (match["who"] or "", raw[match.end() :]) if match else ("", raw)
        block = growing.get(who)
        if block is not None and block.ended and line and not line[0].isspace() and not line.startswith(LINKS):
            block = None  # it was complete, and this line is something else
            del growing[who]
        if line.startswith(_START) and block is None:
            growing[who] = block = Block(who, [], number, number)
            found.append(block)
        if block is None:
            continue
        if line and not line[0].isspace():
            block.ended = not line.startswith((_START, *LINKS))
        block.lines.append(line)
        block.last = number
    for block in found:
        while not block.lines[-1].strip():
            block.lines.pop()
            block.last -= 1
    return sorted(found, key=lambda block: block.last)


def root_block(text: str, known: str = "") -> Block | None:
    """The traceback that says why, of another process than the one that sent ``known``: the last that is a cause."""
    sent = known.strip()
    for block in reversed(tracebacks(text)):
        if block.cause and not is_consequence(block.cause) and block.text.strip() not in sent:
            return block
    return None


def last_error(text: str) -> str:
    """The last line that vLLM logged as an error, without its prefix; empty when there is none."""
    for raw in reversed(text.splitlines()):
        match = _PREFIX.match(raw)
        if match and match["level"] in ("ERROR", "CRITICAL") and (line := raw[match.end() :].strip()):
            return f"{line} ({match['who']})" if match["who"] else line
    return ""


def warning_line(raw: str) -> tuple[int, str] | None:
    """A line that vLLM logged as a warning or worse: its level (of ``logging``) and its text; None for any other."""
    match = _PREFIX.match(raw)
    level = logging.getLevelNamesMapping().get((match["level"] or "").strip()) if match else None
    if match is None or level is None or level < logging.WARNING or not (line := raw[match.end() :].strip()):
        return None
    return level, shortened(f"{line} ({match['who']})" if match["who"] else line, _LONGEST_LINE)


def stack_dump(text: str) -> str:
    """The last stack that Python's faulthandler printed of the thread at fault, innermost call first; or empty."""
    lines = text.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("Current thread 0x")]
    if not starts:
        return ""
    first = starts[-1]
    fatal = [n for n in range(max(0, first - 3), first) if lines[n].startswith("Fatal Python error")]
    end = next((n for n in range(first + 1, len(lines)) if not lines[n].startswith("  ")), len(lines))
    return "\n".join([*(lines[n] for n in fatal), *lines[first:end]])


def tail(text: str, known: str = "", lines: int = TAIL_LINES) -> str:
    """The last lines of a log; the traceback that says why comes before them where it began earlier."""
    every = [shortened(line, _LONGEST_LINE) for line in text.splitlines()]  # vLLM prints its whole configuration in one
    block = root_block(text, known)
    if block is None or block.first >= len(every) - lines:
        return "\n".join(every[-lines:])
    shown = every[block.first : block.last + 1]
    if len(shown) > _MOST_BLOCK_LINES:
        half = _MOST_BLOCK_LINES // 2
        shown = [*shown[:half], f"... ({len(shown) - 2 * half} lines)", *shown[-half:]]
    after = every[max(block.last + 1, len(every) - _AFTER_BLOCK_LINES) :]
    return "\n".join([*shown, "...", *after])
