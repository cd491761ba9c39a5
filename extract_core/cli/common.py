"""What every command shares: where output goes, how failures end, option types and how numbers are written.

Results go to standard output, everything else (progress, notes, errors) to standard error. With ``--json`` standard
output holds one JSON object and nothing more.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from extract_core.errors import CoresampleError, EngineError, NoSpaceError, SettingsError, shortened
from extract_core.words import UNSAFE, harmless
from extract_core.words import duration as duration
from extract_core.words import size as size

if TYPE_CHECKING:
    from extract_core.settings import JobSettings
    from extract_core.store.root import Root

P = ParamSpec("P")

INTERRUPTED = 130
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends a command like Ctrl-C does, so that engine, spool and private server are put away."""


def on_sigterm(*_: object) -> None:
    """Signal handler for SIGTERM."""
    raise Terminated


_WIDE = 250

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output.")]
JobFile = Annotated[str, typer.Argument(metavar="JOB.YAML", help="The job file; see docs/configuration.md.")]
RootOption = Annotated[str | None, typer.Option("--root", help="Dataset root instead of the job file's.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Override a field of the job, e.g. chat.max_length=512; repeatable."
    ),
]
DatasetArgument = Annotated[
    str,
    typer.Argument(metavar="ROOT[@VERSION]", help="A folder or URL such as s3://bucket/prefix; a version or a tag."),
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="fsspec option of a remote root, e.g. endpoint_url=http://host:9000; repeatable.",
    ),
]
JobOption = Annotated[
    str | None, typer.Option("--job", metavar="JOB.YAML", help="Take the root's storage options from this job file.")
]


class _SafeConsole(Console):
    """Shows what comes from data, models and stores as it is, but never obeys it.

    Escape sequences, other control characters and the marks that turn the direction of text around are written out
    in every text that is printed; rich removes some of them only.
    """

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        """Segments, made safe; what rich itself sends to control the terminal is left alone."""
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control or not UNSAFE.search(segment.text)
                else segment._replace(text=harmless(segment.text))
            )


def out() -> Console:
    """Standard output. Made anew, so that redirection in the meantime is seen; files and pipes get long lines whole."""
    if sys.stdout.isatty():
        return _SafeConsole(highlight=False)
    return _SafeConsole(highlight=False, width=_WIDE, soft_wrap=True)


def err() -> Console:
    """Standard error."""
    plain = {} if sys.stderr.isatty() else {"width": _WIDE, "soft_wrap": True}
    return _SafeConsole(stderr=True, highlight=False, **plain)  # type: ignore[arg-type]


def fields(console: Console, rows: list[tuple[str, str]]) -> None:
    """Names and values, one below the other; an empty name goes on with the one above."""
    if not console.is_terminal:
        for name, text in rows:
            console.print(Text(f"{name:<12}{text}".rstrip()))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    console.print(table)


def emit(document: Mapping[str, Any]) -> None:
    """The result of a command with ``--json``."""
    text = json.dumps(document, indent=2, ensure_ascii=False, default=str)
    sys.stdout.write(UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def note(text: str) -> None:
    """One line for the user, on standard error."""
    err().print(Text(text))


@contextlib.contextmanager
def pure_stdout(active: bool) -> Iterator[None]:
    """While active, whatever is written to standard output, by any library or child process, goes to standard error."""
    if not active:
        yield
        return
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # standard output is closed
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


# -- failures --------------------------------------------------------------------------------------------------------


def guarded(command: Callable[P, int | None]) -> Callable[P, None]:
    """A command whose failures become messages and exit codes; an int that it returns is its exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        try:
            code = command(*args, **kwargs) or 0
            sys.stdout.flush()
        except typer.Exit:
            raise
        except BrokenPipeError:
            _forget_stdout()
            code = 1
        except KeyboardInterrupt as error:
            code = TERMINATED if isinstance(error, Terminated) else INTERRUPTED
            text = f"interrupted{_KEPT}" if command.__name__ == "run" else "interrupted"
            _report("KeyboardInterrupt", text, code, as_json)
        except BaseException as error:
            known = understood(error)
            if known is None:
                if as_json:
                    emit_error(type(error).__name__, str(error), 1)
                raise
            code = known.exit_code
            _report(type(known).__name__, str(known), code, as_json, known)
        raise typer.Exit(code)

    return run


_KEPT = "; committed shards are kept and nothing half-written is visible: give the same command again to go on"


def understood(error: BaseException) -> CoresampleError | None:
    """The failure as one of ours; None for a defect, whose traceback is worth seeing.

    Looks through what an orchestrator raised from it, and knows the operating system's refusals.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CoresampleError):
            return seen
        seen = seen.__cause__
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, BrokenPipeError):
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpaceError(
                f"{where}{error.strerror}; free space or raise the quota, then give the same command again "
                "(committed shards are kept)"
            )
        if error.filename:
            return CoresampleError(f"{where}{error.strerror}")
    return None


def _report(kind: str, message: str, code: int, as_json: bool, error: CoresampleError | None = None) -> None:
    if as_json:
        emit_error(kind, message, code, error)
    with contextlib.suppress(BrokenPipeError):
        console = err()
        style = "bold yellow" if code == INTERRUPTED else "bold red"
        lead = "" if code == INTERRUPTED else "error: "
        console.print(Text(lead, style=style) + Text(message, style="" if lead else style))
        if isinstance(error, EngineError):
            _engine_failure(console, error)


def _engine_failure(console: Console, error: EngineError) -> None:
    """What is known beside the message; the traceback comes last, with its innermost frame at the end."""
    if error.report is not None and (rows := error.report.rows()):
        console.print(Text("\nthe engine:", style="bold"))
        fields(console, rows)
    whole = error.engine_traceback.strip()
    tail = error.log_tail.replace(whole or "\0", "(the traceback below)").strip()
    if tail:
        console.print(Text("\nfrom the engine's log:", style="bold"))
        console.print(Text(tail, style="dim"))
    if whole:
        console.print(Text("\nengine traceback (innermost):", style="bold"))
        console.print(Text(innermost(whole)))


def emit_error(kind: str, message: str, code: int, error: CoresampleError | None = None) -> None:
    """A failure with ``--json``."""
    document: dict[str, Any] = {"type": kind, "message": message, "exit_code": code}
    if isinstance(error, EngineError):
        document |= {
            "engine_traceback": error.engine_traceback,
            "log_tail": error.log_tail,
            "engine": error.report.to_dict() if error.report is not None else None,
        }
    with contextlib.suppress(BrokenPipeError):
        emit({"error": document})
        sys.stdout.flush()


def innermost(traceback_text: str) -> str:
    """The first traceback of a chain, which is the innermost cause."""
    for mark in (
        "\nThe above exception was the direct cause of the following exception:\n",
        "\nDuring handling of the above exception, another exception occurred:\n",
    ):
        traceback_text = traceback_text.partition(mark)[0]
    return traceback_text.strip()


def _forget_stdout() -> None:
    """The reader is gone: what is left in the buffer must not fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


# -- options ---------------------------------------------------------------------------------------------------------


def parse_pairs(pairs: list[str] | None, option: str) -> dict[str, Any]:
    """``["a.b=1", "c=x"]`` -> ``{"a.b": 1, "c": "x"}``; values are read as YAML, as in a job file.

    Raises:
        SettingsError: not a ``name=value``.
    """
    result: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise SettingsError(
                f"{option} {shortened(pair)!r} is not of the form name=value, e.g. {option} chat.max_length=512"
            )
        from extract_core.settings import parse_yaml

        result[name.strip()] = parse_yaml(text, f"{option} {shortened(name.strip())}=...: the value")
    return result


def load(job_file: str, pairs: list[str] | None, root: str | None) -> Any:
    """The settings of a command that takes a job file (``JobSettings``)."""
    from extract_core.settings import load_job

    overrides = parse_pairs(pairs, "--set")
    if root is not None:
        overrides["root"] = root
    return load_job(job_file, overrides)


def storage_options(storage: list[str] | None, job_file: str | None) -> dict[str, Any]:
    """The root's fsspec options: those of the job file, and over them the flags."""
    options = dict(load(job_file, None, None).store.storage_options) if job_file is not None else {}
    return options | parse_pairs(storage, "--storage-option")


def open_dataset(ref: str, storage: list[str] | None, job_file: str | None) -> tuple[Root, int | None]:
    """Root and version of ``ROOT[@VERSION]`` or ``ROOT@TAG``; the version is None for the latest.

    Raises:
        SettingsError: malformed, or a local root that does not exist.
    """
    from extract_core.store.tags import open_ref
    from extract_core.store.versions import no_version_in

    root, version = open_ref(ref, storage_options(storage, job_file))
    path = root.local_path("")
    if path is not None and not path.exists():
        wrong = no_version_in(ref) if version is None else ""
        advice = wrong or "give the folder or URL that a job writes to"
        raise SettingsError(f"dataset root {shortened(str(path))} does not exist; {advice}")
    return root, version


def check_places(settings: JobSettings) -> None:
    """Refuse a root or a spool that cannot be written, before anything slow happens; leaves nothing there.

    Raises:
        RootError, RootConflictError, NoSpaceError, SettingsError: names the field.
    """
    from extract_core.store.localfiles import check_writable, local_folder
    from extract_core.store.root import Root

    root = Root.open(settings.root, settings.store.storage_options)
    root.check_writable()
    if settings.store.spool is not None:
        check_writable(local_folder(settings.store.spool, "store.spool"), "store.spool")
    elif (beside := root.local_path(".spool")) is not None:
        local_folder(beside, "the spool beside the root,")


# -- words -----------------------------------------------------------------------------------------------------------


def counted(count: int, noun: str) -> str:
    """``1 shard``, ``1,200 shards``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def by_reason(counts: Mapping[str, int]) -> str:
    """``(not_json 3, truncated_away 1)``, empty when there is nothing."""
    return f" ({', '.join(f'{reason} {count:,}' for reason, count in sorted(counts.items()))})" if counts else ""


def accounting_line(accounting: Any) -> str:
    """Where every input row went, as the equation that the store asserts (``store.records.Accounting``)."""
    a = accounting
    return (
        f"{counted(a.input, 'input row')} = {a.published:,} published + {counted(a.duplicates, 'duplicate')} + "
        f"{sum(a.dropped.values()):,} dropped{by_reason(a.dropped)} + "
        f"{sum(a.quarantined.values()):,} quarantined{by_reason(a.quarantined)}"
    )


def checks_line(checks: Mapping[str, Any]) -> str:
    """``6 of 6 checks passed``, with the names of those that did not."""
    failed = [name for name, result in checks.items() if not result.get("passed")]
    return f"{len(checks) - len(failed)} of {len(checks)} passed" + (f"; failed: {', '.join(failed)}" if failed else "")


def layer_in_words(k: int, n: int) -> str:
    """What layer id k of a model of n blocks is."""
    if k == 0:
        return "embeddings, before the first block"
    if k == n:
        return f"after block {k} of {n} (the last), before the final norm"
    return f"after block {k} of {n}"
