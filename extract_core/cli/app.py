"""The commands put together."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer

from extract_core.cli import dataset, machine, work
from extract_core.cli.common import on_sigterm

app = typer.Typer(
    name="coresample",
    help="Drill hidden states out of large language models and publish them as datasets that a trainer can trust.",
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


def main() -> None:
    """Entry point of the console script; ends the process with 0, 1, 2, 3, 130 (Ctrl-C) or 143 (SIGTERM)."""
    signal.signal(signal.SIGTERM, on_sigterm)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app()
