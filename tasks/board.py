"""What a fan-out looks like in Prefect's UI while it runs: a progress bar and a table with a row per shard."""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Mapping
from typing import Any
from uuid import UUID

from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from extract_core.job import Job
from extract_core.pipeline import ShardTask
from extract_core.pipeline.share import CommitSummary, Committed
from extract_core.shares import Board
from extract_core.words import duration
from tasks.artifacts import key, told_not_raised

_MOST_ROWS = 2000
_WINDOW_S = 120.0


def _of_record(record: CommitSummary | None) -> dict[str, Any]:
    if record is None:
        return {"tokens/s": "", "MB": "", "quarantined": "", "sha256": "", "attempt": ""}
    return {
        "tokens/s": round(record.tokens_per_s),
        "MB": round(record.nbytes / 1e6, 1),
        "quarantined": record.quarantined,
        "sha256": record.sha256[:12],
        "attempt": record.attempt[:8],
    }


class BoardArtifacts:
    """Both artifacts are made once and changed in place.

    Args:
        job: the job.
        todo: its open tasks by name, in the order to do them.
    """

    def __init__(self, job: Job, todo: Mapping[str, ShardTask]):
        self._todo, self._began = todo, time.monotonic()
        self._seen: list[tuple[float, int]] = [(self._began, 0)]
        self._table: UUID | None = None
        self._bar: UUID | None = None
        self._last = ""
        self._held_by: dict[str, str] = {}
        plan = job.plan
        self._samples = {shard.index: shard.samples for shard in plan.meta.shards}
        self._what = f"plan {plan.fingerprint} of {job.root.url}"
        with told_not_raised("progress"):
            self._bar = create_progress_artifact(  # type: ignore[assignment]
                progress=0.0, key=key("progress", plan.fingerprint[:12]), description="Waiting for workers"
            )
        with told_not_raised("shard table"):
            self._table = create_table_artifact(  # type: ignore[assignment]
                table=[], key=key("work", plan.fingerprint[:12]), description=self._what
            )

    def show(self, board: Board, workers: Mapping[Any, str], committed: Committed, *, last: bool = False) -> None:
        """Bring both up to date.

        Args:
            board: who has what.
            workers: names of the live workers.
            committed: what the commit records say.
            last: nothing more will come.
        """
        now, done, total = time.monotonic(), board.rows_done, sum(board.rows.values())
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] < now - _WINDOW_S:
            self._seen.pop(0)
        (first, before), (_, after) = self._seen[0], self._seen[-1]
        since, came = (self._began, 0) if last else (first, before)
        rate = (after - came) / max(1e-9, now - since)
        left = duration((total - done) / rate) if rate > 0 and done < total else ""
        text = (
            f"{done:,} of {total:,} tokens, {rate:,.0f} tokens/s" + (f", {left} left" if left else "") + "; "
            f"{len(board.done)} of {len(board.rows)} shards, {len(board.open)} to do; {len(workers)} workers; "
            f"{committed.quarantined} samples quarantined"
        )
        if self._bar is not None:
            with told_not_raised("progress"):
                update_progress_artifact(self._bar, progress=round(100 * done / max(1, total), 1), description=text)
        self._show_table(board, workers, committed)

    def _show_table(self, board: Board, workers: Mapping[Any, str], committed: Committed) -> None:
        having: dict[str, list[Hashable]] = {}
        for worker, share in board.live.items():
            for name in share.names:
                having.setdefault(name, []).append(worker)
        for name, held_by in having.items():
            if name not in board.done:
                self._held_by[name] = ", ".join(workers.get(worker, "") for worker in held_by)
        rows = [
            {
                "shard": name,
                "tokens": task.rows,
                "samples": len(task.samples) if task.samples is not None else self._samples.get(task.shard, 0),
                "state": "committed" if name in board.done else "given out" if name in having else "waiting",
                "worker": self._held_by.get(name, ""),
                **_of_record(committed.records.get(name)),
            }
            for name, task in self._todo.items()
        ]
        left_out = max(0, len(rows) - _MOST_ROWS)
        if left_out:  # what is still to be done first
            rows = sorted(rows, key=lambda row: row["state"] == "committed")[:_MOST_ROWS]
        what = f"{self._what}; {left_out:,} more shards are not shown" if left_out else self._what
        data = json.dumps(rows)
        if self._table is not None and data != self._last:
            self._last = data
            with told_not_raised("shard table"), get_client(sync_client=True) as client:
                client.update_artifact(self._table, ArtifactUpdate(data=data, description=what))
