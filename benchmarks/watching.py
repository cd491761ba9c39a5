"""Memory of the contestants while they run, looked at every other second from outside.

PSS (shared pages counted once) over a contestant's processes, without page cache; files in memory-backed storage count
only where they are mapped. GPU memory per process as nvidia-smi tells it, and of the whole GPU.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from typing import Any

import psutil

EVERY_S = 2.0


class Watch(threading.Thread):
    """Remembers peaks since the last ``reset``. To be used as a context."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._gpu = shutil.which("nvidia-smi")
        self._roots: set[int] = set()
        self._now: dict[int, dict[str, int]] = {}
        self._peak: dict[int, dict[str, int]] = {}
        self._least_free = 0

    @staticmethod
    def family(pid: int) -> list[int]:
        """Its children, theirs too."""
        try:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def now(self, pid: int) -> dict[str, int]:
        """Bytes of a contestant at the last look; begins to watch it."""
        self._roots.add(pid)
        self.look()
        return dict(self._now.get(pid, {}))

    def peak(self, pid: int) -> dict[str, int]:
        """Greatest bytes of a contestant since ``reset``; least memory free on the machine."""
        self.look()
        return {**self._peak.get(pid, {}), "least_available": self._least_free}

    def reset(self) -> None:
        """Forget the peaks."""
        with self._lock:
            self._peak.clear()
            self._least_free = psutil.virtual_memory().available

    def look(self, *, gpu_too: bool = True) -> None:
        """Measure now."""
        ask = bool(self._gpu and gpu_too)  # engines take GPU memory when they start, and asking disturbs
        gpu, whole = self._gpu_memory() if ask else ({}, 0)
        for root in list(self._roots):
            pids = [root, *self.family(root)]
            sizes = {"pss": sum(map(_pss, pids))}
            if ask:
                sizes |= {"gpu": sum(gpu.get(pid, 0) for pid in pids), "gpu_whole": whole}
            with self._lock:
                self._now[root] = sizes
                peak = self._peak.setdefault(root, {})
                peak.update({name: max(value, peak.get(name, 0)) for name, value in sizes.items()})
        with self._lock:
            self._least_free = min(self._least_free, psutil.virtual_memory().available)

    def _gpu_memory(self) -> tuple[dict[int, int], int]:
        def ask(what: str) -> list[list[str]]:
            words = [str(self._gpu), f"--query-{what}", "--format=csv,noheader,nounits"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
            return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if "," in line]

        by_pid = {int(a): int(b) * 2**20 for a, b in ask("compute-apps=pid,used_memory") if (a + b).isdigit()}
        whole = sum(int(b) * 2**20 for _, b in ask("gpu=index,memory.used") if b.isdigit())
        return by_pid, whole

    def run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.look(gpu_too=False)

    def __enter__(self) -> Watch:
        self.reset()
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self.join()


def _pss(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:
        return 0
