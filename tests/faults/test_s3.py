"""Whole jobs into an S3 server behind a proxy that fails on purpose; rows come from a generator, not from an engine.

Each job either comes to its end by its own retries, or fails with a message that says why; then the store recovers and
the same job is run again. Whatever was published on the way verifies on the server itself.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from extract_core.store.root import Root
from extract_core.store.versions import read_manifest
from tests import tiny
from tests.faults import kit, storejob
from tests.faults.proxy import KINDS, FaultProxy, is_commit, is_manifest, is_part

FAMILY = "S3"
pytestmark = [pytest.mark.timeout(900)]

SERVERS = ("moto", "radosgw")
RATES = (1, 5, 20)
SHAPES = {"small shards": ("256KiB", 16 if kit.full() else 8), "parts": ("20MiB", 44), "slow": ("4MiB", 200)}
"""Size of a shard and number of chats; the second kind is uploaded in parts."""
MOST_GROWTH = 96 * 2**20
"""Bytes by which a process may grow while it sends: buffers of the parts under way, whatever the size of the job."""
WHAT = {
    "500": "500 InternalError",
    "503": "503 SlowDown",
    "404": "404 for an object just written",
    "skew": "403 RequestTimeTooSkewed",
    "expired": "400 ExpiredToken",
    "500 after": "500 after the request took effect",
    "hang": "no answer until the client gives up",
    "reset": "connection reset in mid-body",
    "reset after": "the request took effect, its answer is lost",
    "truncated": "response body cut short",
    "flip response": "one bit of a response flipped",
    "flip request": "one bit of a request body flipped",
    "all": "all kinds together, each at the given share",
}


class Place:
    """A server, the proxy in front of it, and a job that goes through it."""

    def __init__(self, case, server, model: Path, shape: str, seed: int):
        shard_bytes, self.rows = SHAPES[shape]
        self.case, self.server, self.url = case, server, server.url()
        self.proxy = FaultProxy(server.endpoint, seed).start()
        self.spool = case.folder / "spool"
        self.job = tiny.write_job(
            case.folder / "job.yaml",
            model=model,
            chats=tiny.write_chats(case.folder / "chats.jsonl", self.rows, seed=seed),
            root=Path("unused"),
            layers="all",
            store={
                "shard_bytes": shard_bytes,
                "spool": str(self.spool),
                "storage_options": server.options(self.proxy.endpoint),
            },
        )

    def attempt(self) -> bool:
        """One run; whether it published."""
        manifest, message = storejob.attempt(self.job, self.url)
        if manifest is None:
            self.case.refused += 1
            self.case.detail.setdefault("messages", []).append(message[:500])
            return False
        self.case.completed += 1
        return True

    def settle(self) -> None:
        """Without faults the job comes to its end; then the invariants."""
        counts = dict(self.proxy.counts)
        self.case.injected = max(self.case.injected, self.proxy.injected)
        self.case.detail |= {"faults": counts, "requests": self.proxy.requests}
        self.proxy.quiet()
        assert self.attempt(), f"without faults: {self.case.detail['messages'][-1]}"
        self.proxy.stop()
        self.case.settled(self.url, self.server.options(), rows=self.rows, spools=(self.spool,))


@pytest.fixture
def place(case, server, model):
    made = []

    def make(name: str, shape: str = "small shards", seed: int = 0) -> Place:
        made.append(Place(case, server(name), model, shape, seed))
        return made[-1]

    yield make
    for item in made:
        item.proxy.stop()


def _shape(kind: str, rate: int) -> str:
    return list(SHAPES)[(list(WHAT).index(kind) + RATES.index(rate)) % 2]


def _chosen() -> list[tuple[str, str, int]]:
    """Everything; in the short form each kind once, on one server or the other."""
    if kit.full():
        return [(name, kind, rate) for name in SERVERS for kind in WHAT for rate in RATES]
    return [(SERVERS[n % 2], kind, 5 if kind == "hang" else 20) for n, kind in enumerate(WHAT)]


@pytest.mark.system
@pytest.mark.parametrize(("name", "kind", "rate"), _chosen())
def test_requests_fail(case, place, name: str, kind: str, rate: int) -> None:
    case.family, case.what = f"S3, {kind}", WHAT[kind]
    kinds = KINDS if kind == "all" else [kind]
    share = rate / 100 if kind != "all" else rate / 100 / len(kinds)
    here = place(name, _shape(kind, rate), seed=rate)
    here.proxy.hang_s = 4
    here.proxy.rates = dict.fromkeys(kinds, share)
    for _ in range(3):
        if here.attempt():
            break
    here.settle()


DECIDING = [
    (name, what, kind)
    for name in SERVERS
    for what in ("commit", "manifest", "part")
    for kind in ("500 after", "reset after", "reset", "flip request")
]
FEW = [("moto", "commit", "reset after"), ("moto", "manifest", "500 after"), ("moto", "part", "flip request")]


@pytest.mark.parametrize(("name", "what", "kind"), DECIDING if kit.full() else FEW)
def test_the_request_that_decides_fails(case, place, name: str, what: str, kind: str) -> None:
    case.family, case.what = "S3, at the deciding request", "the first PUT of a commit record, manifest or shard fails"
    wanted = {"commit": is_commit, "manifest": is_manifest, "part": is_part}[what]
    here = place(name, "parts")
    left = 1

    def trap(method: str, target: str) -> bool:
        nonlocal left
        hit = wanted(method, target) and left > 0
        left -= hit
        return hit

    here.proxy.choose = lambda method, target: kind if trap(method, target) else ""
    assert here.attempt(), case.detail
    assert here.proxy.injected == 1
    here.settle()


@pytest.mark.parametrize("seconds", [60] if kit.full() else [6])
@pytest.mark.parametrize("name", SERVERS if kit.full() else ["moto"])
def test_server_gone(case, place, name: str, seconds: float) -> None:
    case.family, case.what = "S3, server gone", f"every connection reset for {seconds} s"
    here = place(name)
    commits = 0

    def trap(method: str, target: str) -> None:
        nonlocal commits
        commits += is_commit(method, target)
        if commits == 3:
            commits += 1
            here.proxy.gone(seconds)

    here.proxy.on_request = trap
    while not here.attempt():
        assert here.proxy.counts["gone"] == 1
        threading.Event().wait(seconds / 4)
    here.settle()


@pytest.mark.parametrize("name", SERVERS if kit.full() else ["moto"])
def test_slow_server(case, place, name: str) -> None:
    """What waits to be sent stays within the spool's limit, and memory does not grow with it."""
    rate, shape, limit, shard = (1e6, "slow", 8 * 2**20, 4 * 2**20) if kit.full() else (4e6, "parts", 2**22, 2**21)
    case.family, case.what = "S3, slow", f"all traffic limited to {rate / 1e6:.0f} MB/s"
    here = place(name, shape)
    here.proxy.bytes_per_s = rate
    job = json.loads(here.job.read_text())
    job["store"] |= {"shard_bytes": shard, "spool_bytes": limit}
    job["store"]["storage_options"]["config_kwargs"] = {"connect_timeout": 30, "read_timeout": 120}
    here.job.write_text(json.dumps(job))
    words = (str(here.job), here.url, "--spool", str(here.spool))
    outcome = case.clear(case.finish(case.start(*words, module="tests.faults.storejob"), 600))
    assert outcome.code == 0, outcome.text
    figures = kit.last_json(outcome.text)
    grown = figures["rss_peak"] - figures["rss_before"]
    case.detail |= {"rss_grown": grown, **figures}
    case.injected = 1
    sent = read_manifest(Root.open(here.url, here.server.options())).totals.bytes
    case.notes = (
        f"{name}: {sent / 2**20:.0f} MiB at {rate / 1e6:.0f} MB/s in {figures['seconds']:.0f} s, memory "
        f"+{grown / 2**20:.0f} MiB, spool at most {figures['spool_peak'] / 2**20:.1f} of {limit / 2**20:.0f} MiB"
    )
    assert figures["spool_peak"] <= limit + shard, "the spool is larger than its limit and the shard being written"
    assert grown < MOST_GROWTH, f"{grown / 2**20:.0f} MiB more than before the first shard"
    here.settle()
