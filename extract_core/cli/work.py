"""``plan`` and ``run``: the commands that take a job file."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extract_core.cli.common import (
    AsJson,
    JobFile,
    RootOption,
    SetOption,
    accounting_line,
    by_reason,
    check_places,
    checks_line,
    counted,
    duration,
    emit,
    fields,
    guarded,
    layer_in_words,
    load,
    out,
    pure_stdout,
    size,
)

if TYPE_CHECKING:
    from extract_core.job import Job
    from extract_core.local import RunResult
    from extract_core.pipeline import Work
    from extract_core.pipeline.todo import ShardTask
    from extract_core.planning.estimate import Estimate
    from extract_core.planning.memory import MemoryPlan

# The flow by name, resolved when `run` needs it: the command is the one place where the library hands over to the
# orchestration on top of it. extract_core imports neither flows nor Prefect, and runs without both (--no-prefect).
FLOW = "flows.extract:run_flow"

_BAR = 30


@guarded
def plan(
    job_file: JobFile,
    root: RootOption = None,
    sets: SetOption = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> int | None:
    """Say what a job will do: tokens, shards, bytes, memory, what is dropped, how long it takes. Runs no model.

    The plan itself is written under the root (plans/), where a later run finds it; nothing else is.
    """
    from extract_core.cli.progress import shown

    settings = load(job_file, sets, root)
    with pure_stdout(as_json), shown(quiet=quiet, as_json=as_json) as progress:
        check_places(settings)
        from extract_core.job import prepare
        from extract_core.pipeline.todo import outstanding
        from extract_core.planning.estimate import estimate
        from extract_core.store.commits import read_commits

        job = prepare(settings)
        meta = job.plan.meta
        progress.stage("Estimating")
        done = read_commits(job.root, meta.fingerprint)
        todo = outstanding(job)
        open_tokens = sum(task.rows for task in todo.tasks)
        time_needed = estimate(
            job.root,
            meta.spec,
            tokens=open_tokens,
            parameters=job.model.parameters,
            hidden_size=job.model.hidden_size,
            gpus=settings.engine.tensor_parallel_size,
        )
        memory = job.memory_plan()
    document = _plan_document(job, len(done), time_needed, todo.existing.version if todo.existing else None)
    document["to_retry"] = sum(len(task.earlier) for task in todo.tasks)
    document |= _to_do(job, todo)
    document["memory"] = memory.to_dict()
    if as_json:
        emit(document)
    else:
        _show_plan(job, document, time_needed, memory)
    return None


def _plan_document(job: Job, committed: int, time_needed: Estimate, published: int | None) -> dict[str, Any]:
    from extract_core.store import layout

    meta = job.plan.meta
    return {
        "root": job.root.url,
        "fingerprint": meta.fingerprint,
        "published_version": published,
        "input": meta.input,
        "samples": meta.samples,
        "tokens": meta.tokens,
        "rows": meta.rows,
        "computed": meta.computed,
        "supervised_tokens": meta.supervised_tokens,
        "longest": meta.longest,
        "truncated": meta.truncated,
        "duplicates": meta.duplicates,
        "dropped": meta.dropped,
        "malformed": meta.malformed,
        "dropped_file": job.root.describe(layout.dropped_path(meta.fingerprint)),
        "mask_methods": meta.mask_methods,
        "length_histogram": meta.length_histogram,
        "shards": len(meta.shards),
        "shards_committed": committed,
        "bytes": meta.bytes,
        "row_bytes": meta.row_bytes,
        "disk_free_bytes": _disk_free(job),
        "model": {
            "name": job.model.name,
            "architecture": job.model.architecture,
            "n_layers": job.model.n_layers,
            "hidden_size": job.model.hidden_size,
            "parameters": job.model.parameters,
            "dtype": job.model.dtype,
        },
        "dtype": job.dtype,
        "layers": {str(k): layer_in_words(k, job.model.n_layers) for k in job.layer_ids},
        "estimate": time_needed.to_dict(),
        "notes": list(job.notes),
    }


def _to_do(job: Job, todo: Work) -> dict[str, Any]:
    """What the plan refers to instead of extracting it, and what a run would extract."""
    planned = {shard.index: shard.samples for shard in job.plan.meta.shards}
    tasks = todo.tasks
    return {
        "reused": todo.origin.get("reused", {"samples": 0, "tokens": 0, "shards": 0, "fingerprints": []}),
        "to_extract": {
            "samples": sum(planned[t.shard] if t.samples is None else len(t.samples) for t in tasks),
            "tokens": sum(_tokens(job, task) for task in tasks),
            "rows": sum(task.rows for task in tasks),
            "shards": len(tasks),
        },
    }


def _tokens(job: Job, task: ShardTask) -> int:
    """Tokens of its samples, shared ones counted for each."""
    if not job.plan.shares:
        return task.rows
    lengths = job.plan.lengths(task.shard)
    return sum(lengths.values() if task.samples is None else (lengths[name] for name in task.samples))


def _disk_free(job: Job) -> int | None:
    import shutil

    local = job.root.local_path("")
    return shutil.disk_usage(local).free if local is not None else None


def memory_table(memory: MemoryPlan) -> list[str]:
    """Every line with its size, by place, and the sum of each place against what is free."""
    rows = []
    for place in memory.places:
        there = f"not compared ({place.what})" if place.available is None else f"{size(place.available)} {place.what}"
        rows.append(f"{place.name}: {size(place.needed)} of {there}")
        rows += [
            f"  {'~' if line.estimate else ' '}{size(line.nbytes):>9}  {line.name} ({line.how})"
            for line in memory.lines
            if line.place == place.name
        ]
    return rows


def _show_plan(job: Job, document: dict[str, Any], time_needed: Estimate, memory: MemoryPlan) -> None:
    from rich.text import Text

    meta, console = job.plan.meta, out()
    rows: list[tuple[str, str]] = []

    def line(name: str, text: str) -> None:
        rows.append((name, text))

    model = job.model
    line("plan", f"{meta.fingerprint} under {job.root.url}")
    line(
        "model",
        f"{model.name}: {model.architecture}, {counted(model.n_layers, 'block')}, hidden size {model.hidden_size}, "
        f"{model.parameters / 1e6:,.0f} million parameters, computes in {model.dtype}",
    )
    for n, k in enumerate(job.layer_ids):
        line("layers" if n == 0 else "", f"{k}: {layer_in_words(k, model.n_layers)}")
    excluded = sum(meta.dropped.values())
    line(
        "rows",
        f"{meta.input:,} read = {counted(meta.samples, 'sample')} + {counted(meta.duplicates, 'duplicate')} + "
        f"{excluded:,} dropped",
    )
    if meta.dropped:
        line("dropped", by_reason(meta.dropped).strip(" ()"))
    if meta.dropped or meta.duplicates:
        line("", f"each is named in {document['dropped_file']}")
    line(
        "tokens",
        f"{meta.tokens:,}, of which {meta.supervised_tokens:,} supervised "
        f"({100 * meta.supervised_tokens / max(meta.tokens, 1):.1f} %); longest sample {meta.longest:,}, "
        f"{meta.truncated:,} truncated",
    )
    if meta.rows < meta.tokens:
        line(
            "shared",
            f"{meta.rows:,} rows are stored ({meta.tokens / meta.rows:.2f} times fewer), about {meta.computed:,} "
            "tokens computed: prefixes that samples of a shard have in common count once",
        )
    line("loss masks", ", ".join(f"{name} {count:,}" for name, count in meta.mask_methods.items()))
    committed = document["shards_committed"]
    line("shards", f"{len(meta.shards):,}" + (f", {committed:,} of them committed already" if committed else ""))
    reused = document["reused"]
    if reused["samples"]:
        open_ = document["to_extract"]
        line(
            "reused",
            f"{counted(reused['samples'], 'sample')}, {counted(reused['tokens'], 'token')} in "
            f"{counted(reused['shards'], 'stored shard')}; to be extracted: {counted(open_['samples'], 'sample')}, "
            f"{counted(open_['tokens'], 'token')}"
            + (f" in {counted(open_['rows'], 'row')}" if open_["rows"] < open_["tokens"] else ""),
        )
    line("size", f"{size(meta.bytes)} of {job.dtype} ({size(meta.row_bytes)} per row)")
    free = document["disk_free_bytes"]
    fields(console, rows)
    if free is not None and free < meta.bytes * 1.05:
        console.print(Text(f"Only {size(free)} are free on that disk: the run will stop when it is full", style="red"))
    console.print(Text("\nsample lengths (tokens)", style="bold"))
    for label, count, bar in histogram(meta.length_histogram):
        console.print(Text(f"  {label:>17}  ") + Text(f"{bar:<{_BAR}}", style="cyan") + Text(f" {count:,}"))
    console.print()
    if document["to_retry"]:
        console.print(Text(f"A run tries {counted(document['to_retry'], 'quarantined sample')} again"))
    if document["published_version"] is not None and not time_needed.tokens:
        console.print(Text(f"Published already as version {document['published_version']}: a run has nothing to do."))
        return
    if not time_needed.tokens:
        console.print(
            Text("Everything is stored already: a run refers to it, checks it and publishes. No engine starts.")
        )
        return
    console.print(
        Text("time      ", style="bold")
        + Text(
            f"about {duration(time_needed.seconds)} to compute {counted(time_needed.tokens, 'token')} at "
            f"{time_needed.tokens_per_s:,.0f} tokens/s, and the start of the engine"
        )
    )
    console.print(Text(f"          ({time_needed.source})", style="dim"))
    console.print(Text("\nmemory on this machine (~ is an estimate)", style="bold"))
    for row in memory_table(memory):
        console.print(Text(f"  {row}"))
    for problem in memory.problems:
        console.print(Text(f"A run would be refused here: {problem}", style="red"))
    for warning in memory.warnings:
        console.print(Text(f"{warning[0].upper()}{warning[1:]}", style="yellow"))
    console.print(Text("The plan is stored under the root; no model was run.", style="dim"))


def histogram(counts: dict[str, int]) -> list[tuple[str, int, str]]:
    """Label, count and bar per power of two; empty powers between are shown."""
    known = {int(upper): count for upper, count in counts.items()}
    if not known:
        return []
    largest = max(known.values())
    rows, upper = [], min(known)
    while upper <= max(known):
        count = known.get(upper, 0)
        label = f"{upper // 2 + 1:,} to {upper:,}" if upper > 1 else "1"
        rows.append((label, count, "█" * max(round(_BAR * count / largest), 1 if count else 0)))
        upper *= 2
    return rows


@guarded
def run(
    job_file: JobFile,
    root: RootOption = None,
    sets: SetOption = None,
    no_prefect: Annotated[
        bool, typer.Option("--no-prefect", help="Run the same steps in a plain loop, without Prefect.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="First read everything that the job has stored, and make anew what is damaged."),
    ] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Prefect's own log lines as well.")] = False,
) -> int | None:
    """Plan, extract, check and publish a job; goes on where an earlier run of it ended."""
    from extract_core.cli.progress import shown

    settings = load(job_file, sets, root)
    with pure_stdout(as_json), shown(quiet=quiet, as_json=as_json) as progress:
        progress.stage("Checking the job")
        check_places(settings)
        from extract_core.job import precheck

        precheck(settings, repair=repair)  # a mistake answers at once, not after Prefect's server has started
        if no_prefect:
            from extract_core import local

            result = local.run(settings, repair=repair)
        else:
            if not os.environ.get("PREFECT_API_URL"):
                progress.stage("Starting Prefect")
            result = prefect_runner(verbose)(settings, repair=repair)
    if as_json:
        emit(_run_document(result))
    else:
        _show_result(result, job_file)
    return None


def prefect_runner(verbose: bool) -> Callable[..., RunResult]:
    """The flow's entry; imported here because Prefect takes seconds and reads its settings while it is imported.

    Raises:
        SettingsError: Prefect or the flows are not installed.
    """
    from extract_core.errors import SettingsError

    if not verbose:
        # Its console only (a server's UI still gets everything): what fails is reported by this command, and Prefect
        # would print the traceback of a user's mistake before that.
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    try:
        runner: Callable[..., RunResult] = pkgutil.resolve_name(FLOW)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("flows", "tasks", "prefect"):
            raise
        raise SettingsError(
            f"the Prefect flow cannot be imported ({error}); install Prefect, or run with --no-prefect"
        ) from error
    return runner


def _run_document(result: RunResult) -> dict[str, Any]:
    manifest = result.manifest
    return {
        "root": result.root,
        "version": manifest.version,
        "new": result.new,
        "shards_extracted": result.shards,
        "fingerprint": manifest.fingerprint,
        "samples": manifest.totals.samples,
        "tokens": manifest.totals.tokens,
        "bytes": manifest.totals.bytes,
        "shards": len(manifest.shards),
        "layer_ids": manifest.layer_ids,
        "dtype": manifest.dtype,
        "accounting": manifest.accounting.model_dump(),
        "checks": manifest.checks,
        "reused": manifest.provenance.get("reused"),
        "extracted": manifest.provenance.get("extracted"),
        "tokens_per_s": manifest.timings.get("tokens_per_s", 0.0),
        "seconds": result.seconds,
    }


def _show_result(result: RunResult, job_file: str) -> None:
    from rich.text import Text

    from extract_core.provenance import origin_in_words

    manifest, console = result.manifest, out()
    console.soft_wrap = True  # commands and paths are there to be copied
    ref = f"{result.root}@{manifest.version}"
    if result.new:
        console.print(
            Text("Published ", style="bold green") + Text(f"version {manifest.version} in {duration(result.seconds)}")
        )
    elif result.shards:
        console.print(
            Text("Nothing new: ", style="bold green")
            + Text(
                f"{counted(result.shards, 'shard file')} extracted again in {duration(result.seconds)}; version "
                f"{manifest.version} of {manifest.created} stays"
            )
        )
    else:
        console.print(
            Text("Nothing to do: ", style="bold green")
            + Text(f"this job is published already, as version {manifest.version} of {manifest.created}")
        )
    quarantined = sum(manifest.accounting.quarantined.values())
    if quarantined and not result.new:
        console.print(Text(f"  quarantine  {counted(quarantined, 'sample')} {'stays' if quarantined == 1 else 'stay'}"))
    totals, speed = manifest.totals, manifest.timings.get("tokens_per_s", 0.0)
    console.print(Text(f"  dataset     {ref}"))
    console.print(
        Text(
            f"  content     {counted(totals.samples, 'sample')}, {counted(totals.tokens, 'token')}, "
            f"{size(totals.bytes)} in {counted(len(manifest.shards), 'shard')}; layers "
            f"{', '.join(map(str, manifest.layer_ids))} of {manifest.n_layers} in {manifest.dtype}"
        )
    )
    if origin := origin_in_words(manifest.provenance):
        console.print(Text(f"  origin      {origin}"))
    if speed:
        console.print(Text(f"  speed       {speed:,.0f} tokens/s in the engine"))
    console.print(Text(f"  accounting  {accounting_line(manifest.accounting)}"))
    console.print(Text(f"  checks      {checks_line(manifest.checks)}"))
    console.print(Text("\nNext:", style="bold"))
    console.print(Text(f"  coresample verify {ref}"))
    console.print(Text(f"  coresample inspect {ref} --sample 0"))
    console.print(
        Text(
            "  python -c 'from extract_core.reader import HiddenStatesDataset as D; "
            f'print(D("{ref}", version=None)[0])\''
        )
    )
