"""The engine is killed or stopped at every moment of a run: no committed shard is lost, no process and no file is left.

Random delays come from a seed that is printed; give it as ``KILL_SEED`` to repeat a run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extract_core.engine import activity
from extract_core.reader import HiddenStatesDataset
from tests import tiny

from . import saboteur
from .test_failures import WORKER, gone, spec

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

SEED = int(os.environ.get("KILL_SEED", time.time_ns() % 10**6))
CHATS = 48
ENGINE = {"kv_cache_bytes": "256MiB", "max_num_batched_tokens": 256, "max_num_seqs": 8}
PATIENCE = {"start_timeout_s": 8, "step_timeout_s": 6}


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    return tiny.write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", CHATS)


@dataclass
class Run:
    """A run of the command line under the assassin's eyes."""

    folder: Path
    process: subprocess.Popen[bytes]
    committed: dict[str, bytes] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def blows(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "blow"]

    def finish(self) -> int:
        """Wait for the end; a commit record, once seen, must never be seen to change."""
        while (code := self.process.poll()) is None:
            self._look()
            time.sleep(0.05)
        self._look()
        return code

    def _look(self) -> None:
        for path in self.root.glob("plans/*/commits/*.json"):
            data = path.read_bytes()
            assert self.committed.setdefault(path.name, data) == data, f"commit record {path.name} changed"

    def output(self) -> str:
        return (self.folder / "output").read_text()


@pytest.fixture(scope="module")
def run(tiny_model: Path, chats: Path, tmp_path_factory) -> Iterator[Callable[..., Run]]:
    """Start a job of several shards, dealing the given blows to its engine."""
    started: list[Run] = []

    def start(blows: list[dict[str, Any]], *, after: Run | None = None, **sections: Any) -> Run:
        folder = after.folder if after is not None else tmp_path_factory.mktemp("run")
        (folder / "blows.json").write_text(json.dumps(blows))
        job = tiny.write_job(
            folder / "job.yaml",
            **{
                "model": tiny_model,
                "chats": chats,
                "root": folder / "root",
                "engine": {**ENGINE, **PATIENCE},
                "store": {"shard_bytes": "2MiB"},
                **sections,
            },
        )
        (folder / "events.jsonl").unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "tests.integration.engine.assassin"),
            *(folder / "blows.json", folder / "events.jsonl", "run", job, "--no-prefect"),
        ]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        started.append(Run(folder, process))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.fixture(scope="module")
def refused(run) -> tuple[Run, str, list[str]]:
    """A run whose starts are all killed: itself, what it printed and the logs that it left."""
    result = run([{"moment": "importing", "signal": "SIGKILL", "victim": "engine", "delay": 0.0}] * 3)
    assert result.finish() == 1, result.output()
    assert not list(result.root.rglob("*.tmp"))
    logs = sorted(path.name for path in result.root.glob(".spool/*/logs/*.log"))
    return result, result.output(), logs


@pytest.fixture(scope="module")
def undisturbed(run, refused) -> Run:
    """The same command again, to which nothing happens."""
    result = run([], after=refused[0])
    assert result.finish() == 0, result.output()
    return result


MOMENTS = ["importing", "loading", "preflight", "shard", "between", "closing"]
SIGNALS = ["SIGKILL", "SIGSTOP"]


@pytest.mark.parametrize("first", SIGNALS if os.environ.get("FAULTS") == "full" else SIGNALS[:1])
def test_the_engine_is_struck_at_every_moment_of_a_run(first: str, run, undisturbed: Run) -> None:
    """With one signal and the other in turn (and the other way round with ``FAULTS=full``).

    The engine is replaced each time and the one run completes.
    """
    print(f"KILL_SEED={SEED}")
    rng = random.Random(f"{SEED} {first}")
    took = {event["event"]: event for event in undisturbed.events}
    latest = {
        "importing": took["loading"]["cpu_s"],
        "loading": 0.95 * took["ready"]["cpu_s"],
        "preflight": 0.1,
        "shard": 0.1,
    }
    blows = [
        {
            "moment": moment,
            "signal": SIGNALS[(number + SIGNALS.index(first)) % 2],
            "victim": rng.choice(["engine", "group"]),
            "delay": rng.uniform(0, latest.get(moment, 0.0)),
        }
        for number, moment in enumerate(MOMENTS)
    ]
    struck = run(blows)
    assert struck.finish() == 0, struck.output()
    print("\n".join(json.dumps(blow) for blow in struck.blows))
    assert [blow["moment"] for blow in struck.blows] == MOMENTS, "some blows were never dealt"
    assert_whole(struck, undisturbed)


def assert_whole(struck: Run, undisturbed: Run) -> None:
    """Every shard is there once, with the rows of an undisturbed run, and nothing else is."""
    shards = json.loads(next(struck.root.glob("plans/*/plan.json")).read_text())["shards"]
    assert len(struck.committed) == len(shards) >= 4
    for event in struck.events:
        if group := event.get("group"):
            assert gone(group, 5), f"processes outlive the run: {activity.members(group)}"
    spooled = [path for path in struck.root.rglob("*") if path.is_file() and path.suffix in (".tmp", ".part")]
    assert not spooled, f"partial files are left: {spooled}"
    objects = {json.loads(data)["object"] for data in struck.committed.values()}
    assert {f"shards/{path.name}" for path in (struck.root / "shards").iterdir()} == objects
    assert not list(struck.root.glob("plans/*/quarantine/*"))
    same = {path.name for path in (undisturbed.root / "shards").iterdir()} & {Path(name).name for name in objects}
    print(f"{len(same)} of {len(objects)} shards have the same bits as undisturbed")
    ours, theirs = HiddenStatesDataset(struck.root), HiddenStatesDataset(undisturbed.root)
    assert len(ours) == len(theirs) == CHATS
    for n in range(CHATS):
        a, b = ours[n], theirs[n]
        assert a["sample_id"] == b["sample_id"] and (a["input_ids"] == b["input_ids"]).all()
        # Samples that run alone after a death are batched otherwise: float32 sums in another order.
        np.testing.assert_allclose(a["hidden_states"], b["hidden_states"], rtol=1e-3, atol=1e-4)


def test_starts_that_are_killed_three_times_end_the_run_and_the_next_one_completes(refused, undisturbed: Run) -> None:
    _, output, logs = refused
    assert (
        "killed or stopped 3 times in a row while it started; last: the engine process was ended by SIGKILL" in output
    )
    assert "Traceback" not in output
    assert "versions    vllm " in output and "settings    model=" in output
    assert logs == ["engine-001.log", "engine-002.log", "engine-003.log"], "every engine keeps a log of its own"
    assert len(undisturbed.committed) >= 4


# -- samples that bring the engine down, each in its own way ---------------------------------------------------------

WAYS = {
    saboteur.EXIT: "was ended by SIGKILL",  # 137 is how a shell or a container says it
    saboteur.HOARD: "MemoryError",
    saboteur.CRASH: "was ended by SIGSEGV",
    saboteur.STOP: "is stopped (SIGSTOP) and did not go on",
}
"""Beside SIGKILL, as the kernel's out-of-memory killer sends it, which test_failures.py has."""


def test_samples_that_bring_the_engine_down_are_quarantined_and_the_rest_completes(run, tmp_path: Path) -> None:
    good = [[n, *range(20, 90)] for n in range(16)]
    bad = [[token, n, *range(30, 80)] for n, token in enumerate(WAYS)]
    rows = [*good, *bad]
    chats = tmp_path / "rows.jsonl"
    chats.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
    struck = run([], chats=chats, engine={**ENGINE, **PATIENCE, "extra": WORKER}, completeness=0.5)
    assert struck.finish() == 0, struck.output()
    assert len(HiddenStatesDataset(struck.root)) == len(good), struck.output()
    notes = [path.read_text() for path in struck.root.glob("plans/*/quarantine/*.json")]
    assert len(notes) == len(WAYS), struck.output()
    for text in WAYS.values():
        assert sum(text in note for note in notes) == 1, (text, notes)


# -- a tensor-parallel group -----------------------------------------------------------------------------------------

_HOST = """
import json, sys, time
from pathlib import Path
from tests.integration.engine.test_failures import spec
from extract_core.engine.compat import engine_environment
from extract_core.engine.process import EngineProcess
options = json.loads(sys.argv[1])
engine = EngineProcess(
    spec(Path(options["model"]), tensor_parallel_size=2), Path(options["log"]),
    environment=engine_environment(cpu=True, eager=True),
)
engine.start(lambda stage: print(engine.pid, flush=True))
time.sleep(3600)
"""


@pytest.mark.parametrize("victim", ["guard", "host, the others being stopped"])
def test_a_whole_tensor_parallel_group_dies(victim: str, tiny_model: Path, tmp_path: Path) -> None:
    """By the kernel alone: whoever else could kill the group is stopped or dead."""
    options = json.dumps({"model": str(tiny_model), "log": str(tmp_path / "log")})
    host = subprocess.Popen([sys.executable, "-c", _HOST, options], stdout=subprocess.PIPE, text=True)
    group = int(host.stdout.readline())
    try:
        engine = _workers(group, tmp_path / "log")
        if victim == "guard":
            host.send_signal(signal.SIGSTOP)
            os.kill(group, signal.SIGKILL)
        else:
            for pid in engine:
                os.kill(pid, signal.SIGSTOP)
            host.send_signal(signal.SIGKILL)
        assert gone(group, 10), activity.members(group)
    finally:
        host.kill()
        host.wait()


def _workers(group: int, log: Path) -> list[int]:
    """Guard, engine and the two workers, once both load vLLM; without the helper that Python starts beside them."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = {pid: sample.cpu_s for pid, sample in activity.members(group).items() if not _is_helper(pid)}
        if len(found) == 4 and sorted(found.values())[1] > 1.0:  # the guard has used next to nothing
            return list(found)
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def _is_helper(pid: int) -> bool:
    return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_worker_of_a_group_that_cannot_load_says_why(tiny_model: Path, tmp_path: Path, monkeypatch) -> None:
    """The process that the host speaks to only learns "See stack trace for root cause"."""
    from extract_core.engine.supervisor import EngineSupervisor
    from extract_core.errors import EngineStartError

    monkeypatch.setenv(saboteur.REFUSE_TO_LOAD, "1")
    with (
        EngineSupervisor(
            spec(tiny_model, tensor_parallel_size=2), tmp_path / "logs", start_timeout_s=60, step_timeout_s=10
        ) as engine,
        pytest.raises(EngineStartError, match=r"^AssertionError at saboteur.py:\d+ `assert not os.environ") as caught,
    ):
        engine.ready()
    assert "in load_model" in caught.value.engine_traceback
    assert "See stack trace for root cause" in caught.value.engine_traceback
    assert caught.value.report.settings["tensor_parallel_size"] == 2
