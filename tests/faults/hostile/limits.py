"""Runs a function in a child process with limits on time and memory: what hangs does not take the test along."""

from __future__ import annotations

import multiprocessing
import resource
import traceback
from collections.abc import Callable
from typing import Any

GIB = 2**30


def _child(pipe: Any, call: Callable[..., Any], args: tuple[Any, ...], data_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pipe.send(("returned", call(*args)))
    except BaseException as error:
        pipe.send((type(error).__name__, f"{error}\n{traceback.format_exc()}"))


def confined(
    call: Callable[..., Any], *args: Any, seconds: float = 30, data_bytes: int = 6 * GIB
) -> tuple[str, Any, float]:
    """``("returned", value, peak GiB)`` or the name of the exception with its text; "hung" and "died" are names too.

    The child is forked, so ``call`` may be a closure; ``RLIMIT_DATA`` holds private memory, not mapped files.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, call, args, data_bytes))
    child.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return "hung", f"no answer within {seconds} s", _peak(child.pid)
        try:
            kind, value = ours.recv()
        except EOFError:
            child.join(5)
            return "died", f"exit code {child.exitcode}", 0.0
        return kind, value, _peak(child.pid)
    finally:
        child.kill()
        child.join()


def _peak(pid: int | None) -> float:
    try:
        with open(f"/proc/{pid}/status") as file:
            return next(int(line.split()[1]) / 2**20 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0.0
