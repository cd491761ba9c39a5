"""The parent's decisions, on a real plan with real commit records; Prefect's API and the clock are the test's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import State, StateType

from extract_core import local, pipeline
from extract_core.errors import StoreUnavailableError
from extract_core.job import Job, prepare
from extract_core.pipeline.share import Committed, share_of, still_open
from extract_core.progress import reporter, set_reporter
from extract_core.shares import from_ranges
from extract_core.store.commits import all_records, read_commits
from flows import fanout
from flows.fanout import FanOut, WorkersFailedError
from tests.unit.rows_kit import Notes, Rows, ten_chats


@dataclass
class Run:
    """A worker run: what it will do, and what it has been told."""

    parameters: dict[str, Any]
    name: str
    plays: Callable[[Run], None]
    id: UUID = field(default_factory=uuid4)
    state: State[Any] = field(default_factory=lambda: State(type=StateType.SCHEDULED))
    todo: list[str] = field(default_factory=list)
    beating: bool = True
    beat: UUID = field(default_factory=uuid4)

    def __post_init__(self) -> None:
        self.todo = from_ranges(self.parameters["shards"])


class Prefect:
    """Stands for ``flows.runs``, ``time`` and the machines: each sleep of the parent lets every worker do one thing."""

    def __init__(self, job: Job):
        self.job, self.now = job, 1000.0
        self.runs: list[Run] = []
        self.scripts: list[Callable[[Run], None]] = []
        self.slots, self.living = 2, True
        self.unanswered = float("-inf")
        self.ticks = 0

    # -- time ----------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.ticks += 1
        assert self.ticks < 5000, "the parent never ends"
        for run in self.runs:
            if run.state.type == StateType.CANCELLING:
                run.state = State(type=StateType.CANCELLED)
            elif not run.state.is_final():
                run.plays(run)
                if run.beating and int(self.now) % 30 < seconds:
                    run.beat = uuid4()

    # -- flows.runs ----------------------------------------------------------------------------------------------

    def alive(self, tags: list[str]) -> list[Run]:
        return [r for r in self.runs if not r.state.is_final() and r.state.type != StateType.CANCELLING]

    def has_living_parent(self, run: Run) -> bool:
        return self.living

    def look(self, run: UUID) -> Run:
        return next(item for item in self.runs if item.id == run)

    def last_heartbeat(self, run: UUID) -> UUID:
        return self.look(run).beat

    def answered_since(self) -> float:
        return self.unanswered

    def start_run(self, deployment: str, parameters: dict[str, Any], title: str, tags: Any, attempt: Any) -> Run:
        plays = self.scripts.pop(0) if self.scripts else work
        self.runs.append(Run(parameters, title, plays))
        return self.runs[-1]

    def cancel(self, run: UUID, patience_s: float = 0.0) -> None:
        self.look(run).state = State(type=StateType.CANCELLING)

    def declare_dead(self, run: UUID, reason: str) -> None:
        self.look(run).state = State(type=StateType.CRASHED, message=reason)

    # -- what workers do -----------------------------------------------------------------------------------------

    def extract(self, name: str) -> None:
        tasks = list(still_open(self.job, share_of(self.job, [name])))
        local.extract(self.job, Rows(self.job), todo=tasks)  # type: ignore[arg-type]

    @property
    def started(self) -> list[list[str]]:
        return [from_ranges(run.parameters["shards"]) for run in self.runs]


site: Prefect


def work(run: Run) -> None:
    """A healthy worker: begins, then a shard at a time, then completes."""
    if not run.state.is_running():
        run.state = State(type=StateType.RUNNING)
    elif run.todo:
        site.extract(run.todo.pop(0))
    else:
        run.state = State(type=StateType.COMPLETED)


def failing(after: int, message: str = "it broke") -> Callable[[Run], None]:
    """A worker that fails after so many shards."""

    def play(run: Run) -> None:
        if run.state.is_running() and len(from_ranges(run.parameters["shards"])) - len(run.todo) >= after:
            run.state = State(type=StateType.FAILED, message=message)
        else:
            work(run)

    return play


def hanging(run: Run) -> None:
    """A worker whose engine does nothing."""
    run.state = State(type=StateType.RUNNING)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return prepare(ten_chats(tmp_path))


@pytest.fixture
def prefect(job: Job, monkeypatch: pytest.MonkeyPatch) -> Prefect:
    global site
    site = Prefect(job)
    monkeypatch.setattr(fanout, "runs", site)
    monkeypatch.setattr(fanout, "time", site)
    monkeypatch.setattr(fanout, "emit_event", lambda *words, **more: None)
    monkeypatch.setattr(fanout, "BoardArtifacts", lambda *words: SimpleNamespace(show=lambda *w, **m: None))
    return site


@pytest.fixture
def notes() -> Any:
    before, heard = reporter(), Notes()
    set_reporter(heard)
    yield heard
    set_reporter(before)


def fan_out(job: Job, prefect: Prefect, **more: Any) -> FanOut:
    deployment = SimpleNamespace(name="w", pool="p", slots=lambda: prefect.slots, online=lambda: 0)
    return FanOut(job, {}, deployment, more.pop("most", None), "t", [], more.pop("stall_s", 600.0))  # type: ignore[arg-type]


def run(job: Job, prefect: Prefect, **more: Any) -> FanOut:
    fan = fan_out(job, prefect, **more)
    fan.extract(pipeline.open_shards(job))
    return fan


def names(job: Job) -> list[str]:
    return [f"{shard.index:05d}" for shard in job.plan.meta.shards]


def once_each(job: Job) -> None:
    commits = read_commits(job.root, job.plan.fingerprint)
    assert sorted(commits) == [shard.index for shard in job.plan.meta.shards]
    assert len(list(all_records(commits))) == len(commits)


def test_two_workers_do_everything_once(job: Job, prefect: Prefect) -> None:
    run(job, prefect)
    once_each(job)
    assert sorted(name for share in prefect.started for name in share) == names(job)
    assert {item.state.type for item in prefect.runs} == {StateType.COMPLETED}


def test_what_a_failed_worker_leaves_goes_to_another(job: Job, prefect: Prefect) -> None:
    prefect.scripts = [failing(1, "EngineStartError: no")]
    fan = run(job, prefect)
    once_each(job)
    assert len(prefect.runs) == 3
    assert prefect.started[2] == sorted(prefect.started[0][1:], key=lambda name: (name == prefect.started[0][1], name))
    assert fan.failures == ["worker t w1 ended Failed: EngineStartError: no"]


def test_workers_that_all_fail_end_the_parent_with_every_cause(job: Job, prefect: Prefect) -> None:
    prefect.scripts = [failing(0, f"cause {n}") for n in range(20)]
    with pytest.raises(WorkersFailedError, match="cause 0") as caught:
        run(job, prefect)
    assert "cause 1" in str(caught.value)
    assert "run the job again" in str(caught.value)
    assert len(prefect.runs) <= fanout.FRUITLESS + 1, "no more are started than are needed to know"


def test_a_shard_that_breaks_every_worker_is_left_alone_and_the_rest_is_done(job: Job, prefect: Prefect) -> None:
    def poisoned(item: Run) -> None:
        if item.state.is_running() and item.todo[:1] == ["00001"]:
            item.state = State(type=StateType.FAILED, message="poison")
        else:
            work(item)

    prefect.slots = 1
    prefect.scripts = [poisoned] * 50
    with pytest.raises(WorkersFailedError, match=r"1 of \d+ shards are not extracted \(1\)"):
        run(job, prefect)
    assert sorted(read_commits(job.root, job.plan.fingerprint)) == [int(name) for name in names(job) if name != "00001"]
    assert len(prefect.runs) <= fanout.TRIES + 1


def test_a_broken_node_beside_a_healthy_one_is_tried_ever_more_rarely(job: Job, prefect: Prefect) -> None:
    def slow(item: Run) -> None:
        if prefect.ticks % 40 == 0 or not item.state.is_running():
            work(item)

    prefect.scripts = [slow, *[failing(0)] * 500]
    with pytest.raises(WorkersFailedError):
        run(job, prefect, stall_s=1e6)
    assert len(prefect.runs) < 30, "each try waits longer than the one before"


def test_a_store_that_is_away_ends_nothing(job: Job, prefect: Prefect, notes, monkeypatch) -> None:
    real, calls = Committed.look, []

    def look(self: Committed) -> list[str]:
        calls.append(1)
        if 3 < len(calls) < 60:
            raise StoreUnavailableError("the store is away")
        return real(self)

    monkeypatch.setattr(Committed, "look", look)
    run(job, prefect, stall_s=100)
    once_each(job)
    assert sum("the store is away" in text for text in notes.texts) == 1, "told once"
    assert {item.state.type for item in prefect.runs} == {StateType.COMPLETED}, "nobody has stalled"


def test_a_store_that_stays_away_is_an_error(job: Job, prefect: Prefect, monkeypatch) -> None:
    def look(self: Committed) -> list[str]:
        raise StoreUnavailableError("the store is away")

    monkeypatch.setattr(Committed, "look", look)
    prefect.scripts = [hanging] * 2
    with pytest.raises(StoreUnavailableError):
        run(job, prefect, stall_s=1e6)
    assert {item.state.type for item in prefect.runs} == {StateType.CANCELLING}


def test_a_worker_without_heartbeat_is_dead(job: Job, prefect: Prefect) -> None:
    prefect.scripts = [hanging]

    def silent(item: Run) -> None:
        item.beating = False
        hanging(item)

    prefect.scripts = [silent]
    fan = run(job, prefect, stall_s=1e6)
    once_each(job)
    assert any("no heartbeat for 150 s" in text for text in fan.failures)


def test_an_outage_of_the_api_makes_nobody_dead(job: Job, prefect: Prefect) -> None:
    """Heartbeats could not be received for ten minutes; the worker goes on as soon as they can."""

    def through_an_outage(item: Run) -> None:
        if prefect.now < 1700:
            item.beating = False
            hanging(item)
            prefect.unanswered = prefect.now
        else:
            item.beating = True
            work(item)

    prefect.slots = 1
    prefect.scripts = [through_an_outage]
    assert run(job, prefect, stall_s=1e6).failures == []
    once_each(job)


def test_a_run_that_stays_pending_is_given_up(job: Job, prefect: Prefect) -> None:
    def pending(item: Run) -> None:
        item.state = State(type=StateType.PENDING)

    prefect.scripts = [pending]
    fan = run(job, prefect, stall_s=300)
    once_each(job)
    assert any("has been Pending for 5 minutes" in text for text in fan.failures)


def test_a_run_that_nobody_takes_is_told_and_waited_for(job: Job, prefect: Prefect, notes) -> None:
    def late(item: Run) -> None:
        if prefect.now > 3000:
            work(item)

    prefect.slots = 1
    prefect.scripts = [late]
    run(job, prefect, stall_s=300)
    once_each(job)
    assert any("no worker of work pool p is online: start one with prefect worker start" in t for t in notes.texts)


def test_a_worker_that_stalls_is_cancelled(job: Job, prefect: Prefect) -> None:
    prefect.scripts = [hanging]
    fan = run(job, prefect, stall_s=300)
    once_each(job)
    assert prefect.runs[0].state.type == StateType.CANCELLED
    assert any("committed nothing for 5 minutes" in text for text in fan.failures)


@pytest.mark.parametrize("living", [True, False])
def test_workers_of_another_parent_are_found_and_only_orphans_are_ours(
    job: Job, prefect: Prefect, living: bool
) -> None:
    prefect.living = living
    everything = ",".join(str(int(name)) for name in names(job))
    prefect.runs.append(Run({"shards": everything}, "theirs", hanging))
    prefect.runs[0].state = State(type=StateType.RUNNING)

    class CancelledError(BaseException):
        pass

    def stop(seconds: float) -> None:
        raise CancelledError

    prefect.sleep = stop  # type: ignore[method-assign]
    with pytest.raises(CancelledError):
        run(job, prefect)
    assert len(prefect.runs) == 1, "its shares are taken"
    assert prefect.runs[0].state.type == (StateType.RUNNING if living else StateType.CANCELLING)


def test_a_late_orphan_is_cancelled_and_its_share_is_free(job: Job, prefect: Prefect) -> None:
    prefect.living = False
    prefect.runs.append(Run({"shards": "0-1"}, "theirs", lambda item: None))
    run(job, prefect)
    once_each(job)
    assert prefect.runs[0].state.type == StateType.CANCELLED


def test_who_has_not_begun_when_all_is_done_is_not_waited_for(job: Job, prefect: Prefect) -> None:
    def never(item: Run) -> None:
        return

    prefect.scripts = [work]
    prefect.slots = 1
    fan = fan_out(job, prefect)
    ticks: list[int] = []

    def helper_too(item: Run) -> None:
        work(item)
        if not ticks:
            prefect.runs.append(Run({"shards": "0"}, "helper", never))
            ticks.append(prefect.ticks)

    prefect.scripts = [helper_too]
    fan.extract(pipeline.open_shards(job))
    assert prefect.runs[1].name == "helper"
    once_each(job)


@pytest.mark.parametrize("what", ["shard", "norm"])
def test_what_is_lost_comes_back_through_workers(job: Job, prefect: Prefect, what: str) -> None:
    """With the same bits the old record stands again; what was lost being there tells that it is done."""
    run(job, prefect)
    record = read_commits(job.root, job.plan.fingerprint)[0].records[0]
    lost = record.object if what == "shard" else record.final_norm.path  # type: ignore[union-attr]
    assert lost is not None
    job.root.delete(lost)
    prefect.runs.clear()
    [task] = pipeline.open_shards(job)
    fan = run(job, prefect)
    assert job.root.exists(lost)
    assert fan.failures == []
    assert len(prefect.runs) == 1
    assert pipeline.open_shards(job) == []
    assert task.restores is not None
    assert task.restores[0] == lost
