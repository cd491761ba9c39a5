"""``status``, ``verify`` and ``inspect``: the commands that look at a dataset root."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extract_core.cli import deep as deep_options
from extract_core.cli.common import (
    AsJson,
    DatasetArgument,
    JobOption,
    StorageOption,
    accounting_line,
    by_reason,
    checks_line,
    counted,
    duration,
    emit,
    fields,
    guarded,
    layer_in_words,
    note,
    open_dataset,
    out,
    pure_stdout,
    size,
)

if TYPE_CHECKING:
    from rich.text import Text

    from extract_core.errors import CorruptDataError
    from extract_core.planning.plan import PlanMeta
    from extract_core.store.commits import ShardCommits
    from extract_core.store.records import Manifest
    from extract_core.store.root import Root
    from extract_core.store.verify import VerifyReport

_SHARDS_SHOWN = 20
_PROBLEMS_SHOWN = 50
_DAMAGED_SHOWN = 5
_TOKENS_SHOWN = 600


# -- status ----------------------------------------------------------------------------------------------------------


@guarded
def status(
    ref: Annotated[str, typer.Argument(metavar="ROOT", help="A folder or URL such as s3://bucket/prefix.")],
    fingerprint: Annotated[
        str | None, typer.Option("--plan", metavar="PREFIX", help="Only plans whose fingerprint begins like this.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every shard and every plan's table.")] = False,
    storage: StorageOption = None,
    job_file: JobOption = None,
    as_json: AsJson = False,
) -> int | None:
    """Every plan's and every shard's state, from the plans and commit records alone; exit 1 when one is damaged."""
    from extract_core.errors import SettingsError
    from extract_core.store.versions import list_versions, no_such_version

    root, version = open_dataset(ref, storage, job_file)
    plans, unreadable = _plans(root, fingerprint or "")
    versions = list_versions(root)
    if version is not None and version not in versions:
        raise no_such_version(root, version)
    if not plans and not versions and not unreadable:
        which = f" that begins with {fingerprint}" if fingerprint else ""
        raise SettingsError(f"{root.url} holds no plan{which}; 'coresample plan' and 'coresample run' make one")
    published = _published_plans(root, versions)
    documents = [_plan_status(meta, commits, damaged, published) for meta, commits, damaged in plans]
    documents.sort(key=lambda item: (item["published_versions"] or [10**9], item["last_commit"] or ""), reverse=True)
    if as_json:
        emit({"root": root.url, "versions": versions, "plans": documents, "unreadable_plans": unreadable})
    else:
        _show_status(root, versions, documents, everything)
    for problem in unreadable.values():
        note(f"error: {problem}")
    return 1 if unreadable or any(document["shards_damaged"] for document in documents) else 0


_Plan = tuple["PlanMeta", dict[int, "ShardCommits"], dict[int, "CorruptDataError"]]


def _plans(root: Root, prefix: str) -> tuple[list[_Plan], dict[str, str]]:
    """Every plan with its commit records, what is wrong with its damaged shards, and what is wrong with other plans."""
    from extract_core.errors import CorruptDataError
    from extract_core.planning.plan import read_plan_meta
    from extract_core.store import layout
    from extract_core.store.commits import DamagedRecord, read_commits

    found: list[_Plan] = []
    unreadable = {}
    for name in root.list(layout.PLANS):
        if not name.startswith(prefix):
            continue
        try:
            meta = read_plan_meta(root, name)
        except CorruptDataError as error:
            unreadable[name] = str(error)
            continue
        if meta is not None:  # else a run is planning right now, or was stopped while it did
            damaged: list[DamagedRecord] = []
            commits = read_commits(root, name, damaged=damaged)
            found.append((meta, commits, {item.shard: item.error for item in damaged}))
    return found, unreadable


def _published_plans(root: Root, versions: list[int]) -> dict[str, list[int]]:
    from extract_core.errors import CorruptDataError
    from extract_core.store.versions import read_manifest

    result: dict[str, list[int]] = {}
    for version in versions:
        try:
            result.setdefault(read_manifest(root, version).fingerprint, []).append(version)
        except CorruptDataError as error:
            note(f"warning: {error}")
    return result


def _plan_status(
    meta: PlanMeta,
    commits: dict[int, ShardCommits],
    damaged: dict[int, CorruptDataError],
    published: dict[str, list[int]],
) -> dict[str, Any]:
    shards = []
    versions = published.get(meta.fingerprint, [])
    absent = "record_missing" if versions else "open"  # a version is published when all its shards are committed
    for shard in meta.shards:
        commit = commits.get(shard.index)
        entry: dict[str, Any] = {
            "shard": shard.index,
            "state": "damaged" if shard.index in damaged else absent if commit is None else "committed",
            "planned_rows": shard.rows,
            "planned_samples": shard.samples,
        }
        if shard.index in damaged:
            entry["problem"] = str(damaged[shard.index])
        if commit is not None and not commit.complete and shard.index not in damaged:
            entry["state"] = absent
        if commit is not None and entry["state"] == "committed":
            first, timings = commit.records[0], commit.timings
            engine_s = timings.get("engine_s", 0.0)
            entry |= {
                **_rows(commit),
                "source": first.source.fingerprint if first.source is not None else None,
                "samples": len(commit.samples),
                "tokens": sum(sample.n_tokens for sample in commit.samples),
                "excluded": len(commit.excluded),
                "rounds": len(commit.records),
                "bytes": commit.nbytes,
                "engine_s": engine_s,
                "tokens_per_s": timings.get("tokens", 0.0) / engine_s if engine_s else 0.0,
                "attempt": first.attempt,
                "created": commit.records[-1].created,
                "object": first.object,
                "objects": [record.object for record in commit.stored],
            }
        shards.append(entry)
    done = [entry for entry in shards if entry["state"] == "committed"]
    engine_s = sum(entry["engine_s"] for entry in done)
    rows = sum(entry["rows"] for entry in done)
    rate = sum(entry["rows_extracted"] for entry in done) / engine_s if engine_s else 0.0
    open_rows = sum(entry["planned_rows"] for entry in shards if entry["state"] in ("open", "damaged"))
    if versions:
        open_rows = 0
    quarantine = [
        {"shard": number, "runs": len(commit.records), **excluded.model_dump()}
        for number, commit in sorted(commits.items())
        for excluded in commit.excluded
    ]
    return {
        "fingerprint": meta.fingerprint,
        "published_versions": versions,
        "model": (meta.spec.get("model") or {}).get("name"),
        "layer_ids": meta.spec.get("layer_ids"),
        "samples": meta.samples,
        "tokens": meta.tokens,
        "rows": meta.rows,
        "shards_total": len(shards),
        "shards_committed": len(done),
        "shards_damaged": len(damaged),
        "records_missing": sum(entry["state"] == "record_missing" for entry in shards),
        "tokens_committed": sum(entry["tokens"] for entry in done),
        "rows_committed": rows,
        "rows_open": open_rows,
        "rows_referred_to": rows - sum(entry["rows_extracted"] for entry in done),
        "bytes_committed": sum(entry["bytes"] for entry in done),
        "tokens_per_s": rate,
        "seconds_left": open_rows / rate if rate and not versions else None,
        "last_commit": max((entry["created"] for entry in done), default=None),
        "quarantined": len(quarantine),
        "quarantine": quarantine,
        "shards": shards,
    }


def _rows(commit: ShardCommits) -> dict[str, int]:
    """Rows of a shard; of a file that it refers to only those of its own samples."""
    own = sum(record.rows for record in commit.stored if record.source is None)
    named = sum(
        rows
        for record, samples in commit.by_record
        if record.source is not None
        for _, rows in {(segment.first_row, segment.rows) for sample in samples for segment in sample.segments}
    )
    return {"rows": own + named, "rows_extracted": own}


def _show_status(root: Root, versions: list[int], plans: list[dict[str, Any]], everything: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    console = out()
    names = ", ".join(map(str, versions[-10:])) or "none"
    console.print(
        Text(f"{root.url}: ", style="bold") + Text(f"published versions {names}; {counted(len(plans), 'plan')}")
    )
    for number, plan in enumerate(plans):
        done, total = plan["shards_committed"], plan["shards_total"]
        if plan["published_versions"]:
            state = Text(f"published as version {', '.join(map(str, plan['published_versions']))}", style="green")
        elif done == total:
            state = Text(
                "every shard is committed, not published; run the job again to check and publish", style="yellow"
            )
        else:
            state = Text(f"{counted(total - done, 'shard')} open; run the job to go on", style="yellow")
        console.print()
        console.print(Text(f"plan {plan['fingerprint']}: ", style="bold") + state)
        left = plan["seconds_left"]
        rate = f", {plan['tokens_per_s']:,.0f} tokens/s" if plan["tokens_per_s"] else ""
        console.print(
            Text(
                f"  {done:,} of {counted(total, 'shard')}, {plan['tokens_committed']:,} of {plan['tokens']:,} tokens, "
                f"{size(plan['bytes_committed'])}{rate}"
                + (f", about {duration(left)} left" if left else "")
                + (f"; last commit {plan['last_commit']}" if plan["last_commit"] else "")
            )
        )
        if plan["records_missing"]:
            console.print(
                Text(
                    f"  {counted(plan['records_missing'], 'commit record')} missing from {root.url}/plans/"
                    f"{plan['fingerprint']}/commits (deleted?); what is published does not depend on them",
                    style="yellow",
                )
            )
        for entry in plan["shards"]:
            if entry["state"] == "damaged":
                console.print(Text(f"  shard {entry['shard']}: {entry['problem']}", style="bold red"))
        if plan["quarantine"]:
            counts: dict[str, int] = {}
            for item in plan["quarantine"]:
                counts[item["reason"]] = counts.get(item["reason"], 0) + 1
            console.print(
                Text(f"  {counted(plan['quarantined'], 'sample')} quarantined{by_reason(counts)}", style="yellow")
            )
            shown = plan["quarantine"] if everything else plan["quarantine"][:5]
            for item in shown:
                console.print(
                    Text(
                        f"    {item['sample_id']} (shard {item['shard']}, tried by "
                        f"{counted(item['runs'], 'run')}): {item['reason']}: {item['detail']}"
                    )
                )
            if len(shown) < len(plan["quarantine"]):
                console.print(Text(f"    ... {len(plan['quarantine']) - len(shown):,} more; see --all", style="dim"))
        if number > 0 and not everything:
            continue
        entries = plan["shards"] if everything else _first_shards(plan["shards"])
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("  shard")
        table.add_column("state")
        for name in ("rows", "samples", "bytes", "tokens/s", "excluded"):
            table.add_column(name, justify="right")
        table.add_column("committed at", no_wrap=True)
        for entry in entries:
            number_text = f"  {entry['shard']:05d}"
            if entry["state"] != "committed":
                table.add_row(
                    number_text,
                    Text(entry["state"].replace("_", " "), style="red" if entry["state"] == "damaged" else "yellow"),
                    f"({entry['planned_rows']:,})",
                    f"({entry['planned_samples']:,})",
                )
            else:
                table.add_row(
                    number_text,
                    Text("committed", style="green"),
                    f"{entry['rows']:,}",
                    f"{entry['samples']:,}",
                    size(entry["bytes"]),
                    "stored" if entry["source"] else f"{entry['tokens_per_s']:,.0f}",
                    Text(str(entry["excluded"]), style="yellow" if entry["excluded"] else ""),
                    entry["created"],
                )
        console.print(table)
        if len(entries) < len(plan["shards"]):
            console.print(Text(f"  ... {len(plan['shards']) - len(entries):,} more shards; see --all", style="dim"))


def _first_shards(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The open ones and those with excluded samples first: they are what somebody looks for."""
    interesting = [entry for entry in entries if entry["state"] != "committed" or entry["excluded"]][:_SHARDS_SHOWN]
    rest = [entry for entry in entries if entry not in interesting][: _SHARDS_SHOWN - len(interesting)]
    return sorted(interesting + rest, key=lambda entry: int(entry["shard"]))


# -- verify ----------------------------------------------------------------------------------------------------------


@guarded
def verify(
    ref: DatasetArgument,
    storage: StorageOption = None,
    job_file: JobOption = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also extract sampled rows again and compare them.")] = False,
    samples: deep_options.Samples = None,
    seed: deep_options.Seed = None,
    model: deep_options.Model = None,
    pairs: deep_options.Settings = None,
    trust_remote_code: deep_options.Trust = False,
) -> int:
    """Read every byte of a version and check every checksum, count and invariant; exit 1 when anything is wrong.

    With --deep the model runs on some samples again, and their rows are compared with the stored ones.
    """
    import time

    from rich.text import Text

    from extract_core.cli.progress import shown
    from extract_core.store.verify import verify as verify_version

    wanted = deep_options.check(deep, samples, seed, model, pairs, trust_remote_code)
    root, version = open_dataset(ref, storage, job_file)
    started = time.monotonic()
    with shown(quiet=quiet, as_json=as_json) as progress:
        progress.stage("Reading the index")

        def advance(done: int, total: int, name: str) -> None:
            if not advancing:
                progress.stage("Verifying", total=total, unit="bytes")
                advancing.append(True)
            progress.advance(done)

        advancing: list[bool] = []
        report = verify_version(root, version, on_progress=advance)
    seconds = time.monotonic() - started
    advice = _remedy(report, root)
    rows = None
    if wanted is not None and report.ok:
        with shown(quiet=quiet, as_json=as_json), pure_stdout(as_json):
            rows = deep_options.run(root.url, report.version, deep_options.storage(storage, job_file), wanted)
    if as_json:
        emit({**report.to_dict(), "seconds": seconds, "remedy": advice, **deep_options.document(wanted, rows)})
        return 0 if report.ok and (rows is None or rows.ok) else 1
    console = out()
    what = (
        f"{counted(report.shards, 'shard')}, {counted(report.samples, 'sample')}, {counted(report.tokens, 'token')}, "
        f"{size(report.bytes_read)} read in {duration(seconds)}"
    )
    if report.ok:
        console.print(Text("Sound: ", style="bold green") + Text(f"{report.root}@{report.version}: {what}"))
        if rows is not None:
            deep_options.show(rows)
        return 0 if rows is None or rows.ok else 1
    console.print(
        Text(f"{counted(len(report.problems), 'problem')} ", style="bold red")
        + Text(f"in {report.root}@{report.version}: {what}")
    )
    for problem in report.problems[:_PROBLEMS_SHOWN]:
        console.print(Text(f"  {problem}"))
    if len(report.problems) > _PROBLEMS_SHOWN:
        console.print(Text(f"  ... {len(report.problems) - _PROBLEMS_SHOWN:,} more; --json lists all", style="dim"))
    if advice:
        console.print(Text("What to do: ", style="bold") + Text(advice))
    if wanted is not None:
        console.print(Text("No rows were extracted again: they cannot be right where their checksums are wrong"))
    return 1


def _remedy(report: VerifyReport, root: Root) -> str:
    """How what is missing and what is damaged comes back; empty where no job can help."""
    from extract_core.store import layout

    made_again = (f"{layout.SHARDS}/", f"{layout.NORMS}/")
    wrong = {item.object for item in report.problems}
    missing = sorted(name for name in wrong if name.startswith(made_again) and not root.exists(name))
    damaged = sorted(wrong - set(missing))
    if not wrong:
        return ""
    if not damaged:
        return (
            "run the job again: what is missing is extracted anew. Where the engine computes the same bits, this "
            "version is whole again; otherwise a new one is published"
        )
    first = ", ".join(damaged[:_DAMAGED_SHOWN])
    more = f" and {len(damaged) - _DAMAGED_SHOWN:,} more" if len(damaged) > _DAMAGED_SHOWN else ""
    return (
        f"run the job with --repair: it reads everything and makes {counted(len(damaged), 'damaged object')} anew "
        f"({first}{more}); where that gives other bits, or a manifest is damaged, a new version is published"
    )


# -- inspect ---------------------------------------------------------------------------------------------------------


@guarded
def inspect(
    ref: DatasetArgument,
    sample: Annotated[
        str | None,
        typer.Option("--sample", "-s", metavar="N|ID", help="The sample to show: position or id; default 0."),
    ] = None,
    storage: StorageOption = None,
    job_file: JobOption = None,
    as_json: AsJson = False,
) -> int | None:
    """Provenance, layers, sizes, checks and a sample with its loss mask."""
    from extract_core.store.index import open_index
    from extract_core.store.versions import list_versions, read_manifest

    root, version = open_dataset(ref, storage, job_file)
    manifest = read_manifest(root, version)
    index = open_index(root, manifest)
    position = _find_sample(index, sample, manifest) if index.num_rows else None
    row = index.slice(position, 1).to_pylist()[0] if position is not None else None
    runs, decoded = _spans(row, manifest) if row is not None else ([], False)
    norms = _norms(index, manifest)
    document: dict[str, Any] = {
        "root": root.url,
        "version": manifest.version,
        "versions": list_versions(root),
        "created": manifest.created,
        "fingerprint": manifest.fingerprint,
        "coresample_version": manifest.coresample_version,
        "model": _section(manifest, "model"),
        "compute_dtype": manifest.spec.get("compute_dtype"),
        "dtype": manifest.dtype,
        "encoding": manifest.encoding,
        "n_layers": manifest.n_layers,
        "hidden_size": manifest.hidden_size,
        "final_norm": manifest.final_norm.model_dump(mode="json") if manifest.final_norm is not None else None,
        "layers": {str(k): layer_in_words(k, manifest.n_layers) for k in manifest.layer_ids},
        "totals": manifest.totals.model_dump(),
        "shards": len(manifest.shards),
        "accounting": manifest.accounting.model_dump(),
        "checks": manifest.checks,
        "provenance": manifest.provenance,
        "timings": manifest.timings,
        "norms": norms,
        "sample": None,
    }
    if row is not None:
        document["sample"] = {
            "position": position,
            **{
                name: row[name]
                for name in ("sample_id", "source_file", "source_row", "source_turn", "split", "n_tokens")
            },
            "supervised_tokens": sum(row["loss_mask"]),
            **{name: row[name] for name in ("mask_method", "truncated", "greedy_token", "top1_token", "segments")},
            "norm_mean": row["norm_mean"],
            "norm_max": row["norm_max"],
            "token_ids": row["token_ids"],
            "loss_mask": row["loss_mask"],
            "spans": [{"supervised": supervised, "text": text} for supervised, text in runs] if decoded else None,
        }
    if as_json:
        emit(document)
    else:
        _show_inspect(manifest, document, runs, decoded)
    return None


def _find_sample(index: Any, wanted: str | None, manifest: Manifest) -> int:
    import pyarrow.compute as pc

    from extract_core.errors import SettingsError

    text = (wanted or "0").strip()
    ids = index.column("sample_id")
    exact = pc.index(ids, text).as_py()
    if exact >= 0:
        return int(exact)
    if re.fullmatch(r"-?[0-9]{1,11}", text):
        position = int(text)
        if -index.num_rows <= position < index.num_rows:
            return position % index.num_rows
        raise SettingsError(
            f"--sample {text}: version {manifest.version} has {counted(index.num_rows, 'sample')}, so positions go "
            f"from 0 to {index.num_rows - 1}"
        )
    matches = pc.indices_nonzero(pc.starts_with(ids, text)).to_pylist() if len(text) >= 4 else []
    if len(matches) == 1:
        return int(matches[0])
    many = f"; {len(matches)} ids begin like that" if matches else ""
    raise SettingsError(
        f"--sample {text}: no sample of version {manifest.version} has this id{many}; give a position or an id"
    )


def _norms(index: Any, manifest: Manifest) -> dict[str, dict[str, float]]:
    """Per layer id, over samples: median of the mean norms, and the largest norm of any position."""
    import numpy as np

    if not index.num_rows:
        return {}
    means, maxima = (np.asarray(index.column(name).to_pylist(), dtype=np.float64) for name in ("norm_mean", "norm_max"))
    return {
        str(k): {"median": float(np.median(means[:, n])), "max": float(maxima[:, n].max())}
        for n, k in enumerate(manifest.layer_ids)
    }


def _spans(row: dict[str, Any], manifest: Manifest) -> tuple[list[tuple[bool, str]], bool]:
    """Runs of equal mask as text, and whether the text is decoded (else token ids)."""
    from itertools import groupby

    pairs = list(zip(row["loss_mask"], row["token_ids"], strict=True))
    groups = [(bool(mask), [token for _, token in group]) for mask, group in groupby(pairs, key=lambda pair: pair[0])]
    tokenizer = _tokenizer(manifest)
    if tokenizer is None:
        return [(mask, " ".join(map(str, ids)) + " ") for mask, ids in groups], False
    return [
        (mask, tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for mask, ids in groups
    ], True


def _section(manifest: Manifest, name: str) -> dict[str, Any]:
    """A part of the fingerprint document; empty when the manifest was not made by a job."""
    part = manifest.spec.get(name)
    return part if isinstance(part, dict) else {}


def _tokenizer(manifest: Manifest) -> Any:
    """The tokenizer of the model folder that the manifest names, if it is here and still the one that was used."""
    from pathlib import Path

    model = _section(manifest, "model")
    folder = Path(str(model.get("name", ""))).expanduser()
    digest = _section(manifest, "tokenizer").get("tokenizer_sha256")
    if not folder.is_dir() and not model.get("commit"):
        return None
    try:
        from extract_core.chat import load_chat_tokenizer
        from extract_core.settings import ChatSettings, ModelSettings

        path = str(folder)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            path = snapshot_download(str(model["name"]), revision=model["commit"], local_files_only=True)
        chat = load_chat_tokenizer(ModelSettings(path=path), ChatSettings())
    except Exception as error:  # noqa: BLE001 -- a preview: whatever the reason, ids are shown instead
        note(
            f"the tokenizer of {model.get('name')} cannot be loaded, token ids are shown: {str(error).splitlines()[0]}"
        )
        return None
    if digest and chat.tokenizer_digest != digest:
        note(f"{model.get('name')} has another tokenizer now than when this was extracted; token ids are shown")
        return None
    return chat.hf


def _show_inspect(manifest: Manifest, document: dict[str, Any], runs: list[tuple[bool, str]], decoded: bool) -> None:
    from rich.text import Text

    from extract_core.provenance import origin_in_words

    console = out()
    lines: list[tuple[str, str]] = []

    def line(name: str, text: str) -> None:
        lines.append((name, text))

    engines = manifest.provenance.get("engines", [])
    line(
        "dataset",
        f"{document['root']}@{manifest.version}, published {manifest.created} by Coresample "
        f"{manifest.coresample_version}",
    )
    model = _section(manifest, "model")
    commit = f" at {model['commit']}" if model.get("commit") else ""
    line(
        "model",
        f"{model.get('name')}{commit} ({model.get('architecture')}), computed in {manifest.spec.get('compute_dtype')}",
    )
    for n, engine in enumerate(engines):
        line(
            "engine" if n == 0 else "",
            f"vLLM {engine.get('vllm')}, torch {engine.get('torch')}, transformers {engine.get('transformers')} on "
            f"{engine.get('device')}",
        )
    norms = document["norms"]
    for n, k in enumerate(manifest.layer_ids):
        norm = norms.get(str(k))
        text = f"{k}: {layer_in_words(k, manifest.n_layers)}"
        line(
            "layers" if n == 0 else "",
            text + (f"; norm {norm['median']:,.1f}, at most {norm['max']:,.1f}" if norm else ""),
        )
    line("final norm", _norm_in_words(manifest))
    totals = manifest.totals
    line(
        "size",
        f"{counted(totals.samples, 'sample')}, {counted(totals.tokens, 'token')}, {size(totals.bytes)} in "
        f"{counted(len(manifest.shards), 'shard')} of rows [{len(manifest.layer_ids)}, {manifest.hidden_size}] "
        f"{manifest.dtype}",
    )
    if origin := origin_in_words(manifest.provenance):
        line("origin", origin)
    line("accounting", accounting_line(manifest.accounting))
    line("checks", checks_line(manifest.checks))
    for name, result in manifest.checks.items():
        line(
            "",
            f"{'ok ' if result.get('passed') else 'NO '} {name}"
            + (f": {result['detail']}" if result.get("detail") else ""),
        )
    for n, text in enumerate(_made(manifest)):
        line("made" if n == 0 else "", text)
    line("plan", manifest.fingerprint)
    fields(console, lines)
    row = document["sample"]
    if row is None:
        return
    console.print()
    turn = "" if row["source_turn"] is None else f", turn {row['source_turn']}"
    console.print(
        Text(f"sample {row['position']}", style="bold")
        + Text(
            f" {row['sample_id']} from {row['source_file']}, row {row['source_row']}{turn} ({row['split']}): "
            f"{counted(row['n_tokens'], 'token')}, {row['supervised_tokens']:,} supervised "
            f"(method {row['mask_method']})" + (", truncated" if row["truncated"] else "")
        )
    )
    per_layer = zip(manifest.layer_ids, row["norm_mean"], row["norm_max"], strict=True)
    console.print(
        Text("norms per layer: " + ", ".join(f"{k}: {mean:,.1f} (max {top:,.1f})" for k, mean, top in per_layer))
    )
    if row["greedy_token"] is not None:
        agrees = "the same" if row["greedy_token"] == row["top1_token"] else "ANOTHER"
        console.print(
            Text(
                f"the engine's next token: {row['greedy_token']}; from the stored last row: {row['top1_token']} "
                f"({agrees})"
            )
        )
    console.print()
    console.print(_preview(runs, coloured=console.is_terminal and not console.no_color))
    if not decoded:
        console.print(Text("(token ids: the model's tokenizer is not here)", style="dim"))


def _made(manifest: Manifest) -> list[str]:
    """Where, by which code and in how long; versions of before this was kept say less."""
    p = manifest.provenance
    gpus = [str(name) for name in p.get("gpus") or []]
    machine = ", ".join(
        str(part)
        for part in (
            p.get("os"),
            p.get("cpu"),
            *(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)),
            f"driver {p['gpu_driver']}" if p.get("gpu_driver") else None,
        )
        if part
    )
    lines = [f"on {p.get('host')}" + (f" ({machine})" if machine else "")] if p.get("host") else []
    git, packages = p.get("git"), p.get("packages") or {}
    if packages or git:
        code = f"commit {git['commit'][:12]}{' with changes' if git['dirty'] else ''}" if git else "no checkout"
        lines.append(
            f"Coresample {code}; Python {p.get('python')}, "
            + ", ".join(f"{name} {packages[name]}" for name in ("vllm", "torch", "transformers") if name in packages)
        )
        locks = f", locks {p['lock_sha256'][:12]}" if p.get("lock_sha256") else ""
        lines.append(f"environment {str(p.get('environment_sha256'))[:12]}{locks}")
    if stages := p.get("stages"):
        starts = [f"{item['seconds']:.0f} s" for item in p.get("engine_starts") or []]
        took = ", ".join(f"{name.removesuffix('_s')} {seconds:.0f} s" for name, seconds in stages.items())
        lines.append(f"{took}; engine starts: {', '.join(starts) or 'none'}")
    if shards := p.get("shards"):
        took = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {value:.0f} s" for name, value in shards.items())
        lines.append(f"all shards: {took}" + (f"; {p['rounds']} retry rounds" if p.get("rounds") else ""))
    return lines


def _norm_in_words(manifest: Manifest) -> str:
    norm = manifest.final_norm
    if norm is None:
        return "not kept: made by an earlier Coresample"
    if norm.kind == "unknown":
        return f"unknown: {norm.reason}"
    if norm.kind == "none":
        return f"none: the model reads layer {manifest.n_layers} as it is"
    offset = f", weight + {norm.offset:g}" if norm.offset else ""
    return f"{norm.kind}, epsilon {norm.epsilon:g}{offset}; weights in {norm.path}"


def _preview(runs: list[tuple[bool, str]], *, coloured: bool) -> Text:
    """Supervised text in green; between ⟦ and ⟧ where there are no colours."""
    from rich.text import Text

    result = Text()
    left = _TOKENS_SHOWN * 5
    for supervised, text in runs:
        if left <= 0:
            break
        shown = text if len(text) <= left else text[:left] + " ..."
        left -= len(shown)
        if not supervised:
            result.append(shown, style="dim" if coloured else "")
        elif coloured:
            result.append(shown, style="bold green")
        else:
            result.append(f"⟦{shown}⟧")
    if left <= 0:
        result.append("\n(cut; --json has all of it)", style="dim")
    return result
