"""``versions``, ``tag``, ``diff`` and ``gc``: the commands for the versions of a dataset."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extract_core.cli.common import (
    AsJson,
    JobOption,
    StorageOption,
    counted,
    duration,
    emit,
    fields,
    guarded,
    note,
    open_dataset,
    out,
    size,
)

if TYPE_CHECKING:
    from extract_core.store.diff import VersionDiff
    from extract_core.store.gc import GcReport
    from extract_core.store.records import Manifest
    from extract_core.store.root import Root

RootArgument = Annotated[str, typer.Argument(metavar="ROOT", help="A folder or URL such as s3://bucket/prefix.")]
_ITEMS_SHOWN = 20
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _open_root(ref: str, storage: list[str] | None, job_file: str | None) -> Root:
    """A root where a version has no place."""
    from extract_core.errors import SettingsError

    root, version = open_dataset(ref, storage, job_file)
    if version is not None:
        raise SettingsError(
            f"{ref!r} names version {version}, but this command is about all of them; give the root alone"
        )
    return root


# -- versions --------------------------------------------------------------------------------------------------------


@guarded
def versions(
    ref: RootArgument, storage: StorageOption = None, job_file: JobOption = None, as_json: AsJson = False
) -> int:
    """Every version: when, how much, of which model, its tags and what it shares; exit 1 when one is damaged."""
    from extract_core.errors import CorruptDataError, NoSuchVersionError
    from extract_core.store.tags import list_tags
    from extract_core.store.versions import list_versions, read_manifest

    root = _open_root(ref, storage, job_file)
    problems: dict[str, CorruptDataError] = {}
    tags = list_tags(root, damaged=problems)
    manifests: dict[int, Manifest] = {}
    broken: dict[int, str] = {}
    numbers = list_versions(root)
    if not numbers:
        read_manifest(root)  # says that there is none
    for number in numbers:
        try:
            manifests[number] = read_manifest(root, number)
        except NoSuchVersionError:
            continue  # removed meanwhile
        except CorruptDataError as error:
            broken[number] = str(error)
    documents = _version_documents(manifests, broken, tags)
    lost = {name: version for name, version in tags.items() if version not in numbers}
    if as_json:
        texts = {name: str(error) for name, error in problems.items()}
        emit({"root": root.url, "versions": documents, "tags": tags, "damaged_tags": texts})
    else:
        _show_versions(root, documents)
    for name, version in lost.items():
        note(f"warning: tag {name} names version {version}, which is not there; 'coresample gc' removes it")
    for text in [*broken.values(), *map(str, problems.values())]:
        note(f"error: {text}")
    return 1 if broken or problems else 0


def _version_documents(
    manifests: dict[int, Manifest], broken: dict[int, str], tags: dict[str, int]
) -> list[dict[str, Any]]:
    users: Counter[str] = Counter()
    sizes: dict[int, dict[str, int]] = {}
    named = defaultdict(list)
    for name, number in tags.items():
        named[number].append(name)
    for number, manifest in manifests.items():
        sizes[number] = {**manifest.objects, manifest.index.path: manifest.index.nbytes}
        users.update(sizes[number].keys())
    numbers = sorted(manifests.keys() | broken.keys())
    found = []
    for number in numbers:
        common = {"version": number, "latest": number == numbers[-1], "tags": named[number]}
        if number in broken:
            found.append({**common, "problem": broken[number]})
            continue
        manifest = manifests[number]
        model = manifest.spec.get("model")
        own = [path for path in sizes[number] if users[path] == 1]
        found.append(
            {
                **common,
                "created": manifest.created,
                "samples": manifest.totals.samples,
                "tokens": manifest.totals.tokens,
                "layer_ids": manifest.layer_ids,
                "dtype": manifest.dtype,
                "model": model.get("name") if isinstance(model, dict) else model,
                "fingerprint": manifest.fingerprint,
                "bytes": sum(sizes[number].values()),
                "own_bytes": sum(sizes[number][path] for path in own),
                "shards": len(manifest.shards),
                "shards_shared": sum(users[shard.path] > 1 for shard in manifest.shards),
            }
        )
    return found


def _show_versions(root: Root, documents: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = out()
    console.print(Text(root.url, style="bold") + Text(f": {counted(len(documents), 'version')}"))
    right = {"version", "samples", "tokens", "own size"}
    table = Table(box=None, pad_edge=False)
    for name in ("version", "published", "samples", "tokens", "layers", "dtype", "own size", "shards", "model", "tags"):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for item in reversed(documents):
        names = ", ".join([*(["(latest)"] if item["latest"] else []), *item["tags"]])
        if "problem" in item:
            table.add_row(str(item["version"]), "damaged", *[""] * 7, names)
            continue
        shared = f"{item['shards']:,}" + (f" ({item['shards_shared']:,} shared)" if item["shards_shared"] else "")
        table.add_row(
            str(item["version"]),
            item["created"],
            f"{item['samples']:,}",
            f"{item['tokens']:,}",
            " ".join(map(str, item["layer_ids"])),
            item["dtype"],
            size(item["own_bytes"]),
            shared,
            Text(str(item["model"])),
            names,
        )
    console.print(table)


# -- tag -------------------------------------------------------------------------------------------------------------


@guarded
def tag(
    ref: Annotated[
        str, typer.Argument(metavar="ROOT[@VERSION]", help="The version to be tagged; without one, the latest.")
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits and . _ -, e.g. baseline.")],
    delete: Annotated[bool, typer.Option("--delete", "-d", help="Remove the tag; its version stays.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Move the tag if it is another version's.")] = False,
    storage: StorageOption = None,
    job_file: JobOption = None,
    as_json: AsJson = False,
) -> int | None:
    """Give a version a name: ROOT@NAME then means it, and gc keeps it."""
    from extract_core.errors import SettingsError
    from extract_core.store.tags import check_name, delete_tag, read_tag, write_tag
    from extract_core.store.versions import read_manifest

    check_name(name)
    root, version = open_dataset(ref, storage, job_file)
    if delete:
        standing = read_tag(root, name) if version is not None else None
        if standing is not None and standing.version != version:
            raise SettingsError(
                f"tag {name!r} names version {standing.version}, not {version}; to remove it all the same: "
                f"coresample tag {root.url} {name} --delete"
            )
        delete_tag(root, name)
        text = f"Removed tag {name} of {root.url}"
        before, now = standing.version if standing is not None else None, None
    else:
        now = version if version is not None else read_manifest(root).version
        before = write_tag(root, name, now, force=force)
        text = f"{root.url}@{name} is version {now}"
        if before is not None and before != now:
            text += f" (it was version {before})"
    if as_json:
        emit({"root": root.url, "tag": name, "version": now, "before": before})
    else:
        note(text)
    return None


# -- diff ------------------------------------------------------------------------------------------------------------


@guarded
def diff(
    first: Annotated[str, typer.Argument(metavar="ROOT@A", help="A version; without a second one, before the latest.")],
    second: Annotated[
        str | None, typer.Argument(metavar="[ROOT@B]", help="Another version, of this or another root.")
    ] = None,
    storage: StorageOption = None,
    job_file: JobOption = None,
    as_json: AsJson = False,
) -> int | None:
    """What differs between two versions: samples, settings, shards; ROOT@A alone is compared with the latest."""
    from extract_core.errors import SettingsError
    from extract_core.store.diff import diff as compare
    from extract_core.store.versions import list_versions, read_manifest

    root, version = open_dataset(first, storage, job_file)
    other, after = open_dataset(second, storage, job_file) if second is not None else (root, None)
    if second is None and version is None:
        known = list_versions(root)
        if len(known) == 1:
            raise SettingsError(f"{root.url} has one version, {known[0]}; give a second dataset to compare it with")
        version = known[-2] if known else None
    result = compare((root, read_manifest(root, version)), (other, read_manifest(other, after)))
    if as_json:
        emit(result.to_dict())
    else:
        _show_diff(result)
    return None


_GROUPS = {
    "added": "only in the second",
    "removed": "only in the first",
    "changed": "same input row, other tokens or mask",
    "values": "same sample, other values",
    "tokens": "same id, other tokens",
    "mask": "same id, other mask",
    "split": "same sample, other split",
    "source": "same sample, from another input row",
}


def _show_diff(result: VersionDiff) -> None:
    from rich.text import Text

    console = out()
    for sign, side in (("-", result.before), ("+", result.after)):
        console.print(
            Text(
                f"{sign} {side['root']}@{side['version']}, {side['created']}: {counted(side['samples'], 'sample')}, "
                f"{counted(side['tokens'], 'token')}, {size(side['bytes'])}"
            )
        )
    if result.same:
        console.print(Text("The same samples with the same rows.", style="bold green"))
    lines = [(name, f"{_brief(old)} -> {_brief(new)}") for name, (old, new) in result.fields.items()]
    for name, (old_new) in lines:
        console.print(Text(f"  {name}: {old_new}"))
    rows = [("unchanged", f"{result.unchanged:,}")]
    for name, group in result.samples.items():
        if group.count:
            more = f" and {group.count - len(group.first):,} more" if group.count > len(group.first) else ""
            rows.append((name, f"{group.count:,} ({_GROUPS[name]}): {', '.join(group.first)}{more}"))
    if result.not_compared:
        rows.append(("?", f"{result.not_compared:,} common samples whose values cannot be compared by checksum"))
    shards = result.shards
    rows.append(
        (
            "shards",
            f"{shards['shared']:,} shared ({size(shards['shared_bytes'])}), {shards['only_before']:,} only in the "
            f"first, {shards['only_after']:,} only in the second",
        )
    )
    fields(console, rows)


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


# -- gc --------------------------------------------------------------------------------------------------------------


def parse_age(text: str) -> float:
    """Seconds of ``24h``, ``30m``, ``7d``, ``90s`` or a plain number of seconds.

    Raises:
        SettingsError: it is none.
    """
    from extract_core.errors import SettingsError, shortened

    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([smhd]?)", text.strip(), re.ASCII)
    if match is None:
        raise SettingsError(f"--grace {shortened(text)!r} is no time; write it like 24h, 30m, 7d or 90s")
    return float(match[1]) * _UNITS[match[2]]


@guarded
def gc(
    ref: RootArgument,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", metavar="N", help="Remove versions before the last N, except tagged ones; default: none."
        ),
    ] = None,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="Touch nothing younger than this, e.g. 24h, 7d.")
    ] = "24h",
    unpublished: Annotated[
        bool, typer.Option("--unpublished", help="Remove extracted plans that no version was published of, too.")
    ] = False,
    delete: Annotated[bool, typer.Option("--yes", "--delete", help="Remove it; without, it is only listed.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="List every object.")] = False,
    storage: StorageOption = None,
    job_file: JobOption = None,
    as_json: AsJson = False,
) -> int | None:
    """Remove what no version and no unfinished plan refers to, and old versions with --keep; lists it unless --yes."""
    from extract_core.cli.progress import shown
    from extract_core.store.gc import Policy, collect, survey

    policy = Policy(keep, parse_age(grace), unpublished)
    root = _open_root(ref, storage, job_file)
    with shown(quiet=as_json, as_json=as_json) as progress:
        progress.stage("Looking at objects and references")
        if not delete:
            report = survey(root, policy)
        else:
            started: list[bool] = []

            def advance(done: int, total: int) -> None:
                if not started:
                    progress.stage("Removing", total=total, unit="objects")
                    started.append(True)
                progress.advance(done)

            report = collect(root, policy, on_progress=advance)
    if as_json:
        emit(_gc_document(report, policy.grace_s))
    else:
        _show_gc(report, policy.grace_s, everything)
    return None


def _gc_document(report: GcReport, grace_s: float) -> dict[str, Any]:
    items = []
    for item in report.items:
        document = asdict(item)
        upload = document.pop("upload")
        items.append(document | ({"upload_id": upload["upload_id"]} if upload else {}))
    return {
        "root": report.root,
        "deleted": report.deleted,
        "grace_s": grace_s,
        "bytes": report.nbytes,
        "items": items,
        "versions": report.versions,
        "kept": report.kept,
    }


def _show_gc(report: GcReport, grace_s: float, everything: bool) -> None:
    from rich.text import Text

    console = out()
    verb = "Removed" if report.deleted else "Would remove"
    if not report.items:
        console.print(
            Text(f"Nothing to remove in {report.root} that is older than {duration(grace_s)}.", style="green")
        )
    else:
        counts = Counter(item.kind for item in report.items)
        what = ", ".join(counted(count, _NOUNS.get(kind, kind)) for kind, count in counts.items())
        console.print(Text(f"{verb} ", style="bold") + Text(f"{size(report.nbytes)} in {report.root}: {what}"))
        shown = report.items if everything else report.items[:_ITEMS_SHOWN]
        for item in shown:
            many = f", {len(item.objects):,} objects" if len(item.objects) > 1 else ""
            console.print(Text(f"  {item.path} ({size(item.nbytes)}{many}): {item.reason}"))
        if len(report.items) > len(shown):
            console.print(Text(f"  ... {len(report.items) - len(shown):,} more; see --all", style="dim"))
    for text in report.kept:
        console.print(Text(f"Kept: {text}", style="dim"))
    if report.items and not report.deleted:
        console.print(Text("Nothing was removed. Give --yes to remove it.", style="bold"))


_NOUNS = {"index": "index file", "temporary": "temporary file", "spool": "spool folder", "upload": "unfinished upload"}
