"""The commands put together."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from extract_core.cli import dataset, machine, versions, work
from extract_core.cli.common import emit_error, on_sigterm


class _Group(TyperGroup):
    """Usage errors with ``--json`` are an object on standard output too, as other errors are."""

    _as_json = False

    def make_context(self, info_name: Any, args: list[str], *rest: Any, **extra: Any) -> Any:
        self._as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
        return self._telling(lambda: super(_Group, self).make_context(info_name, args, *rest, **extra))

    def invoke(self, ctx: Any) -> Any:
        return self._telling(lambda: super(_Group, self).invoke(ctx))

    def _telling(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:
            # click's own class, of which typer has a copy in newer releases
            if self._as_json and hasattr(error, "format_message") and getattr(error, "exit_code", 0) == 2:
                emit_error("UsageError", error.format_message() or "no command; see --help", 2)
            raise


app = typer.Typer(
    name="coresample",
    help="Drill hidden states out of large language models and publish them as datasets that a trainer can trust.",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # its frames show local variables
    rich_markup_mode="rich",
)


def _version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        typer.echo(f"coresample {metadata.version('coresample')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("doctor")(machine.doctor)
app.command("plan")(work.plan)
app.command("run")(work.run)
app.command("status")(dataset.status)
app.command("verify")(dataset.verify)
app.command("inspect")(dataset.inspect)
app.command("versions")(versions.versions)
app.command("tag")(versions.tag)
app.command("diff")(versions.diff)
app.command("gc")(versions.gc)


def main() -> None:
    """Entry point of the console script; ends the process with 0, 1, 2, 3, 130 (Ctrl-C) or 143 (SIGTERM)."""
    signal.signal(signal.SIGTERM, on_sigterm)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except SystemExit as end:
        _end(end.code if isinstance(end.code, int) else int(end.code is not None))


def _end(status: int) -> None:
    """End the process with what the command came to, after everything that runs at an exit has run.

    The interpreter is not taken down: it would stop daemon threads of libraries (Prefect's, s3fs's) wherever they are,
    and one inside C++ code then aborts the process, "terminate called without an active exception", with status 134
    after a run that published (seen once in 40 runs under load).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all other threads, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
