"""Runs of a deployment as the parent flow sees them: started once, found again, watched, cancelled.

Prefect's API may be away for a while (its server restarts): every call is tried for ``PATIENCE_S`` before it fails, and
the time of the last outage is kept, so that nobody is taken for dead who only could not be heard.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    WorkerFilter,
    WorkerFilterStatus,
)
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus
from prefect.deployments import run_deployment
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventNameFilter, EventOrder
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling, Crashed

from extract_core.errors import SettingsError
from extract_core.progress import reporter

PATIENCE_S = 900.0
_WAIT_S = 5.0
_CLIENT_TRIES = 2
"""Of Prefect's own client, which doubles its waits without bound."""
_SLOW_S = 10.0
"""A call that took so long met an outage, even if the client got through it by itself."""
_ALIVE = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
HEARTBEAT = "prefect.flow-run.heartbeat"
T = TypeVar("T")


_outage = [float("-inf")]
_told: set[str] = set()


def answered_since() -> float:
    """When (on ``time.monotonic``) the API last failed to answer; it has answered ever since."""
    return _outage[0]


def patiently(call: Callable[[SyncPrefectClient], T], patience_s: float = PATIENCE_S) -> T:
    """Call Prefect's API, again and again while it does not answer."""
    began, told = time.monotonic(), False
    while True:
        tried = time.monotonic()
        try:
            with (
                temporary_settings({PREFECT_CLIENT_MAX_RETRIES: _CLIENT_TRIES}),
                get_client(sync_client=True) as client,
            ):
                answer = call(client)
        except (httpx.TransportError, PrefectHTTPStatusError) as error:
            lasting = isinstance(error, PrefectHTTPStatusError) and error.response.status_code < 500
            if lasting or time.monotonic() > began + patience_s:
                raise
            _outage[0] = time.monotonic()
            if not told:
                reporter().note(f"Prefect's API does not answer ({type(error).__name__}: {error}); waiting for it")
                told = True
            time.sleep(min(_WAIT_S, patience_s))
        else:
            if told or time.monotonic() - tried > _SLOW_S:
                _outage[0] = time.monotonic()
            return answer


@dataclass(frozen=True)
class Deployment:
    """Where workers come from: a deployment's full name and its work pool's."""

    name: str
    pool: str

    @classmethod
    def find(cls, name: str) -> Deployment:
        """Look a deployment up.

        Raises:
            SettingsError: there is none of that name, or it has no work pool.
        """
        try:
            found = patiently(lambda client: client.read_deployment_by_name(name))
        except ObjectNotFound:
            raise SettingsError(
                f"there is no deployment {name}; deploy it (python -m flows.bootstrap), or name another in "
                "worker_deployment"
            ) from None
        if found.work_pool_name is None:
            raise SettingsError(f"deployment {name} has no work pool, so that nothing would run it")
        return cls(name, found.work_pool_name)

    def slots(self) -> int:
        """Runs that its pool can have at once now, at least one.

        Its limit; of a process pool no more than it has workers online, since each runs one at a time. A pool of other
        types without a limit has one for each worker online, which is told: such a worker could start many.
        """
        pool = patiently(lambda client: client.read_work_pool(self.pool))
        if pool.type != "process" and not pool.concurrency_limit and self.pool not in _told:
            _told.add(self.pool)
            reporter().note(f"work pool {self.pool} has no limit: one worker run for each of its workers online")
        if pool.type == "process":
            return max(1, min(self.online(), pool.concurrency_limit or self.online()))
        return pool.concurrency_limit or max(1, self.online())

    def online(self) -> int:
        """Prefect workers that poll its pool now."""
        online = WorkerFilter(status=WorkerFilterStatus(any_=[WorkerStatus.ONLINE]))
        return len(patiently(lambda client: client.read_workers_for_work_pool(self.pool, worker_filter=online)))


@task(name="start-worker", task_run_name="start-worker-{title}", cache_policy=NO_CACHE, persist_result=False)
def start_run(
    deployment: str, parameters: dict[str, Any], title: str, tags: Sequence[str], attempt: Sequence[str]
) -> FlowRun:
    """Start a run, or find the one that another parent of this plan started with the same share at the same time.

    A task of its own, so that Prefect knows it as the parent's and cancels it with the parent.

    Args:
        deployment: its full name.
        parameters: of the run.
        title: name of the run.
        tags: of the run.
        attempt: what makes it this run and no other; a run of the past with the same is passed over.
    """
    number = 0
    while True:
        key = hashlib.sha256("\n".join([*attempt, str(number)]).encode()).hexdigest()
        run = patiently(
            lambda client, key=key: run_deployment(  # type: ignore[misc]
                deployment,
                parameters=parameters,
                timeout=0,
                flow_run_name=title,
                tags=tags,
                idempotency_key=key,
            )
        )
        if run.state is None or run.state.type in _ALIVE:
            return run
        number += 1


def alive(tags: Sequence[str]) -> list[FlowRun]:
    """Runs with all these tags that have not ended."""
    chosen = FlowRunFilter(
        tags=FlowRunFilterTags(all_=list(tags)),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ALIVE)),
    )
    return patiently(lambda client: client.read_flow_runs(flow_run_filter=chosen, limit=200))


def look(run: UUID) -> FlowRun | None:
    """A run as it is now; None where it was deleted."""
    try:
        return patiently(lambda client: client.read_flow_run(run))
    except ObjectNotFound:
        return None


def has_living_parent(run: FlowRun) -> bool:
    """Whether the flow run that started this one has not ended."""
    if run.parent_task_run_id is None:
        return False
    try:
        task_run = patiently(lambda client: client.read_task_run(run.parent_task_run_id))  # type: ignore[arg-type]
    except ObjectNotFound:
        return False
    parent = look(task_run.flow_run_id) if task_run.flow_run_id is not None else None
    return parent is not None and parent.state is not None and not parent.state.is_final()


def last_heartbeat(run: UUID) -> UUID | None:
    """The id of a run's newest heartbeat; None where none is known."""
    wanted = EventFilter(
        event=EventNameFilter(name=[HEARTBEAT]),
        any_resource=EventAnyResourceFilter(id=[f"prefect.flow-run.{run}"]),
        order=EventOrder.DESC,
    )
    page = patiently(lambda client: client.read_events(filter=wanted, limit=1))
    return page.events[0].id if page.events else None


def cancel(run: UUID, patience_s: float = PATIENCE_S) -> None:
    """Ask for a run's end; its worker then ends its process."""
    try:
        patiently(lambda client: client.set_flow_run_state(run, Cancelling(), force=False), patience_s)
    except ObjectNotFound:
        return


def declare_dead(run: UUID, reason: str) -> None:
    """Mark a run as crashed whose process cannot say so any more."""
    try:
        patiently(lambda client: client.set_flow_run_state(run, Crashed(message=reason), force=True))
    except ObjectNotFound:
        return


def rename(run: UUID, name: str) -> None:
    """Give a run another name."""
    patiently(lambda client: client.set_flow_run_name(run, name))
