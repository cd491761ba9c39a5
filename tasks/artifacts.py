"""Prefect artifacts of a run: progress, a table with a row per shard, a summary."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from extract_core.deep.verify import DeepReport
from extract_core.job import Job
from extract_core.local import ShardProgress
from extract_core.pipeline import ShardTask
from extract_core.progress import reporter
from extract_core.provenance import origin_in_words
from extract_core.store.commits import ShardCommits, all_records
from extract_core.store.gc import GcReport
from extract_core.store.records import Manifest
from extract_core.store.verify import VerifyReport

_UPDATE_EVERY_S = 5.0
_MOST_PROBLEMS, _MOST_ROWS = 50, 2000


def key(*parts: str) -> str:
    """An artifact key: Prefect allows lowercase letters, digits and dashes only."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


@contextmanager
def told_not_raised(what: str) -> Iterator[None]:
    """What is only shown must not end hours of work: a failure of Prefect's API becomes a note."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - told to the user
        reporter().note(f"the {what} artifact could not be written: {type(error).__name__}: {error}")


class ProgressArtifact(ShardProgress):
    """Shard progress that also moves a progress bar in the Prefect UI, every few seconds at most."""

    def __init__(self, job: Job, todo: Sequence[ShardTask], share: str = ""):
        super().__init__(todo)
        self._updated = 0.0
        self._artifact: UUID | None = None
        with told_not_raised("progress"):
            self._artifact = create_progress_artifact(  # type: ignore[assignment]
                progress=0.0,
                key=key("progress", job.plan.fingerprint[:12], share)[:200].strip("-"),
                description=f"Tokens extracted of {self.total:,}",
            )

    def tokens(self, of_shard: int) -> None:
        """``of_shard`` tokens of the current shard are computed."""
        super().tokens(of_shard)
        self._show(self._done + of_shard)

    def shard_done(self, task: ShardTask) -> None:
        """A shard is captured."""
        super().shard_done(task)
        self._show(self._done, force=self._done == self.total)

    def _show(self, done: int, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._updated > _UPDATE_EVERY_S:
            self._updated = now
            if self._artifact is not None:
                with told_not_raised("progress"):
                    update_progress_artifact(self._artifact, progress=round(100.0 * done / max(1, self.total), 1))


def shard_table(job: Job, commits: Mapping[int, ShardCommits]) -> None:
    """One row per commit record: the shards, and the retries of what was left out of them."""
    rows = [
        {
            "shard": record.shard,
            "round": record.round,
            "samples": len(record.samples),
            "quarantined": len(record.excluded),
            "rows": record.rows,
            "MB": round(record.nbytes / 1e6, 1),
            "tokens/s": round(record.timings.get("tokens", 0.0) / max(1e-9, record.timings.get("engine_s", 0.0)), 1),
            "sha256": (record.sha256 or "")[:12],
            "attempt": record.attempt[:8],
        }
        for record in all_records(commits)
    ]
    with told_not_raised("shard table"):
        create_table_artifact(
            table=rows,
            key=key("shards", job.plan.fingerprint[:12]),
            description=(
                f"{len(commits)} of {len(job.plan.meta.shards)} shards of plan {job.plan.fingerprint} committed"
            ),
        )


def summary(job: Job, manifest: Manifest, *, new: bool) -> None:
    """What was published, or that nothing had to run."""
    a, t = manifest.accounting, manifest.totals
    checks = "\n".join(
        f"| {name} | {'pass' if result['passed'] else 'FAIL'} | {result['value']} | {result['detail']} |"
        for name, result in manifest.checks.items()
    )
    with told_not_raised("summary"):
        create_markdown_artifact(
            key=key("summary", job.plan.fingerprint[:12]),
            description=f"Version {manifest.version} of {job.root.url}",
            markdown=(
                f"# {job.root.url} version {manifest.version}\n\n"
                + ("" if new else "Nothing changed: this plan was published already, nothing ran.\n\n")
                + f"- model `{job.model.name}`, layers {manifest.layer_ids} of {manifest.n_layers}, {manifest.dtype}, "
                f"last layer before the final norm\n"
                f"- {t.samples:,} samples, {t.tokens:,} tokens, {t.bytes / 1e6:,.1f} MB, "
                f"{manifest.timings.get('tokens_per_s', 0.0):,.0f} tokens/s in the engine\n"
                + (f"- {origin}\n" if (origin := origin_in_words(manifest.provenance)) else "")
                + f"- {a.input} input = {a.published} published + {a.duplicates} duplicates + "
                f"{sum(a.dropped.values())} dropped + {sum(a.quarantined.values())} quarantined\n"
                f"- fingerprint `{manifest.fingerprint}`\n\n"
                f"| check | result | value | detail |\n|---|---|---|---|\n{checks}\n"
            ),
        )


def verified(root: str, report: VerifyReport, compared: DeepReport | None) -> None:
    """What a verification found."""
    found = [str(problem) for problem in report.problems] + (compared.problems if compared else [])
    rows = "".join(
        f"| {layer.layer} | {layer.equal_rows} of {layer.rows} | {layer.median_error:.1e} | {layer.max_error:.1e} | "
        f"{'ok' if layer.passed else 'FAILS'} |\n"
        for layer in (compared.layers if compared else [])
    )
    with told_not_raised("verification"):
        create_markdown_artifact(
            key=key("verify", root),
            description=f"Version {report.version} of {root}",
            markdown=(
                f"# {root} version {report.version}: {'DAMAGED' if found else 'whole'}\n\n"
                f"- {report.shards} shards and {report.samples:,} samples read\n"
                + "".join(f"- {text}\n" for text in found[:_MOST_PROBLEMS])
                + (f"- ... {len(found) - _MOST_PROBLEMS} more\n" if len(found) > _MOST_PROBLEMS else "")
                + (
                    f"\n{compared.samples} samples, {compared.rows:,} rows extracted again:\n\n"
                    f"| layer | rows equal bit for bit | median difference | largest | |\n|---|---|---|---|---|\n{rows}"
                    if compared
                    else ""
                )
            ),
        )


def collected(root: str, report: GcReport) -> None:
    """What a collection removed, or would remove."""
    with told_not_raised("collection"):
        create_table_artifact(
            key=key("gc", root),
            description=f"{'Removed from' if report.deleted else 'To be removed from'} {root}",
            table=[
                {"kind": item.kind, "object": item.path, "MB": round(item.nbytes / 1e6, 3), "reason": item.reason}
                for item in report.items[:_MOST_ROWS]
            ],
        )
