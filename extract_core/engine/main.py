"""Entry point of the engine process: ``python -m extract_core.engine.main FD``.

Speaks protocol.py over the inherited socket; prints go to the engine's log file, whose tail the host attaches to a
failure. Leaves with status 0 after Shutdown and 1 after Failed.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

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
from extract_core.errors import CaptureError, CoresampleError


def main(fd: int) -> int:
    """Serve requests until told to stop; every failure is reported whole before the process ends."""
    host = Connection(fd)
    try:
        spec = receive_request(host)
        if not isinstance(spec, EngineSpec):
            raise TypeError(f"the first message must be an EngineSpec, got {type(spec).__name__}")
        send(host, Starting("importing vLLM"))
        from extract_core.engine.driver import EngineDriver

        send(host, Starting("loading the model"))
        driver = EngineDriver(spec)
        send(host, Ready(driver.info))
        while not isinstance(request := receive_request(host), Shutdown):
            if not isinstance(request, ShardJob):
                raise TypeError(f"expected a ShardJob, got {type(request).__name__}")
            send(host, driver.extract(request, lambda progress: send(host, progress)))
    except EOFError:
        return 0  # the host is gone; the guard ends the group
    except BaseException as error:  # noqa: BLE001 - sent whole to the host, which raises it
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        known = isinstance(error, CoresampleError)
        # What we refuse ourselves says all in its message; a traceback is for failures of the engine.
        shown = "" if known and not isinstance(error, CaptureError) else text
        send(host, Failed(type(error).__name__ if known else "", str(error) if known else _root_cause(error), shown))
        return 1
    return 0


def _root_cause(error: BaseException) -> str:
    """The innermost exception of the chain in one line, never empty: an AssertionError gets its source line."""
    inner = error
    while (cause := inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)) is not None:
        inner = cause
    text = str(inner).strip()
    frames = traceback.extract_tb(inner.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} `{frames[-1].line}`" if frames else ""
    return f"{type(inner).__name__}: {text}{where}" if text else f"{type(inner).__name__}{where}"


if __name__ == "__main__":
    # A hard exit: vLLM's atexit handlers can hang after a failure, and everything durable is on disk already.
    status = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
