"""Processes of a real run, with a real engine, killed and stopped at random moments; then the job is run to its end.

Victims: ``engine`` (the process that computes), ``guard`` (leader of its group), ``worker`` (the process of a Prefect
flow, which captures and commits), ``parent`` (``coresample run`` in a plain loop). Moments: a random share of the time
that an undisturbed run takes, or right when a certain object is being written.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from extract_core.store import layout
from extract_core.store.root import Root
from tests import tiny
from tests.faults import kit
from tests.faults.proxy import FaultProxy, is_commit, is_manifest, is_part

FAMILY = "kills"
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CHATS = 48 if kit.full() else 30
STEP_TIMEOUT_S = 5
WRITES = {"commit": is_commit, "manifest": is_manifest, "shard": is_part}


@dataclass(frozen=True)
class Moment:
    """Which process dies when, on what kind of root."""

    victim: str
    root: str
    when: float | str
    signal: str = "SIGKILL"

    def __str__(self) -> str:
        when = self.when if isinstance(self.when, str) else f"{self.when:.3f}"
        return f"{self.signal[3:].lower()}-{self.victim}-{self.root}-{when}"


def moments() -> list[Moment]:
    """Seeded: the same moments each time."""
    if not kit.full():  # the engine's deaths are those of test_kill.py, a flow's that of tests/e2e/test_resume.py
        return [Moment("parent", "s3", "commit")]
    stop = [Moment("engine", "local", 0.85, "SIGSTOP"), Moment("engine", "local", 0.3, "SIGSTOP")]
    chance = random.Random(4)
    victims = ["engine", "parent", "worker", "engine", "parent", "guard"]
    found = []
    for n in range(28):
        # Two of three moments lie in the second half, where rows are extracted and stored.
        share = chance.uniform(0.05, 1.0) if n % 3 == 0 else chance.uniform(0.5, 1.0)
        found.append(Moment(victims[n % len(victims)], ("local", "s3")[n // len(victims) % 2], round(share, 3)))
    targeted = [(what, root) for what in WRITES for root in ("s3", "local")]
    found += [Moment(victim, root, what) for victim in ("parent", "worker") for what, root in targeted]
    return [*found, *stop, Moment("engine", "s3", 0.7, "SIGSTOP"), Moment("guard", "local", 0.8, "SIGSTOP")]


class Place:
    """A job with an engine, on a root of either kind."""

    def __init__(self, case: kit.Case, kind: str, model: Path, server) -> None:
        self.case, self.kind, self.rows = case, kind, CHATS
        self.proxy: FaultProxy | None = None
        self.options, self.spool = {}, case.folder / "spool"
        store = {"shard_bytes": "1MiB", "spool": str(self.spool)}
        self.url = str(case.folder / "root")
        if kind == "s3":
            moto = server("moto")
            self.proxy = FaultProxy(moto.endpoint).start()
            self.url, self.options = moto.url(), moto.options()
            store["storage_options"] = moto.options(self.proxy.endpoint)
        self.job = tiny.write_job(
            case.folder / "job.yaml",
            model=model,
            chats=tiny.write_chats(case.folder / "chats.jsonl", CHATS, seed=1),
            root=Path(self.url),
            engine={
                "kv_cache_bytes": "256MiB",
                "max_num_batched_tokens": 128,
                "max_num_seqs": 4,
                "step_timeout_s": STEP_TIMEOUT_S,
                "start_timeout_s": 20,
            },
            preflight={"reference": "never"},
            store=store,
        )
        self.words = ("run", str(self.job), "--root", self.url, "--quiet")

    def start(self, *, prefect: bool):
        return self.case.start(*self.words, *([] if prefect else ["--no-prefect"]))

    def commits(self) -> dict[str, bytes]:
        """Commit records by path."""
        root = Root.open(self.url, self.options)
        folders = [f"{layout.PLANS}/{plan}/commits" for plan in root.list(layout.PLANS)]
        return {f"{path}/{name}": root.read_bytes(f"{path}/{name}") for path in folders for name in root.list(path)}

    def settle(self) -> None:
        self.case.settled(self.url, self.options, rows=self.rows, spools=(self.spool,))


@pytest.fixture(scope="session")
def usual() -> dict[tuple[str, bool], float]:
    """Seconds of an undisturbed run by kind of root and with or without Prefect; filled when first needed."""
    return {}


def _victim(process: psutil.Popen, name: str) -> psutil.Process | None:
    if name in ("parent", "worker"):
        return psutil.Process(process.pid)
    for child in psutil.Process(process.pid).children(recursive=True):
        line = " ".join(child.cmdline())
        if "extract_core.engine.main" in line and ("guard.py" in line) == (name == "guard"):
            return child
    return None


def _strike(process, moment: Moment) -> bool:
    """Send the signal; whether somebody was there to get it."""
    try:
        victim = _victim(process, moment.victim)
        if victim is None:
            return False
        victim.send_signal(getattr(signal, moment.signal))
    except psutil.NoSuchProcess:
        return False
    return True


def _wait_for_write(place: Place, process, what: str, strike: Callable[[], None]) -> None:
    """Strike when the object is being written: its request is under way, or its temporary file is there."""
    if place.proxy is not None:
        left = [2 if what == "commit" else 1]

        def trap(method: str, target: str) -> None:
            left[0] -= WRITES[what](method, target)
            if left[0] == 0:
                left[0] -= 1
                strike()

        place.proxy.on_request = trap
        return
    root = Path(place.url)
    pattern = {"commit": "plans/*/commits/.tmp-*", "manifest": "versions/.tmp-*", "shard": "shards/*"}[what]
    while process.poll() is None:
        if any(root.glob(pattern)):
            strike()
            return
        time.sleep(0.0005)


@pytest.mark.parametrize("moment", moments(), ids=str)
def test_killed_and_run_again(case, model, server, usual, moment: Moment) -> None:
    kills = moment.signal == "SIGKILL"
    case.family = f"kills, {moment.victim}" if kills else "stopped engine"
    case.what = "SIGKILL, then the same command again" if kills else "SIGSTOP for longer than the step timeout"
    place = Place(case, moment.root, model, server)
    prefect = moment.victim == "worker"
    if isinstance(moment.when, float) and (moment.root, prefect) not in usual:
        usual[moment.root, prefect] = _undisturbed(case, place, prefect)
    process = place.start(prefect=prefect)
    hits: list[bool] = []

    def strike() -> None:
        hits.append(_strike(process, moment))

    if isinstance(moment.when, str):
        _wait_for_write(place, process, moment.when, strike)
    else:
        deadline = time.monotonic() + moment.when * usual[moment.root, prefect]
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        while process.poll() is None and not hits:  # the engine may not be there yet
            if _strike(process, moment):
                hits.append(True)
            time.sleep(0.01)
    outcome = case.finish(process)
    case.injected = sum(hits)
    case.notes = "" if case.injected else "some runs ended before their moment"
    if place.proxy is not None:
        place.proxy.quiet()
    if outcome.killed:
        case.no_orphans()
    else:
        case.clear(outcome)
    before = place.commits()
    again = case.clear(place_run(place, prefect))
    assert again.code == 0, again.text[-4000:]
    assert before.items() <= place.commits().items(), "a committed shard was done again"
    place.settle()
    if place.proxy is not None:
        place.proxy.stop()


def place_run(place: Place, prefect: bool) -> kit.Outcome:
    """The same command once more, to its end."""
    return place.case.finish(place.start(prefect=prefect))


def _undisturbed(case: kit.Case, place: Place, prefect: bool) -> float:
    """Seconds of a whole run into a root beside the case's own."""
    root = place.url + "-undisturbed"
    started = time.monotonic()
    outcome = case.run(
        "run", str(place.job), "--root", root, "--quiet", *([] if prefect else ["--no-prefect"]), timeout_s=400
    )
    assert outcome.code == 0, outcome.text[-4000:]
    return time.monotonic() - started
