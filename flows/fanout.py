"""The shards of a plan over several workers: start them, watch the commit records, share out again what is left.

What is done is what the commit records say, whatever Prefect says of a run; what a run says only tells why something
is not done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import FlowRun
from prefect.events import emit_event

from extract_core.errors import CoresampleError, shortened
from extract_core.job import Job
from extract_core.pipeline import ShardTask
from extract_core.pipeline.share import Committed
from extract_core.progress import reporter
from extract_core.shares import Board, as_ranges, from_ranges
from flows import runs
from tasks.board import BoardArtifacts

POLL_S = 5.0
FRUITLESS = 3
"""Runs in a row that may fail without anything being committed before no more are started."""
TOLD_WAITING_S = 60.0
"""A run that nobody has taken for so long is worth a line."""

ENDING_S = 120.0
"""Time for workers to end once everything is committed."""


class WorkersFailedError(CoresampleError):
    """Shards are left, and the runs that should have extracted them failed; lists the root cause of each."""


def plan_tag(fingerprint: str) -> str:
    """Marks the worker runs of one plan."""
    return f"plan:{fingerprint}"


@dataclass
class _Run:
    id: UUID
    name: str
    mine: bool
    asked: float
    running: bool = False
    told: bool = False


@dataclass
class FanOut:
    """One parent's view of a plan that several workers extract.

    Args:
        job: the job.
        parameters: of a worker run, without its share.
        deployment: where workers come from.
        most: most workers at once; None: as many as the pool can have, which may change while the job runs.
        title: begins the names of the runs.
        tags: of the runs, beside the plan's own.
        stall_s: a worker that commits nothing for so long is given up.
    """

    job: Job
    parameters: dict[str, Any]
    deployment: runs.Deployment
    most: int | None
    title: str
    tags: Sequence[str]
    stall_s: float
    failures: list[str] = field(default_factory=list)

    def extract(self, todo: Sequence[ShardTask]) -> None:
        """Returns when every task has a commit record.

        Raises:
            WorkersFailedError: workers failed, and starting others did not help.
        """
        self._todo = {task.name: task for task in todo}
        self._board = Board({task.name: task.rows for task in todo}, stall_s=self.stall_s)
        self._committed = Committed(self.job, todo)
        self._runs: dict[UUID, _Run] = {}
        self._fruitless = self._started = 0
        self._shown = BoardArtifacts(self.job, self._todo)
        self._adopt()
        self._event("started")
        try:
            while True:
                self._look()
                if not self._board.open:
                    break
                self._start()
                if not self._runs:
                    raise self._failed()
                time.sleep(POLL_S)
            self._let_end()
        finally:
            self._end()

    @property
    def _plan_tag(self) -> str:
        return plan_tag(self.job.plan.fingerprint)

    # -- looking -------------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Workers of this plan that another parent started, or one that is gone: their shares are taken."""
        for run in runs.alive([self._plan_tag]):
            names = from_ranges(str(run.parameters.get("shards", "")))
            reporter().note(f"worker {run.name} of this plan is at work already, on shards {as_ranges(names)}")
            self._add(run, names, mine=False)

    def _add(self, run: FlowRun, names: Sequence[str], *, mine: bool) -> None:
        now = time.monotonic()
        self._runs[run.id] = _Run(run.id, run.name, mine, now)
        self._board.began(run.id, names, now)

    def _look(self) -> None:
        """What was committed, who has ended, who does not move."""
        self._count()
        for known in list(self._runs.values()):
            run = runs.look(known.id)
            if run is None or run.state is None or run.state.is_final():
                self._count()  # what it committed last counts before it is judged
                self._ended(known, run)
            elif run.state.is_running() and not known.running:
                known.running = True
                self._board.live[known.id].moved = time.monotonic()
            elif not known.running and not known.told and time.monotonic() - known.asked > TOLD_WAITING_S:
                known.told = True
                self._tell_waiting(known)
        for worker in self._board.stalled(time.monotonic()):
            known = self._runs[worker]  # type: ignore[index]
            if known.running:
                self._give_up(known)
        self._shown.show(self._board, {run.id: run.name for run in self._runs.values()}, self._committed)

    def _count(self) -> None:
        if self._board.committed(self._committed.look(), time.monotonic()):
            self._fruitless = 0
            self._event("progress")

    def _ended(self, known: _Run, run: FlowRun | None) -> None:
        del self._runs[known.id]
        left = self._board.ended(known.id)
        state = run.state if run is not None else None
        if state is not None and state.is_completed() and not left:
            return
        self._fruitless += 1
        words = f"{state.name}: {state.message or 'no reason given'}" if state is not None else "the run was deleted"
        self.failures.append(f"worker {known.name} ended {words}")
        reporter().note(f"{self.failures[-1]}" + (f"; shards {as_ranges(left)} go to another" if left else ""))

    def _give_up(self, known: _Run) -> None:
        self.failures.append(f"worker {known.name} committed nothing for {self.stall_s / 60:.0f} minutes; cancelled")
        reporter().note(self.failures[-1])
        runs.cancel(known.id)
        del self._runs[known.id]
        self._board.ended(known.id)
        self._fruitless += 1

    def _tell_waiting(self, known: _Run) -> None:
        online = self.deployment.online()
        reporter().note(
            f"worker {known.name} waits to be started; "
            + (
                f"{online} of the pool's workers are online and busy, or its limit is reached"
                if online
                else f"no worker of work pool {self.deployment.pool} is online: start one with prefect worker start "
                f"--pool {self.deployment.pool}"
            )
        )

    # -- starting ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._fruitless >= FRUITLESS:
            return
        slots = self.deployment.slots()
        for names in self._board.next_shares(min(slots, self.most or slots), time.monotonic()):
            self._started += 1
            share = as_ranges(names)
            title = f"{self.title} w{self._started}"
            run = runs.start_run(
                self.deployment.name,
                {**self.parameters, "shards": share},
                title,
                [*self.tags, self._plan_tag],
                [self.job.plan.fingerprint, self.deployment.name, share],
            )
            if run.id in self._runs:
                continue  # another parent started it at the same time, and it was found before
            self._add(run, names, mine=True)
            reporter().note(f"worker {run.name}: shards {share}")

    def _failed(self) -> WorkersFailedError:
        left = self._board.open
        return WorkersFailedError(
            f"{len(left)} of {len(self._todo)} shards are not extracted ({shortened(as_ranges(left))}); why:\n"
            + "\n".join(f"  {line}" for line in self.failures[-20:])
            + "\nWhat is committed stays; when the cause is mended, run the job again"
        )

    def _let_end(self) -> None:
        """Everything is committed: workers close their engines and end by themselves, or are asked to."""
        deadline = time.monotonic() + ENDING_S
        while self._runs and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
            for known in list(self._runs.values()):
                run = runs.look(known.id)
                if run is None or run.state is None or run.state.is_final():
                    del self._runs[known.id]

    def _end(self) -> None:
        """Workers that this parent started and that are still there have nobody left who waits for them."""
        for known in self._runs.values():
            if known.mine:
                runs.cancel(known.id)
        self._event("ended")
        self._shown.show(self._board, {}, self._committed, last=True)

    def _event(self, what: str) -> None:
        """For automations: work has begun, a shard was committed, work is over (done or not)."""
        emit_event(
            f"coresample.extraction.{what}",
            resource={"prefect.resource.id": f"coresample.dataset.{self.job.root.url}"},
            payload={"committed": len(self._board.done), "open": len(self._board.open)},
        )
