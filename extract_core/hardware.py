"""Memory of this machine: GPUs without making a CUDA context, main memory within the container's limit."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60


@dataclass(frozen=True)
class Gpu:
    """A GPU; bytes. ``number`` and ``uuid`` are the driver's."""

    name: str
    total: int
    free: int
    number: int = 0
    uuid: str = ""


@dataclass(frozen=True)
class HostMemory:
    """Main memory; bytes. ``limit`` says what bounds it: "this machine" or "this container"."""

    total: int
    free: int
    limit: str = "this machine"


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; empty without a driver.

    Asks NVML, else nvidia-smi: a CUDA context takes hundreds of MiB of the memory that is asked for.
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = _nvml(wanted)
    return found if found is not None else choose(_nvidia_smi(), wanted)


def driver_version() -> str | None:
    """Version of the GPUs' driver; None without one."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return _ask_nvidia_smi("driver_version").partition("\n")[0].strip() or None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def choose(gpus: list[Gpu], wanted: str | None) -> list[Gpu]:
    """The GPUs that a CUDA_VISIBLE_DEVICES names, by number or beginning of the uuid; CUDA stops at an unknown."""
    if wanted is None:
        return gpus
    result = []
    for name in _names(wanted):
        match = [gpu for gpu in gpus if name == str(gpu.number) or (not name.isdigit() and gpu.uuid.startswith(name))]
        if not match:
            break
        result.append(match[0])
    return result


def _names(wanted: str) -> list[str]:
    return [name.strip() for name in wanted.split(",") if name.strip()]


def _nvml(wanted: str | None) -> list[Gpu] | None:
    """None where NVML cannot be asked."""
    try:
        pynvml = importlib.import_module("pynvml")  # of nvidia-ml-py, which comes with the CUDA packages only
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        whole = [_nvml_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(n), n) for n in range(pynvml.nvmlDeviceGetCount())]
        slices = [name for name in _names(wanted or "") if name.startswith("MIG-")]
        return [
            *choose(whole, wanted),
            *(_nvml_gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(name.encode()), n) for n, name in enumerate(slices)),
        ]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _nvml_gpu(pynvml: Any, handle: Any, number: int) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        _text(pynvml.nvmlDeviceGetName(handle)),
        int(memory.total),
        int(memory.free),
        number,
        _text(pynvml.nvmlDeviceGetUUID(handle)),
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _nvidia_smi() -> list[Gpu]:
    return parse_nvidia_smi(_ask_nvidia_smi("index,uuid,name,memory.total,memory.free"))


def _ask_nvidia_smi(fields: str) -> str:
    """What nvidia-smi prints, a line per GPU; empty where it is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_nvidia_smi(text: str) -> list[Gpu]:
    """Lines of ``index, uuid, name, total MiB, free MiB``; others are passed over."""
    result = []
    for line in text.splitlines():
        front, *sizes = (part.strip() for part in line.rsplit(",", 2))
        head = [part.strip() for part in front.split(",", 2)]
        if len(head) == 3 and head[0].isdigit() and len(sizes) == 2 and all(size.isdigit() for size in sizes):
            total, free = (int(size) * 2**20 for size in sizes)
            result.append(Gpu(head[2], total, free, int(head[0]), head[1]))
    return result


def host_memory() -> HostMemory:
    """Main memory that can still be used: the machine's, or less where a control group bounds this process."""
    import psutil

    now = psutil.virtual_memory()
    result = HostMemory(now.total, now.available)
    for limit, used in _cgroup_limits():
        if limit < result.total:
            result = HostMemory(limit, min(result.free, max(0, limit - used)), "this container")
        else:
            result = HostMemory(result.total, min(result.free, max(0, limit - used)), result.limit)
    return result


def _cgroup_limits(process: Path = Path("/proc/self/cgroup"), mount: Path = _CGROUP) -> Iterator[tuple[int, int]]:
    """Limit and use of every control group above this process that has a limit (version 2, then 1).

    A container usually sees its own group at the mount itself, whatever path ``/proc/self/cgroup`` names.
    """
    try:
        lines = process.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    paths = {
        controllers: path for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1)
    }
    for base, path, limit, used, idle in (
        (mount, paths.get("", "/"), "memory.max", "memory.current", "inactive_file"),
        (
            mount / "memory",
            paths.get("memory", "/"),
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            yield from _one_limit(folder, limit, used, idle)
            folder = folder.parent
        yield from _one_limit(base, limit, used, idle)


def _one_limit(folder: Path, limit: str, used: str, idle: str) -> Iterator[tuple[int, int]]:
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        if not most.isdigit() or int(most) >= _UNLIMITED:
            return
        now = int((folder / used).read_text(encoding="ascii"))
        counts = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text("ascii").splitlines())
    except (OSError, ValueError):
        return
    yield int(most), max(0, now - int(counts.get(idle, 0)))  # file pages that nobody uses are given up first


def disk_free(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_memory(folder: Path) -> bool:
    """Whether a folder, which need not exist yet, lies in a file system that is kept in main memory."""
    import psutil

    place = _existing(folder).resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    kind = next((mounts[above] for above in (place, *place.parents) if above in mounts), "")
    return kind in ("tmpfs", "ramfs")


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())
