"""Entry point of the engine process: ``python -m extract_core.engine.main FD``.

Speaks protocol.py over the inherited socket; prints go to the engine's log file, whose tail the host attaches to a
failure. Leaves with status 0 after Shutdown and 1 after Failed.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from extract_core.engine.guard import die_with_parent
from extract_core.engine.logs import chained, root_cause
from extract_core.engine.protocol import (
    EngineSpec,
    Failed,
    Ready,
    ShardJob,
    Shutdown,
    Starting,
    receive_request,
    send,
)
from extract_core.errors import CaptureError, CoresampleError, EngineError

if TYPE_CHECKING:
    from extract_core.engine.driver import EngineDriver


def prepare_process() -> None:
    """What every Python process of the engine does first: die with its parent, print its stacks when asked."""
    die_with_parent()
    faulthandler.enable()  # a crash in native code leaves the Python stack in the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent by the host before it kills a hung engine


def serve(host: Connection, driver: EngineDriver) -> None:
    """Take jobs as they come and answer each when its rows are in its file, until told to end.

    Raises:
        EOFError: the host is gone.
    """
    from extract_core.engine.driver import POLL_S

    while True:
        patience = None if driver.idle else 0.0 if driver.computing else POLL_S
        while host.poll(patience):
            request = receive_request(host)
            if isinstance(request, Shutdown):
                return
            if not isinstance(request, ShardJob):
                raise TypeError(f"expected a ShardJob, got {type(request).__name__}")
            driver.add(request)
            patience = 0.0
        for done in driver.turn(lambda progress: send(host, progress)):
            send(host, done)


def main(fd: int) -> int:
    """Serve requests until told to stop; every failure is reported whole before the process ends."""
    host = Connection(fd)
    try:
        spec = receive_request(host)
        if not isinstance(spec, EngineSpec):
            raise TypeError(f"the first message must be an EngineSpec, got {type(spec).__name__}")
        began = time.perf_counter()
        send(host, Starting("importing vLLM"))
        from vllm.v1.engine import core as _  # noqa: F401 -- seconds, which are not to be told as loading the model

        from extract_core.engine.driver import EngineDriver

        imported = time.perf_counter() - began
        send(host, Starting("loading the model"))
        driver = EngineDriver(spec)
        startup = {"import": imported, **driver.startup, "all": time.perf_counter() - began}
        send(host, Ready(driver.info, driver.final_norm, startup))
        serve(host, driver)
    except EOFError:
        return 0  # the host is gone; the guard ends the group
    except BaseException as error:  # noqa: BLE001 - sent whole to the host, which raises it
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        known = isinstance(error, CoresampleError)
        # What we refuse ourselves says all in its message; a traceback is for failures of the engine.
        shown = "" if known and not isinstance(error, CaptureError) else text
        if isinstance(error, EngineError) and error.engine_traceback:
            shown = chained(error.engine_traceback, text)  # of the worker process that failed
        message = str(error).strip() if known else ""
        try:
            send(host, Failed(type(error).__name__ if known else "", message or root_cause(error), shown))
        except OSError:
            print("the host is gone: nobody hears of this failure", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__mp_main__":
    # A process that vLLM spawns (a worker of a tensor-parallel group): multiprocessing imports this module there first.
    prepare_process()

if __name__ == "__main__":
    prepare_process()
    # A hard exit: vLLM's atexit handlers can hang after a failure, and everything durable is on disk already.
    status = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
