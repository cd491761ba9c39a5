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

from extract_core.errors import CoresampleError, StoreError, shortened
from extract_core.job import Job
from extract_core.pipeline import ShardTask
from extract_core.pipeline.share import Committed
from extract_core.progress import reporter
from extract_core.shares import Board, as_ranges, from_ranges
from flows import runs
from tasks.board import BoardArtifacts

POLL_S = 5.0
FRUITLESS = 3
"""Runs in a row that may fail without committing anything; after that, none is started once no other is alive."""
BACK_OFF_S, LONGEST_BACK_OFF_S = 5.0, 300.0
TRIES = 3
"""Workers that may fail at the same shard before it is left alone, so that the others are done first."""
TOLD_WAITING_S = 60.0
"""A run that nobody has taken for so long is worth a line."""
DEAD_S = 150.0
"""A run whose heartbeat (every 30 s) stays away for so long, while the API answers, has lost its process or machine."""
ENDING_S = 60.0
"""Time for workers to end once everything is committed."""
STORE_PATIENCE_S = 900.0


class WorkersFailedError(CoresampleError):
    """Shards are left, and the runs that should have extracted them failed; lists the root cause of each."""


def plan_tag(fingerprint: str) -> str:
    """Marks the worker runs of one plan."""
    return f"plan:{fingerprint}"


@dataclass
class _Run:
    """``mine``: this parent, or one that is gone, started it; ``heard`` and ``beat``: its last heartbeat."""

    id: UUID
    name: str
    mine: bool
    asked: float
    running: bool = False
    told: bool = False
    leaving: bool = False
    heard: float = 0.0
    beat: UUID | None = None


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
            StoreError: the commit records cannot be read for longer than ``STORE_PATIENCE_S``.
        """
        self._todo = {task.name: task for task in todo}
        self._board = Board({task.name: task.rows for task in todo}, stall_s=self.stall_s)
        self._committed = Committed(self.job, todo)
        self._runs: dict[UUID, _Run] = {}
        self._fruitless = self._started = 0
        self._not_before = 0.0
        self._store_away: float | None = None
        self._shown = BoardArtifacts(self.job, self._todo)
        self._event("started")
        try:
            while True:
                self._adopt()
                self._look()
                if not self._board.open:
                    break
                self._start()
                if not self._runs and (self._fruitless >= FRUITLESS or not self._board.hopeful):
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
        """Workers of this plan that another parent started hold their shares; those of a dead one are ours now."""
        for run in runs.alive([self._plan_tag]):
            if run.id in self._runs:
                continue
            orphan = not runs.has_living_parent(run)
            if orphan and run.state is not None and not (run.state.is_running() or run.state.is_pending()):
                runs.cancel(run.id)  # it has not begun, and whoever wanted it is gone
                continue
            names = from_ranges(str(run.parameters.get("shards", "")))
            reporter().note(f"worker {run.name} of this plan is at work already, on shards {as_ranges(names)}")
            self._add(run, names, mine=orphan)
            number = run.name.rpartition(" w")[2]
            self._started = max(self._started, int(number) if number.isdecimal() else 0)  # names go on from theirs

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
                if self._store_away is None:
                    self._ended(known, run)
            elif run.state.is_running():
                self._watch(known)
            elif not known.told and time.monotonic() - known.asked > TOLD_WAITING_S:
                known.told = True
                self._tell_waiting(known)
            elif not run.state.is_scheduled() and time.monotonic() - known.asked > self.stall_s:
                self._give_up(known, f"has been {run.state.name} for {self.stall_s / 60:.0f} minutes")
        for worker in self._board.stalled(time.monotonic()):
            known = self._runs[worker]  # type: ignore[index]
            if known.running and self._store_away is None:
                self._give_up(known, f"committed nothing for {self.stall_s / 60:.0f} minutes")
        self._shown.show(self._board, {run.id: run.name for run in self._runs.values()}, self._committed)

    def _watch(self, known: _Run) -> None:
        """A running worker: is its process alive? Only an API that answers can tell."""
        now = time.monotonic()
        if not known.running:
            known.running, known.heard = True, now
            self._board.runs(known.id, now)
        beat = runs.last_heartbeat(known.id)
        if beat != known.beat or beat is None:  # None: its heartbeats are off
            known.beat, known.heard = beat, now
        if now - max(known.heard, runs.answered_since()) > DEAD_S:
            runs.declare_dead(known.id, f"no heartbeat for {DEAD_S:.0f} s: its process or machine is gone")

    def _count(self) -> None:
        try:
            new = self._committed.look()
        except StoreError as error:
            now = time.monotonic()
            if not error.retryable or (self._store_away is not None and now - self._store_away > STORE_PATIENCE_S):
                raise
            if self._store_away is None:
                self._store_away = now
                reporter().note(f"{error}; the workers go on, and so does the watch over them")
            return
        if self._store_away is not None:
            self._store_away = None
            self._board.forgive(time.monotonic())
        if self._board.committed(new, time.monotonic()):
            self._event("progress")

    def _ended(self, known: _Run, run: FlowRun | None) -> None:
        del self._runs[known.id]
        worked, left = bool(self._board.live[known.id].done), self._board.ended(known.id)
        state = run.state if run is not None else None
        if known.leaving or (state is not None and state.is_completed() and not left):
            return
        words = f"{state.name}: {state.message or 'no reason given'}" if state is not None else "the run was deleted"
        self.failures.append(f"worker {known.name} ended {words}")
        reporter().note(f"{self.failures[-1]}" + (f"; shards {as_ranges(left)} go to another" if left else ""))
        self._blame(worked, left)

    def _blame(self, worked: bool, left: Sequence[str]) -> None:
        """A worker failed: the shard it was at goes last, and one that several fail at is left alone in the end."""
        if left:
            self._board.suspect(left[0], TRIES)
        self._fruitless = 0 if worked else self._fruitless + 1
        pause = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2**self._fruitless) if self._fruitless else 0.0
        self._not_before = time.monotonic() + pause

    def _give_up(self, known: _Run, why: str) -> None:
        self.failures.append(f"worker {known.name} {why}; cancelled")
        reporter().note(self.failures[-1])
        runs.cancel(known.id)
        worked = bool(self._board.live[known.id].done)
        if self.job.root.exclusive is False:
            known.leaving = True  # two writers at once could do harm there: nobody follows before it is gone
            self._board.runs(known.id, time.monotonic())
            return
        del self._runs[known.id]
        self._blame(worked, self._board.ended(known.id))

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
        if time.monotonic() < self._not_before or (self._fruitless >= FRUITLESS and not self._runs):
            return
        slots = self.deployment.slots()
        for names in self._board.next_shares(min(slots, self.most or slots), time.monotonic()):
            self._started += 1
            share = as_ranges(names)
            run = runs.start_run(
                self.deployment.name,
                {**self.parameters, "shards": share},
                f"{self.title} w{self._started}",
                [*self.tags, self._plan_tag],
                [self.job.plan.fingerprint, self.deployment.name, share],
            )
            if run.id in self._runs:
                continue  # another parent started it at the same time, and it was found before
            self._add(run, names, mine=True)
            reporter().note(f"worker {run.name}: shards {share}")

    def _failed(self) -> WorkersFailedError:
        left = self._board.open
        causes = list(dict.fromkeys(self.failures))
        shown = causes[:10] + [f"... {len(causes) - 20} more ..."] * (len(causes) > 20) + causes[10:][-10:]
        return WorkersFailedError(
            f"{len(left)} of {len(self._todo)} shards are not extracted ({shortened(as_ranges(left))}); why:\n"
            + "\n".join(f"  {line}" for line in shown)
            + "\nWhat is committed stays; when the cause is mended, run the job again"
        )

    # -- the end -------------------------------------------------------------------------------------------------

    def _let_end(self) -> None:
        """Everything is committed: who has not begun is not needed, the others close their engines by themselves."""
        deadline = time.monotonic() + ENDING_S
        while self._runs and time.monotonic() < deadline:
            for known in list(self._runs.values()):
                run = runs.look(known.id)
                if run is None or run.state is None or run.state.is_final() or not known.mine:
                    del self._runs[known.id]
                elif not run.state.is_running() and not known.leaving:
                    known.leaving = True
                    runs.cancel(known.id)
            if self._runs:
                time.sleep(POLL_S / 2)

    def _end(self) -> None:
        """Workers that are still there have nobody left who waits for them; one failure must not hide another."""
        for known in self._runs.values():
            if not known.mine:
                continue
            try:
                runs.cancel(known.id, patience_s=POLL_S)
            except Exception as error:  # noqa: BLE001 -- told; what ended the loop is raised
                reporter().note(f"worker {known.name} could not be cancelled: {type(error).__name__}: {error}")
        self._event("ended")
        self._shown.show(self._board, {}, self._committed, last=True)

    def _event(self, what: str) -> None:
        """For automations: work has begun, a shard was committed, work is over (done or not)."""
        emit_event(
            f"coresample.extraction.{what}",
            resource={"prefect.resource.id": f"coresample.dataset.{self.job.root.url}"},
            payload={"committed": len(self._board.done), "open": len(self._board.open)},
        )
