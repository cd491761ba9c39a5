"""``verify --deep``: its options, and how its result is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extract_core.cli.common import counted, note, out, parse_pairs
from extract_core.cli.common import storage_options as storage

if TYPE_CHECKING:
    from extract_core.deep.verify import DeepReport

__all__ = ["Model", "Samples", "Seed", "Settings", "Trust", "Wanted", "check", "document", "run", "show", "storage"]

_PROBLEMS_SHOWN = 20

Samples = Annotated[
    int | None, typer.Option("--samples", metavar="N", min=1, help="With --deep: samples to compare; default 16.")
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="With --deep: decides which samples; default 0.")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="PATH", help="With --deep: where the model is now, if it was moved.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="engine.FIELD=VALUE",
        help="With --deep: an engine setting of this machine, e.g. engine.gpu_memory_utilization=0.5; repeatable.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="With --deep: run code that came with the model, as the job did."),
]


@dataclass(frozen=True)
class Wanted:
    """What the options ask for."""

    samples: int | None
    seed: int
    model: str | None
    engine: dict[str, Any]
    trust_remote_code: bool


def check(
    deep: bool, samples: int | None, seed: int | None, model: str | None, pairs: list[str] | None, trust: bool
) -> Wanted | None:
    """The options put together; None without ``--deep``.

    Raises:
        SettingsError: an option of --deep without it, or ``--set`` of something else than the engine.
    """
    from extract_core.errors import SettingsError

    if not deep:
        given = {
            "--samples": samples is not None,
            "--seed": seed is not None,
            "--model": model is not None,
            "--set": bool(pairs),
            "--trust-remote-code": trust,
        }
        if any(given.values()):
            first = next(name for name, is_given in given.items() if is_given)
            raise SettingsError(f"{first} is an option of --deep; add --deep, or leave it out")
        return None
    engine = {}
    for name, value in parse_pairs(pairs, "--set").items():
        section, _, field = name.partition(".")
        if section != "engine" or not field:
            raise SettingsError(f"--set {name}: only engine settings can be set here, e.g. engine.kv_cache_bytes=1GiB")
        engine[field] = value
    return Wanted(samples, seed or 0, model, engine, trust)


def run(url: str, version: int | None, options: dict[str, Any], wanted: Wanted) -> DeepReport:
    """Extract sampled rows of a version again and compare."""
    from extract_core.deep.verify import SAMPLES, verify_deep
    from extract_core.reader import HiddenStatesDataset

    return verify_deep(
        HiddenStatesDataset(url, version=version, storage_options=options),
        samples=wanted.samples if wanted.samples is not None else SAMPLES,
        seed=wanted.seed,
        model=wanted.model,
        trust_remote_code=wanted.trust_remote_code,
        engine=wanted.engine,
    )


def document(wanted: Wanted | None, report: DeepReport | None) -> dict[str, Any]:
    """The part of ``--json``: None where damage kept the rows from being compared."""
    return {} if wanted is None else {"deep": None if report is None else report.to_dict()}


def show(report: DeepReport) -> None:
    """The result for people."""
    from rich.table import Table
    from rich.text import Text

    console = out()
    compared = f"{counted(report.samples, 'sample')}, {counted(report.rows, 'row')}, seed {report.seed}"
    if report.ok:
        console.print(Text("Rows are right: ", style="bold green") + Text(f"{compared} are what the model gives now"))
    else:
        console.print(Text("Rows are wrong: ", style="bold red") + Text(f"{compared} extracted again"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("  layer")
    for name in ("bit-equal", "median", "largest"):
        table.add_column(name, justify="right")
    table.add_column("")
    for layer in report.layers:
        table.add_row(
            f"  {layer.layer}",
            f"{layer.equal_rows / layer.rows:.1%}" if layer.rows else "",
            f"{layer.median_error:.2e}",
            f"{layer.max_error:.2e}",
            Text("ok", style="green") if layer.passed else Text("FAILS", style="bold red"),
        )
    console.print(table)
    console.print(
        Text(
            f"  relative differences; {report.tolerance:.1e} is allowed at the 90th percentile of each sample, "
            f"{report.row_limit:g} for any row"
        )
    )
    if report.next_token is not None:
        console.print(
            Text(f"  next token: the same for {report.next_token['same']} of {report.next_token['samples']} samples")
        )
    for text in report.problems[:_PROBLEMS_SHOWN]:
        console.print(Text(f"  {text}"))
    if len(report.problems) > _PROBLEMS_SHOWN:
        console.print(Text(f"  ... {len(report.problems) - _PROBLEMS_SHOWN:,} more; --json lists all", style="dim"))
    for text in report.notes:
        note(f"note: {text}")
