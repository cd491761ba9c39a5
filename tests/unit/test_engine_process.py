"""The engine's process group without an engine: who dies with whom, who is busy or stopped, and what a log tells."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from extract_core.engine import activity, guard, logs, process
from extract_core.engine.process import EngineProcess
from extract_core.engine.protocol import EngineSpec, Failed
from extract_core.engine.supervisor import START_TRIES, EngineSupervisor
from extract_core.errors import (
    CaptureError,
    EngineCrashedError,
    EngineHungError,
    EngineKilledError,
    EngineStartError,
    NoSpaceError,
)

SPEC = EngineSpec("/model", [1, 2], 100, "float32", "float32", extra={"hf_token": "abc", "seed": 1})


# -- who dies with whom ----------------------------------------------------------------------------------------------

CHILD = f"""
import os, sys, time
sys.path.insert(0, {str(Path(guard.__file__).parents[2])!r})
from extract_core.engine.guard import die_with_parent
die_with_parent()
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def host() -> Iterator[subprocess.Popen[str]]:
    """A host with a guard and its child, whose id it prints after the guard's."""
    code = (
        "import sys, time, os, subprocess; from extract_core.engine import guard, process\n"
        f"env = {{**os.environ, guard.PARENT: str(os.getpid())}}\n"
        f"p = process._launch([sys.executable, guard.__file__, sys.executable, '-c', {CHILD!r}], env=env,"
        "stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    yield started
    started.kill()
    started.wait()


@pytest.mark.parametrize("victim", ["host", "guard", "host, the guard being stopped", "host, all being stopped"])
def test_whoever_is_killed_those_below_go_too(host: subprocess.Popen[str], victim: str) -> None:
    first, second = sorted(int(host.stdout.readline()) for _ in range(2))
    leader = first if os.getpgid(second) == first else second
    child = second if leader == first else first
    assert set(activity.members(leader)) == {leader, child}
    if victim.endswith("stopped"):
        os.kill(leader, signal.SIGSTOP)
    if victim.endswith("all being stopped"):
        os.kill(child, signal.SIGSTOP)
    os.kill(leader if victim == "guard" else host.pid, signal.SIGKILL)
    assert _within(5, lambda: not activity.members(leader))


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    other = subprocess.Popen(["true"])
    other.wait()
    child = subprocess.run([sys.executable, "-c", CHILD], env={**os.environ, guard.PARENT: str(other.pid)}, timeout=20)
    assert child.returncode == -signal.SIGKILL


def test_the_guard_outlives_the_thread_that_asked_for_it() -> None:
    """PR_SET_PDEATHSIG counts threads as parents, and a Prefect task runs in a thread that ends."""
    started: list[subprocess.Popen[bytes]] = []
    env = {**os.environ, guard.PARENT: str(os.getpid())}
    command = [sys.executable, "-c", CHILD]
    asking = threading.Thread(target=lambda: started.append(process._launch(command, env=env, stdout=subprocess.PIPE)))
    asking.start()
    asking.join()
    assert started[0].stdout.readline()
    time.sleep(0.3)
    assert started[0].poll() is None
    started[0].kill()
    started[0].wait()


# -- busy, idle, stopped ---------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Callable[[str], int]]:
    """Start Python code in a group of its own; returns its id once the code prints something."""
    running: list[subprocess.Popen[str]] = []

    def start(code: str) -> int:
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", f"print(flush=True)\n{code}"],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        running[-1].stdout.readline()
        return running[-1].pid

    yield start
    for child in running:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


READS = """
import time
with open('/dev/zero', 'rb') as file:
    while True:
        file.read(400_000)
        time.sleep(0.2)
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [("import time; time.sleep(60)", False), ("while True: pass", True), (READS, True)],
    ids=["sleeps", "computes", "reads"],
)
def test_busy(group: Callable[[str], int], code: str, expected: bool) -> None:
    pid = group(code)
    time.sleep(0.3)
    before, started = activity.members(pid), time.monotonic()
    time.sleep(1.0)
    assert activity.busy(before, activity.members(pid), time.monotonic() - started) is expected


def test_a_new_process_is_activity() -> None:
    sample = activity.Sample("S", 1.0, 0, 0)
    assert activity.busy({1: sample}, {1: sample, 2: sample}, 1.0)
    assert not activity.busy({1: sample, 2: sample}, {1: sample}, 1.0)
    assert activity.busy({1: sample}, {1: activity.Sample("D", 1.0, 0, 1)}, 1.0), "a page came from a disk"


def test_patience_with_a_loading_engine(group: Callable[[str], int]) -> None:
    """A busy group may take ten times the limit, an idle one only the limit; a stopped one is seen at once."""
    idle = activity.Patience(group("import time; time.sleep(60)"), 0.8, activity=True)
    assert _looks(idle, lambda: idle.idle) < 3 and not idle.endless
    spinning = activity.Patience(group("while True: pass"), 0.4, activity=True)
    assert 3.5 < _looks(spinning, lambda: spinning.idle or spinning.endless) < 8
    assert spinning.endless and not spinning.idle
    pid = group("while True: pass")
    stopped = activity.Patience(pid, 0.8, activity=True)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.1)
    stopped.look()
    assert stopped.stopped == [pid]
    assert _looks(stopped, lambda: stopped.idle) < 3


def test_while_a_shard_runs_only_messages_count(group: Callable[[str], int]) -> None:
    patience = activity.Patience(group("while True: pass"), 0.8, activity=False)
    assert _looks(patience, lambda: patience.idle) < 3
    patience.heard()
    assert not patience.idle and not patience.endless


def test_time_in_which_the_host_itself_was_stopped_does_not_count(group, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(activity.time, "monotonic", lambda: now[0])
    patience = activity.Patience(group("import time; time.sleep(60)"), 60, activity=True)
    now[0] += 3600
    patience.look()
    assert not patience.idle


def _looks(patience: activity.Patience, done: Callable[[], bool]) -> float:
    started = time.monotonic()
    while not done():
        time.sleep(patience.slice_s)
        patience.look()
    return time.monotonic() - started


def _within(seconds: float, true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return False


# -- an engine process that is no engine -----------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path, monkeypatch) -> Callable[..., EngineProcess]:
    """An engine process that runs the given code, in which ``host`` is the connection, instead of vLLM."""

    def make(code: str, **options: float) -> EngineProcess:
        script = tmp_path / "fake.py"
        script.write_text(
            "import os, signal, sys, time\n"
            "from multiprocessing.connection import Connection\n"
            "from extract_core.engine.protocol import *\n"
            "from extract_core.engine.main import prepare_process\nprepare_process()\n"
            "host = Connection(int(sys.argv[-1]))\nreceive_request(host)\n"
            "send(host, Starting('loading the model'))\n" + code
        )
        monkeypatch.setattr(process, "COMMAND", [sys.executable, str(script)])
        monkeypatch.setenv("PYTHONPATH", str(Path(guard.__file__).parents[2]))
        return EngineProcess(SPEC, tmp_path / "logs" / "engine-001.log", **options)

    return make


def test_an_idle_start_is_given_up_and_shows_where_it_hangs(fake) -> None:
    engine = fake("def waits_for_ever():\n    time.sleep(600)\nwaits_for_ever()", start_timeout_s=1)
    with pytest.raises(
        EngineStartError, match=r"no sign of life .* 1 s \(loading the model\): .* neither computed"
    ) as e:
        engine.start()
    assert not isinstance(e.value, EngineKilledError)
    assert "waits_for_ever" in e.value.engine_traceback
    assert engine.pid is None


def test_a_start_that_reads_for_longer_than_the_limit_is_healthy(fake) -> None:
    code = "end = time.time() + 4\nwhile time.time() < end: open('/dev/zero', 'rb').read(10**6); time.sleep(.1)\n"
    with fake(f"{code}send(host, Ready({{}}))\nreceive_request(host)", start_timeout_s=1) as engine:
        engine.start()


def test_a_start_that_spins_is_given_up_in_the_end(fake) -> None:
    with pytest.raises(
        EngineStartError, match=r"still busy \(loading the model\) after 4 s, 10 times engine.start_tim"
    ):
        fake("while True: pass", start_timeout_s=0.4).start()


def test_a_stopped_engine_is_named_told_and_killed(fake) -> None:
    told: list[str] = []
    engine = fake("os.kill(os.getpid(), signal.SIGSTOP)", start_timeout_s=2, on_note=told.append)
    with pytest.raises(
        EngineKilledError, match=r"engine process \d+ is stopped \(SIGSTOP\) and did not go on within 2"
    ):
        engine.start()
    assert len(told) == 1 and "waiting 2 s" in told[0]


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", EngineKilledError, "SIGKILL .*out of memory"),
        ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(9)", EngineKilledError, "guard process of the engine"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", EngineStartError, "ended by SIGSEGV"),
        ("os._exit(3)", EngineStartError, "ended with status 3 and no message"),
    ],
    ids=["SIGKILL", "the guard's", "SIGSEGV", "exit"],
)
def test_how_a_start_ended(fake, code, kind, text) -> None:
    with pytest.raises(EngineStartError, match=text) as caught:
        fake(code).start()
    assert type(caught.value) is kind


def test_every_failure_carries_its_circumstances(fake) -> None:
    code = (
        "send(host, Ready({'vllm': '9.9', 'max_num_seqs': 7}))\njob = receive_request(host)\n"
        "send(host, Progress('1', ['a', 'b'], [], 0, 0))\nsend(host, Progress('1', [], ['a'], 5, 1))\n"
        "print('Traceback (most recent call last):\\n  x\\nValueError: y', flush=True)\n"
        "send(host, Failed('CaptureError', 'rows are missing', 'Traceback of the engine'))"
    )
    from extract_core.engine.protocol import ShardJob

    engine = fake(code)
    engine.start()
    with pytest.raises(CaptureError, match="rows are missing") as caught:
        engine.extract(ShardJob("1", "/none", 10, []))
    report = caught.value.report
    assert caught.value.engine_traceback == "Traceback of the engine"
    assert "ValueError: y" in caught.value.log_tail
    assert report.versions["vllm"] == "9.9" and "torch" in report.versions
    assert report.in_flight == ("b",)
    assert report.stage == "running 0 samples, 10 tokens"
    assert report.settings["model"] == "/model" and report.settings["layer_ids"] == [1, 2]
    assert report.settings["max_num_seqs"] == 7
    assert report.settings["extra"] == {"hf_token": "***", "seed": 1}
    assert "abc" not in repr(report)
    assert report.log in str(caught.value) and Path(report.log).exists()


def test_failures_that_are_no_engine_errors_keep_their_kind(fake) -> None:
    engine = fake("send(host, Failed('NoSpaceError', 'disk full', ''))")
    with pytest.raises(NoSpaceError, match="disk full"):
        engine.start()
    for kind in ("AlreadyExistsError", "shortened", "NoSuchThing"):
        with pytest.raises(EngineStartError, match="odd"):
            fake(f"send(host, Failed({kind!r}, 'odd', ''))").start()


def test_what_a_worker_failed_with_is_dug_out_of_the_log(fake) -> None:
    logged = "\\n".join(WORKER_LOG.splitlines()).replace("'", "\\'")
    failed = Failed("", "RuntimeError: Worker failed with error '', please check the stack trace above", "Traceback o")
    engine = fake(f"print('{logged}', flush=True)\nsend(host, {failed!r})")
    with pytest.raises(EngineStartError, match=r"^AssertionError at saboteur.py:47 `assert not os` \(Worker_TP1") as e:
        engine.start()
    assert e.value.engine_traceback.startswith("Traceback (most recent call last):\n  File")
    assert e.value.engine_traceback.endswith("Traceback o\n")


# -- starts that something kills -------------------------------------------------------------------------------------


def _supervisor(tmp_path: Path, told: list[str]) -> EngineSupervisor:
    return EngineSupervisor(SPEC, tmp_path / "logs", start_timeout_s=20, step_timeout_s=20, on_stage=told.append)


def test_a_killed_start_is_tried_again(fake, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    fake(
        f"if not os.path.exists({str(mark)!r}):\n"
        f"    open({str(mark)!r}, 'w')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "send(host, Ready({}))\nreceive_request(host)"
    )
    told: list[str] = []
    with _supervisor(tmp_path, told) as supervisor:
        supervisor.ready()
        assert supervisor.starts == 2
    assert any("SIGKILL" in text and "starting another" in text for text in told)
    assert sorted(log.name for log in (tmp_path / "logs").iterdir()) == ["engine-001.log", "engine-002.log"]


def test_starts_that_are_killed_again_and_again_end_the_run(fake, tmp_path: Path) -> None:
    fake("os.kill(os.getpid(), signal.SIGKILL)")
    with (
        _supervisor(tmp_path, []) as supervisor,
        pytest.raises(
            EngineStartError, match="killed or stopped 3 times in a row while it started; last: .*SIGKILL"
        ) as e,
    ):
        supervisor.ready()
    assert supervisor.starts == START_TRIES and not e.value.retryable and e.value.report is not None
    assert (tmp_path / "logs" / "engine-003.log").exists()


def test_a_start_that_fails_by_itself_is_not_tried_again(fake, tmp_path: Path) -> None:
    fake("send(host, Failed('', 'ValueError: bad', 'Traceback'))")
    with _supervisor(tmp_path, []) as supervisor, pytest.raises(EngineStartError, match="ValueError: bad"):
        supervisor.ready()
    assert supervisor.starts == 1


def test_a_start_tells_where_its_time_went(fake, tmp_path: Path) -> None:
    times = {"import": 4.0, "weights": 2.5, "compile and profile": 6.0, "compiler": 5.25, "all": 13.0}
    fake(f"send(host, Ready({{}}, None, {times!r}))\nreceive_request(host)")
    told: list[str] = []
    with _supervisor(tmp_path, told) as supervisor:
        supervisor.ready()
    assert re.fullmatch(
        r"ready after \d+\.\d s: import 4\.0 s, weights 2\.5 s, compile and profile 6\.0 s, the rest 0\.0 s "
        r"\(in the compiler 5\.2 s\)",
        told[-1],
    )


# -- logs ------------------------------------------------------------------------------------------------------------

WORKER_LOG = """\
(Worker_TP1 pid=7) INFO 11-30 04:05:03 [cpu_worker.py:140] loading
(Worker_TP1 pid=7) ERROR 11-30 04:05:04 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker_TP1 pid=7) ERROR 11-30 04:05:04 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker_TP0 pid=6) INFO 11-30 04:05:04 [x.py:1] something of another
(Worker_TP1 pid=7) ERROR 11-30 04:05:04 [multiproc_executor.py:953]   File "/a/saboteur.py", line 47, in load_model
(Worker_TP1 pid=7) ERROR 11-30 04:05:04 [multiproc_executor.py:953]     assert not os
(Worker_TP1 pid=7) ERROR 11-30 04:05:04 [multiproc_executor.py:953] AssertionError
(MainProcess pid=5) INFO 11-30 04:05:04 [multiproc_executor.py:479] [shutdown] waiting
Traceback (most recent call last):
  File "/a/main.py", line 3, in main
RuntimeError: Worker failed with error '', please check the stack trace above for the root cause
"""


def test_the_cause_is_the_last_traceback_that_is_no_consequence() -> None:
    block = logs.root_block(WORKER_LOG)
    assert block.who == "Worker_TP1 pid=7"
    assert block.cause == "AssertionError at saboteur.py:47 `assert not os`"
    assert block.lines[0] == "Traceback (most recent call last):" and len(block.lines) == 4
    assert [b.who for b in logs.tracebacks(WORKER_LOG)] == ["Worker_TP1 pid=7", ""]
    assert logs.root_block(WORKER_LOG, known=f"x\n{block.text}\ny") is None
    assert logs.root_block("nothing here") is None


def test_a_chain_is_one_block_and_its_first_exception_the_cause() -> None:
    try:
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise RuntimeError("outer") from error
    except RuntimeError as error:
        import traceback

        text = "before\n" + "".join(traceback.format_exception(error)) + "after\n"
    [block] = logs.tracebacks(text)
    assert block.cause.startswith("ValueError: inner at test_engine_process.py:")
    assert block.lines[-1] == "RuntimeError: outer"
    assert logs.chained("a", "b").split("\n\n")[0] == "a" and logs.chained("a", "") == "a"


def test_the_tail_keeps_a_traceback_that_scrolled_away() -> None:
    noise = "\n".join(f"line {n}" for n in range(300))
    tail = logs.tail(f"{noise}\n{WORKER_LOG}{noise}")
    assert "assert not os" in tail and tail.endswith("line 299")
    assert len(tail.splitlines()) < 60
    assert logs.tail(noise).splitlines() == noise.splitlines()[-logs.TAIL_LINES :]
    long = "Traceback (most recent call last):\n" + "  frame\n" * 500 + "ValueError: x\n"
    shown = logs.tail(f"{long}{noise}")
    assert "ValueError: x" in shown and "lines)" in shown and len(shown.splitlines()) < 160


def test_stack_dumps_and_error_lines() -> None:
    code = "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)"
    crashed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    dump = logs.stack_dump(f"x\n{crashed.stderr}")
    assert dump.startswith("Fatal Python error: Segmentation fault") and "string_at" in dump
    assert logs.stack_dump("nothing") == ""
    assert logs.last_error(WORKER_LOG).startswith("AssertionError (Worker_TP1 pid=7)")
    assert logs.last_error("all well") == ""


def test_root_cause_is_never_empty() -> None:
    with pytest.raises(AssertionError) as caught:
        assert not psutil
    caught.value.args = ()
    assert "AssertionError at test_engine_process.py" in logs.root_cause(caught.value)
    assert "assert not psutil" in logs.root_cause(caught.value)
    assert logs.root_cause(EngineHungError("gone")) == "EngineHungError: gone"
    assert EngineCrashedError("x").report is None
