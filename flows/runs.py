"""Runs of a deployment as the parent flow sees them: started once, found again, watched, cancelled.

Prefect's API may be away for a while (its server restarts): every call is tried for ``PATIENCE_S`` before it fails.
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
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelling

from extract_core.errors import SettingsError
from extract_core.progress import reporter

PATIENCE_S = 900.0
_WAIT_S = 5.0
_ALIVE = [
    StateType.SCHEDULED,
    StateType.PENDING,
    StateType.RUNNING,
    StateType.PAUSED,
    StateType.CANCELLING,
]
T = TypeVar("T")


def patiently(call: Callable[[SyncPrefectClient], T]) -> T:
    """Call Prefect's API, again and again while it does not answer."""
    deadline, told = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            with get_client(sync_client=True) as client:
                return call(client)
        except (httpx.TransportError, PrefectHTTPStatusError) as error:
            lasting = isinstance(error, PrefectHTTPStatusError) and error.response.status_code < 500
            if lasting or time.monotonic() > deadline:
                raise
            if not told:
                reporter().note(f"Prefect's API does not answer ({type(error).__name__}: {error}); waiting for it")
                told = True
            time.sleep(_WAIT_S)


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

        Its limit; of a process pool no more than it has workers online, since each runs one at a time.
        """
        pool = patiently(lambda client: client.read_work_pool(self.pool))
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


def cancel(run: UUID) -> None:
    """Ask for a run's end; its worker then ends its process."""
    try:
        patiently(lambda client: client.set_flow_run_state(run, Cancelling(), force=False))
    except ObjectNotFound:
        return


def rename(run: UUID, name: str) -> None:
    """Give a run another name."""
    patiently(lambda client: client.set_flow_run_name(run, name))
