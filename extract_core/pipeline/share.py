"""Part of a plan for one of several workers: which of its tasks, and whether another worker did one meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from extract_core.errors import CorruptDataError
from extract_core.job import Job
from extract_core.pipeline.todo import ShardTask, open_shards
from extract_core.progress import reporter
from extract_core.retries import with_retries
from extract_core.store import layout
from extract_core.store.commits import read_commit
from extract_core.store.objects import lost_objects
from extract_core.store.records import CommitRecord


def share_of(job: Job, names: Sequence[str]) -> list[ShardTask]:
    """The tasks of these names that are still open, in the order of the names."""
    tasks = {task.name: task for task in open_shards(job)}
    return [tasks[name] for name in names if name in tasks]


def is_done(job: Job, task: ShardTask, record: CommitRecord | None) -> bool:
    """Whether a task is done, given the commit record that stands for it.

    A record that was there before stands again where a lost object came back with the same bits; then the object tells.

    Raises:
        StoreError: the root cannot be read.
    """
    if record is None:
        return False
    if record.attempt not in task.replaces and (task.replaces or task.restores is None):
        return True
    if task.restores is None:
        return False
    path, nbytes = task.restores
    return not lost_objects(job.root, {path: nbytes})


def is_committed(job: Job, task: ShardTask) -> bool:
    """Whether a task was done meanwhile; see ``is_done``."""
    try:
        record = read_commit(job.root, job.plan.fingerprint, task.shard, task.round)
    except CorruptDataError:
        return False  # to be replaced, or told when the task is committed
    return is_done(job, task, record)


def still_open(job: Job, tasks: Iterable[ShardTask]) -> Iterator[ShardTask]:
    """The tasks one after the other, without those that another worker has committed by the time they come up."""
    for task in tasks:
        if with_retries(partial(is_committed, job, task)):
            reporter().note(f"shard {task.name} was committed by another worker")
        else:
            yield task


@dataclass(frozen=True)
class CommitSummary:
    """What people want to know of a commit record; the record itself names every sample."""

    nbytes: int
    tokens_per_s: float
    quarantined: int
    sha256: str
    attempt: str

    @classmethod
    def of(cls, record: CommitRecord) -> CommitSummary:
        """In short."""
        seconds = record.timings.get("engine_s", 0.0)
        return cls(
            record.nbytes,
            record.timings.get("tokens", 0.0) / seconds if seconds else 0.0,
            len(record.excluded),
            record.sha256 or "",
            record.attempt,
        )


class Committed:
    """What of some tasks is committed, looked up again and again: one listing, and a read of what is new.

    Args:
        job: the job.
        tasks: what is watched.
    """

    def __init__(self, job: Job, tasks: Iterable[ShardTask]):
        self._job = job
        self._waiting = {(task.shard, task.round): task for task in tasks}
        self.records: dict[str, CommitSummary] = {}
        """What is committed so far, by the task's name."""

    @property
    def quarantined(self) -> int:
        """Samples that the tasks committed so far have left out."""
        return sum(record.quarantined for record in self.records.values())

    def look(self) -> list[str]:
        """Names of the tasks that were committed since the last look.

        Raises:
            StoreError: the root cannot be read.
        """
        root, fingerprint = self._job.root, self._job.plan.fingerprint
        found = []
        for name in root.list(layout.commits_dir(fingerprint)):
            key = layout.commit_shard(name)
            task = self._waiting.get(key) if key is not None else None
            if key is None or task is None:
                continue
            try:
                record = read_commit(root, fingerprint, *key)
            except CorruptDataError:
                continue
            if record is not None and is_done(self._job, task, record):
                found.append(task.name)
                self.records[task.name] = CommitSummary.of(record)
                del self._waiting[key]
        return found
