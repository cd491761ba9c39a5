"""Peak memory of a whole ``coresample run``: host, engine and Prefect's private server together.

The sum over the process tree of PSS (shared pages counted once) is sampled ten times a second; page cache is not in it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from extract_core.planning.model import inspect_model, weight_files
from extract_core.settings import load_job

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def run(job_file: str, root: Path, flags: list[str]) -> dict[str, Any]:
    """Run the job in a fresh root and watch its processes; bytes."""
    settings = load_job(job_file)
    model = inspect_model(settings.model)
    weights = sum(file.stat().st_size for file in weight_files(model.path)) // 2 * _DTYPE_BYTES[model.dtype]
    kv_cache = settings.engine.kv_cache_bytes or 2**30
    command = [sys.executable, "-m", "extract_core.cli", "run", job_file, "--root", str(root), *flags]
    started = time.time()
    process = subprocess.Popen(command)
    peak, at_peak = 0, {}
    while process.poll() is None:
        sizes = _tree(process.pid)
        if sum(sizes.values()) > peak:
            peak, at_peak = sum(sizes.values()), sizes
        time.sleep(0.1)
    return {
        "benchmark": "memory",
        "flags": flags,
        "exit_code": process.returncode,
        "seconds": time.time() - started,
        "peak_bytes": peak,
        "model_bytes": weights,
        "kv_cache_bytes": kv_cache,
        "over_model_and_kv_bytes": peak - weights - kv_cache,
        "by_process": at_peak,
    }


def _role(command: list[str]) -> str:
    line = " ".join(command)
    for part, role in (
        ("engine.main", "engine"),
        ("uvicorn", "Prefect's private server"),
        ("extract_core.cli", "coresample run"),
    ):
        if part in line:
            return "guard of the engine" if "guard.py" in line else role
    return Path(command[0]).name if command else "?"


def _tree(pid: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return sizes
    for process in processes:
        try:
            sizes[_role(process.cmdline())] = process.memory_full_info().pss
        except psutil.Error:
            continue
    return sizes
