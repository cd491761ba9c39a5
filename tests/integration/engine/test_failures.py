"""The engine process dies, hangs, raises or returns wrong states: nothing is lost, nothing wrong is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from extract_core import local
from extract_core.engine.process import EngineProcess
from extract_core.engine.protocol import EngineSpec, ShardJob, laid_out
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.errors import (
    CaptureError,
    EngineCrashedError,
    EngineHungError,
    EngineStartError,
    IncompleteError,
)
from extract_core.settings import load_job
from extract_core.store.root import Root
from extract_core.store.verify import verify
from tests import tiny

from . import saboteur

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

WORKER = {"worker_cls": "tests.integration.engine.saboteur.Saboteur"}


def spec(model: Path, **changes) -> EngineSpec:
    base = {
        "model": str(model),
        "layer_ids": [1, 2, 4],
        "max_model_len": 200,
        "dtype": "float32",
        "store_dtype": "float32",
        "max_num_batched_tokens": 256,
        "kv_cache_bytes": 2**28,
        "extra": WORKER,
    }
    return EngineSpec(**{**base, **changes})


@pytest.fixture(scope="module")
def supervisor(tiny_model, tmp_path_factory) -> Iterator[EngineSupervisor]:
    logs = tmp_path_factory.mktemp("logs")
    with EngineSupervisor(spec(tiny_model), logs, start_timeout_s=200, step_timeout_s=10) as supervisor:
        yield supervisor


@pytest.fixture
def engine(supervisor) -> EngineSupervisor:
    """With a running engine: that of the test before, or, where that test brought it down, another."""
    supervisor.ready()
    supervisor.kills.clear()
    return supervisor


def job(folder: Path, *prompts: list[int], solo: list[str] | None = None) -> ShardJob:
    samples, rows = laid_out(prompts, "s")
    attempt = uuid.uuid4().hex
    return ShardJob(attempt, str(folder / f"{attempt}.tmp"), rows, samples, solo or [])


def group_of(pid: int) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if _group(p.pid) == pid and not _ended(p)]


def _ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not group_of(pid):
            return True
        time.sleep(0.1)
    return False


FINE = [[n, *range(20, 60)] for n in range(8)]


def test_samples_the_engine_cannot_take_are_refused_by_name(engine, tmp_path):
    done = engine.extract(job(tmp_path, *FINE, [1] * 200, [5, 512], [7, -1]), lambda progress: None)
    assert {name: why.split(":")[0] for name, why in done.refused.items()} == {
        "s8": "too_long",
        "s9": "token_id_out_of_range",
        "s10": "token_id_out_of_range",
    }
    assert len(done.greedy) == len(FINE)


def test_missing_rows_are_never_kept(engine, tmp_path):
    with pytest.raises(CaptureError, match="missing rows"):
        engine.extract(job(tmp_path, *FINE, [saboteur.SHORT, 1, 2, 3]), lambda progress: None)


def test_a_killed_engine_is_replaced(engine, tmp_path):
    engine.extract(job(tmp_path, *FINE), lambda progress: None)
    pid, starts = engine.ready().pid, engine.starts
    with pytest.raises(EngineCrashedError, match="SIGKILL") as caught:
        engine.extract(job(tmp_path, *FINE, [saboteur.DIE, 1, 2]), lambda progress: None)
    assert gone(pid, 5)
    assert "s8" in engine.suspects()
    assert str(caught.value.log_tail)
    done = engine.extract(job(tmp_path, *FINE), lambda progress: None)
    assert done.greedy == done.top1
    assert engine.starts == starts + 1


def test_sigkill_from_outside_in_mid_shard(engine, tmp_path):
    many = [[n % 250, *range(10, 180)] for n in range(60)]
    pid = engine.ready().pid
    victims = [
        p.pid for p in group_of(pid) if "engine.main" in " ".join(p.cmdline()) and "guard" not in " ".join(p.cmdline())
    ]
    threading.Timer(0.4, lambda: [os.kill(victim, signal.SIGKILL) for victim in victims]).start()
    with pytest.raises(EngineCrashedError):
        while True:
            engine.extract(job(tmp_path, *many), lambda progress: None)
    assert gone(pid, 5)


def test_a_hung_engine_is_killed_and_named(engine, tmp_path):
    pid = engine.ready().pid
    with pytest.raises(EngineHungError, match="no sign of life from the engine for 10 s") as caught:
        engine.extract(job(tmp_path, [saboteur.HANG, 1, 2]), lambda progress: None)
    assert gone(pid, 5)
    assert "saboteur.py" in caught.value.engine_traceback and "execute_model" in caught.value.engine_traceback


def test_an_empty_assertion_shows_its_line_and_traceback(engine, tmp_path):
    """The seed's failure: an AssertionError without a message, from deep inside the engine."""
    with pytest.raises(EngineCrashedError) as caught:
        engine.extract(job(tmp_path, [saboteur.RAISE, *range(40)]), lambda progress: None)
    assert "AssertionError at saboteur.py" in str(caught.value)
    assert "assert len(block_hashes)" in str(caught.value)
    assert "Traceback" in caught.value.engine_traceback
    assert "execute_model" in caught.value.engine_traceback
    report = caught.value.report
    assert report.in_flight == ("s0",)
    assert set(report.versions) == {"vllm", "torch", "transformers"}
    assert report.settings["max_num_batched_tokens"] == 256 and report.settings["enforce_eager"] is True
    assert report.settings["extra"] == WORKER


def test_an_engine_that_cannot_start_says_why(tiny_model, tmp_path):
    with (
        EngineSupervisor(
            spec(tiny_model, max_model_len=10**6), tmp_path / "logs", start_timeout_s=200, step_timeout_s=10
        ) as e,
        pytest.raises(EngineStartError, match="max_model_len") as caught,
    ):
        e.ready()
    assert "Traceback" in caught.value.engine_traceback
    assert "engine log: " in str(caught.value)


def test_the_engine_dies_with_its_host(tiny_model, tmp_path):
    host = subprocess.Popen(
        [sys.executable, "-c", _HOST, json.dumps({"model": str(tiny_model), "log": str(tmp_path / "log")})],
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(host.stdout.readline())
    assert group_of(pid)
    host.send_signal(signal.SIGKILL)
    host.wait()
    assert gone(pid, 10), "engine processes outlive a SIGKILLed host"


_HOST = """
import json, sys, time
from pathlib import Path
from tests.integration.engine.test_failures import spec
from extract_core.engine.process import EngineProcess
options = json.loads(sys.argv[1])
engine = EngineProcess(spec(Path(options["model"])), Path(options["log"]))
engine.start()
print(engine.pid, flush=True)
time.sleep(3600)
"""


def test_close_leaves_no_process(tiny_model, tmp_path):
    engine = EngineProcess(spec(tiny_model), tmp_path / "log")
    engine.start()
    pid = engine.pid
    engine.close()
    assert gone(pid, 5)


def _tokenized(path: Path, prompts: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in prompts))
    return path


@pytest.fixture
def planted(tiny_model, tmp_path) -> Callable[..., Path]:
    """A job whose samples contain the given first tokens among good ones."""

    def make(*tokens: int, **sections) -> Path:
        good = [[n, *range(20, 90)] for n in range(10)]
        bad = [[token, n, *range(30, 80)] for n, token in enumerate(tokens)]
        rows = [*bad[1:], *good, *bad[:1]]
        chats = _tokenized(tmp_path / "rows.jsonl", rows)
        engine = {"kv_cache_bytes": "256MiB", "max_num_batched_tokens": 256, "step_timeout_s": 10, "extra": WORKER}
        return tiny.write_job(
            tmp_path / "job.yaml", model=tiny_model, chats=chats, root=tmp_path / "root", engine=engine, **sections
        )

    return make


def test_a_sample_that_kills_the_engine_twice_is_quarantined(planted, tmp_path):
    job = planted(saboteur.DIE)
    with pytest.raises(IncompleteError, match=r"1 of 11 input rows .* kills_engine 1"):
        local.run(load_job(job, {"completeness": 1.0}))
    assert not (tmp_path / "root" / "versions").exists()
    [note] = (tmp_path / "root" / "plans").glob("*/quarantine/*.json")
    assert "died 2 times" in note.read_text()
    result = local.run(load_job(job, {"completeness": 0.5}))  # tries it once more, by itself
    assert result.manifest.accounting.quarantined == {"kills_engine": 1}
    assert result.manifest.accounting.published == 10
    assert verify(Root.open(str(tmp_path / "root"))).problems == []
    assert "died again" in note.read_text()


def test_killers_in_two_shards_are_each_left_out_of_their_own(planted, tmp_path):
    job = planted(saboteur.DIE, saboteur.DIE, completeness=0.5, store={"shard_bytes": "200KiB"})
    result = local.run(load_job(job))
    assert len(result.manifest.shards) > 2
    assert result.manifest.accounting.quarantined == {"kills_engine": 2}
    assert result.manifest.accounting.published == 10
    assert verify(Root.open(str(tmp_path / "root"))).problems == []


def test_a_state_that_overflows_is_quarantined(planted, tmp_path):
    result = local.run(load_job(planted(saboteur.NAN, completeness=0.5)))
    assert result.manifest.accounting.quarantined == {"not_finite": 1}
    assert result.manifest.accounting.published == 10
    assert verify(Root.open(str(tmp_path / "root"))).problems == []


@pytest.mark.parametrize(("token", "reason"), [(saboteur.ZERO, "zero_row"), (saboteur.COPY, "identical_rows")])
def test_states_that_no_sample_can_have_stop_the_run(planted, tmp_path, token, reason):
    with pytest.raises(CaptureError, match=reason):
        local.run(load_job(planted(token, completeness=0.0)))
    assert not (tmp_path / "root" / "versions").exists()
    assert not list((tmp_path / "root" / ".spool").glob("*/*.tmp"))


def test_rows_of_another_request_are_caught_by_the_token_echo(planted):
    settings = load_job(planted(saboteur.SWAP, completeness=1.0))
    with pytest.raises(CaptureError, match=r"token_echo|missing rows|batch order"):
        local.run(settings)
