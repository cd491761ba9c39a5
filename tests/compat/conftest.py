"""Options, checkpoints and the pool that measures cells; how the results become a file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from extract_core.engine.compat import engine_environment
from extract_core.engine.versions import installed_engine
from tests.compat import cells
from tests.compat.families import FAMILIES, REFERENCE

ROOT = Path(__file__).resolve().parents[2]
MODES = ("native", "hooks", "auto")
SUITE = "tests/compat"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("compatibility")
    group.addoption("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    group.addoption("--modes", nargs="*", default=list(MODES), choices=MODES, metavar="MODE")
    group.addoption("--result", type=Path, help="write what was measured to this JSON file")
    group.addoption("--reference-python", default=sys.executable, help="computes the Hugging Face references")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        families, modes = metafunc.config.getoption("families"), metafunc.config.getoption("modes")
        metafunc.parametrize(("family", "mode"), [(family, mode) for family in families for mode in modes])


@pytest.fixture(scope="session")
def models(pytestconfig: pytest.Config) -> Path:
    """Folder of the checkpoints, one per installed transformers, since each writes configurations its own way."""
    sources = [Path(__file__).parent / "families.py", ROOT / "extract_core" / "engine" / "reference.py"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]
    folder = ROOT / ".cache" / "compat" / "models" / f"{metadata.version('transformers')}-{digest}"
    families = pytestconfig.getoption("families")
    missing = [name for name in families if not (folder / name / REFERENCE).exists()]
    if missing:
        for what, python in (("make", sys.executable), ("refer", pytestconfig.getoption("reference_python"))):
            path = os.environ.get("PYTHONPATH", "") if python == sys.executable else ""
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)]))}
            command = [python, "-m", "tests.compat.families", what, str(folder), *missing]
            done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                pytest.exit(f"the checkpoints cannot be made ({what}):\n{done.stderr[-3000:]}", returncode=3)
    return folder


@pytest.fixture(scope="session")
def measured(
    pytestconfig: pytest.Config, request: pytest.FixtureRequest, models: Path
) -> Iterator[dict[tuple[str, str], Future[cells.Cell]]]:
    """Every chosen cell, measured two at a time; writes the result file at the end."""
    os.environ.update(engine_environment(cpu=True, eager=True) | {"OMP_NUM_THREADS": "1"})
    began = time.monotonic()
    version = installed_engine()["vllm"]
    context = cells.fork_server()
    chosen = [tuple(item.callspec.params.values()) for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(int(os.environ.get("COMPAT_WORKERS", "2"))) as pool:
        futures = {
            (family, mode): pool.submit(_measure, family, mode, version, models, context) for family, mode in chosen
        }
        yield futures
        for future in futures.values():
            future.cancel()
    path = pytestconfig.getoption("result")
    if path:
        done = [future.result() for future in futures.values() if not future.cancelled()]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_result(done, time.monotonic() - began), indent=1) + "\n", encoding="utf-8")


def _measure(family: str, mode: str, version: str, models: Path, context: Any) -> cells.Cell:
    cell = cells.measure(family, mode, dtype_of(family, version), models, context)
    if cell.status == "fails" and not cell.rounds and int(version.split(".")[1]) < FAMILIES[family].since:
        cell.status = "unsupported"
    return cell


def dtype_of(family: str, version: str) -> str:
    """Float32, but where vLLM's own code for a family is bound to bfloat16."""
    return "bfloat16" if int(version.split(".")[1]) in FAMILIES[family].bfloat16_on else "float32"


def _result(done: list[cells.Cell], seconds: float) -> dict[str, object]:
    return {
        "suite": SUITE,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "engine": installed_engine(),
        "seconds": round(seconds),
        "error": "",
        "cells": [cells.as_json(cell) for cell in done],
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
