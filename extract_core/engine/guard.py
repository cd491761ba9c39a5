"""Leader of the engine's process group: it kills the whole group when the host is gone.

vLLM's engine core and its workers survive a SIGKILLed parent and keep their memory (vllm#55510), and neither SIGTERM
nor PR_SET_PDEATHSIG reaches grandchildren. The host holds the other end of this process's standard input; when that
closes, for whatever reason, everything in the group is killed.

Run as ``python guard.py COMMAND ...`` with a new session and a pipe as standard input; imports nothing but the
standard library so that it is up before the engine is.
"""

import os
import signal
import subprocess
import sys
import threading


def _kill_group_when_host_is_gone() -> None:
    os.read(0, 1)  # unbuffered: a buffered read would abort the interpreter at exit
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Run the command in this group; returns its exit status, negative for a signal."""
    # A handler, not SIG_IGN: ignored signals are inherited by the engine, handlers are not.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=_kill_group_when_host_is_gone, daemon=True).start()
    pass_fds = [int(fd) for fd in os.environ.get("CORESAMPLE_ENGINE_FDS", "").split(",") if fd]
    status = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL, pass_fds=pass_fds)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
