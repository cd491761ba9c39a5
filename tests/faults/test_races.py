"""Two runs of one job at once, in processes of their own: one version comes of it, whole, and nobody is harmed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from extract_core.store.root import Root
from extract_core.store.versions import list_versions
from tests import tiny
from tests.faults import kit, servers
from tests.faults.proxy import FaultProxy, is_commit, is_manifest

FAMILY = "races"
JOB = "tests.faults.storejob"
CHATS = 24
pytestmark = [pytest.mark.timeout(600)]


@dataclass
class Place:
    """A root and a way to run the job there, on S3 through a proxy or past it."""

    case: kit.Case
    url: str
    server: servers.Server | None
    proxy: FaultProxy | None
    model: Path

    @property
    def options(self) -> dict[str, Any]:
        return self.server.options() if self.server else {}

    def job(self, name: str, endpoint: str = "", **sections: object) -> Path:
        """A job file of its own, with a spool of its own, as on another machine."""
        store: dict[str, Any] = {"shard_bytes": "512KiB", "spool": str(self.case.folder / f"spool-{name}")}
        if self.server is not None:
            # A request is held for as long as it pleases the test.
            patient = {"config_kwargs": {"connect_timeout": 30, "read_timeout": 300}}
            store["storage_options"] = {**self.server.options(endpoint), **patient}
        chats = self.case.folder / "chats.jsonl"
        if not chats.exists():
            tiny.write_chats(chats, CHATS, seed=4)
        return tiny.write_job(
            self.case.folder / f"{name}.yaml",
            model=self.model,
            chats=chats,
            root=Path("unused"),
            store=store,
            **sections,
        )

    def settle(self, versions: int = 1) -> None:
        assert len(list_versions(Root.open(self.url, self.options))) == versions
        spools = tuple(self.case.folder.glob("spool-*"))
        self.case.settled(self.url, self.options, rows=CHATS, spools=spools)


REMOTE = ["moto", "radosgw"] if kit.full() else ["moto"]
SALTS = {0: "same bytes", 1: "other bytes"} if kit.full() else {1: "other bytes"}
"""Whether the other run computes the same bits; where it does not, more can go wrong."""


@pytest.fixture(params=["local", *REMOTE])
def place(request, case, server, model):
    if request.param == "local":
        yield Place(case, str(case.folder / "root"), None, None, model)
        return
    found = server(request.param)
    with FaultProxy(found.endpoint) as proxy:
        yield Place(case, found.url(), found, proxy, model)


def all_succeed(case: kit.Case, outcomes: list[kit.Outcome]) -> None:
    for outcome in outcomes:
        assert case.clear(outcome).code == 0, outcome.text[-3000:]


@pytest.mark.parametrize("salts", [(0, salt, 2 * salt) for salt in SALTS], ids=SALTS.values())
def test_many_runs_at_once(case, place, salts: tuple[int, ...]) -> None:
    """They race for the plan, for every shard and for the publication; other bytes are another kind of machine."""
    case.what = "runs of one job at once, from the plan to the publication"
    runs = [
        case.start(str(place.job(f"j{n}")), place.url, "--salt", str(salt), module=JOB) for n, salt in enumerate(salts)
    ]
    case.injected = len(runs)
    all_succeed(case, [case.finish(run) for run in runs])
    place.settle()


def test_two_publishers(case, place) -> None:
    """Everything is committed when two publish at the same moment; and a third comes when it is done."""
    case.what = "publishers at once"
    first = case.start(str(place.job("first")), place.url, "--stop-at", "11", module=JOB)
    kit.wait_stopped(first)
    # The others do the rest; whoever is last finds every shard committed.
    others = [case.start(str(place.job(f"o{n}")), place.url, module=JOB) for n in range(2)]
    first.send_signal(signal.SIGCONT)
    case.injected = 3
    all_succeed(case, [case.finish(run) for run in (first, *others)])
    all_succeed(case, [case.job(place.job("late"), place.url)])
    place.settle()


@pytest.mark.parametrize("salt", SALTS, ids=SALTS.values())
def test_zombie(case, place, salt: int) -> None:
    """A worker stops in mid-run for so long that another does all of its work and publishes; then it wakes."""
    case.what = "a worker that wakes after its shards were taken over"
    zombie = case.start(str(place.job("zombie")), place.url, "--stop-at", "4", "--salt", str(salt), module=JOB)
    kit.wait_stopped(zombie)
    all_succeed(case, [case.job(place.job("heir"), place.url)])
    zombie.send_signal(signal.SIGCONT)
    case.injected = 1
    all_succeed(case, [case.finish(zombie)])
    place.settle()


@pytest.mark.parametrize("place", REMOTE, indirect=True)  # a local root has no requests on their way
@pytest.mark.parametrize("what", ["commit", "manifest"])
@pytest.mark.parametrize("salt", SALTS, ids=SALTS.values())
def test_zombie_whose_request_arrives_late(case, place, what: str, salt: int) -> None:
    """Its deciding request was under way when it stopped, and reaches the store after the heir's."""
    case.what = "a request that arrives after another worker did the same"
    wanted: Callable[[str, str], bool] = {"commit": is_commit, "manifest": is_manifest}[what]
    place.proxy.hold = wanted
    job = place.job("zombie", place.proxy.endpoint)
    zombie = case.start(str(job), place.url, "--salt", str(salt), module=JOB)
    assert place.proxy.holding.wait(120), "no such request came"
    os.kill(zombie.pid, signal.SIGSTOP)
    all_succeed(case, [case.job(place.job("heir"), place.url)])
    place.proxy.release.set()
    os.kill(zombie.pid, signal.SIGCONT)
    case.injected = 1
    all_succeed(case, [case.finish(zombie)])
    place.settle()
