"""GPUs as the driver names them, and main memory within control groups."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from extract_core import hardware
from extract_core.hardware import Gpu, HostMemory, choose, disk_free, host_memory, parse_nvidia_smi, visible_gpus

MIB, GIB = 2**20, 2**30
TWO = [Gpu("NVIDIA H200", 140, 139, 0, "GPU-aaa-1"), Gpu("NVIDIA H200", 140, 100, 1, "GPU-abb-2")]


def test_nvidia_smi() -> None:
    text = (
        "0, GPU-aaa-1, NVIDIA H200, 143771, 143000\n1, GPU-b, NVIDIA A100, PCIe, 40960, 100\nnonsense\n"
        "2, GPU-c, NVIDIA GB10, [N/A], [N/A]\n"
    )
    assert parse_nvidia_smi(text) == [
        Gpu("NVIDIA H200", 143771 * MIB, 143000 * MIB, 0, "GPU-aaa-1"),
        Gpu("NVIDIA A100, PCIe", 40960 * MIB, 100 * MIB, 1, "GPU-b"),
    ]


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        (None, [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-abb", [1]),
        ("0,7,1", [0]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices(wanted: str | None, numbers: list[int]) -> None:
    assert [gpu.number for gpu in choose(TWO, wanted)] == numbers


class _Nvml(SimpleNamespace):
    """The calls of nvidia-ml-py that are used, for two GPUs and a slice."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Gpu:
        return TWO[number]

    def nvmlDeviceGetHandleByUUID(self, name: bytes) -> Gpu:
        if name != b"MIG-1":
            raise self.NVMLError
        return Gpu("NVIDIA H200 MIG 1g.18gb", 18, 17, 0, name.decode())

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu) -> Gpu:
        return handle

    def nvmlDeviceGetName(self, handle: Gpu) -> bytes:
        return handle.name.encode()

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:
        return handle.uuid


def test_nvml_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == TWO
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert [(gpu.name, gpu.free) for gpu in visible_gpus()] == [("NVIDIA H200 MIG 1g.18gb", 17)]


def test_nvidia_smi_where_nvml_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda: TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == TWO[1:]


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_control_groups(tmp_path: Path) -> None:
    two = tmp_path / "two"
    group(two / "a" / "b", memory__max="max", memory__current="5", memory__stat="inactive_file 1")
    group(two / "a", memory__max=str(8 * GIB), memory__current=str(3 * GIB), memory__stat=f"inactive_file {GIB}")
    (tmp_path / "self").write_text("0::/a/b\n")
    limits = hardware._cgroup_limits
    assert list(limits(tmp_path / "self", two)) == [(8 * GIB, 2 * GIB)]

    one = tmp_path / "one"  # version 1, in a container that sees its own group at the mount
    group(
        one / "memory",
        memory__limit_in_bytes=str(4 * GIB),
        memory__usage_in_bytes=str(GIB),
        memory__stat=f"total_inactive_file {GIB // 2}",
    )
    (tmp_path / "self").write_text("4:memory:/not/seen/here\n0::/\n")
    assert list(limits(tmp_path / "self", one)) == [(4 * GIB, GIB // 2)]
    group(one / "memory", memory__limit_in_bytes="9223372036854771712")
    assert list(limits(tmp_path / "self", one)) == []
    assert list(limits(tmp_path / "nothing", tmp_path / "nowhere")) == []


def test_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=10 * GIB))
    monkeypatch.setattr(hardware, "_cgroup_limits", lambda: [(32 * GIB, 30 * GIB), (16 * GIB, 2 * GIB)])
    assert host_memory() == HostMemory(16 * GIB, 2 * GIB, "this container")
    monkeypatch.setattr(hardware, "_cgroup_limits", list)
    assert host_memory() == HostMemory(64 * GIB, 10 * GIB, "this machine")


def test_here(tmp_path: Path) -> None:
    assert 0 < host_memory().free <= host_memory().total
    assert disk_free(tmp_path / "not" / "yet") > 0
