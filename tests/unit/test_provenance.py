"""What a version says of the code, environment and machine that made it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from extract_core import provenance
from extract_core.hardware import driver_version
from tests.unit.store.test_store_records import commit


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *settings, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_git_state(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "x")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert provenance.git_state(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "a").write_text("2")
    provenance.git_state.cache_clear()
    assert provenance.git_state(tmp_path) == {"commit": head, "dirty": True}
    (tmp_path / "none").mkdir()
    assert provenance.git_state(Path("/")) is None


def test_digests(tmp_path: Path) -> None:
    assert provenance.lock_digest(tmp_path) is None
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.lock").write_text("a==1\n")
    provenance.lock_digest.cache_clear()
    first = provenance.lock_digest(tmp_path)
    (tmp_path / "requirements" / "cpu.lock").write_text("a==2\n")
    provenance.lock_digest.cache_clear()
    assert first is not None and provenance.lock_digest(tmp_path) not in (None, first)
    assert len(provenance.environment_digest()) == 64


def test_driver_from_nvidia_smi(tmp_path: Path, monkeypatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 550.54.15\necho 550.54.15\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("extract_core.hardware.importlib.import_module", _no_module)
    assert driver_version() == "550.54.15"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert driver_version() is None


def _no_module(name: str) -> None:
    raise ImportError(name)


def test_nothing_personal_and_plain_json() -> None:
    found = provenance.provenance()
    assert set(found) == {
        "host",
        "os",
        "cpu",
        "gpus",
        "gpu_driver",
        "python",
        "packages",
        "environment_sha256",
        "git",
        "lock_sha256",
    }
    text = json.dumps(found)
    assert str(Path.home()) not in text and os.getcwd() not in text
    assert {"vllm", "torch", "transformers"} <= set(found["packages"])


def test_clock() -> None:
    clock = provenance.RunClock()
    for _ in range(2):
        with clock.stage("checks_s"):
            pass
    clock.engine_starts.append(12.34567)
    records = [commit(timings={"engine_s": 2.0, "stall_s": 0.5}), commit(timings={"engine_s": 1.0, "upload_s": 4.0})]
    document = clock.to_dict(records)
    assert set(document["stages"]) == {"checks_s"} and document["engine_starts"] == [{"seconds": 12.346}]
    assert document["shards"] == {"engine_s": 3.0, "stall_s": 0.5, "check_and_seal_s": 0.0, "upload_s": 4.0}
