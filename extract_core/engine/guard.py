"""Leader of the engine's process group: it kills the whole group when the host is gone.

vLLM's engine core and its workers survive a SIGKILLed parent and keep their memory (vllm#55510). Two ropes hold them:

- the host holds the other end of this process's standard input; when that closes, for whatever reason, everything in
  the group is killed;
- each process is killed by the kernel when the one that started it is gone (``die_with_parent``): host, guard, engine,
  vLLM's workers. It holds where the first cannot: this process is killed, or is stopped while the host dies.

Run as ``python guard.py COMMAND ...`` with a new session and a pipe as standard input; imports nothing but the
standard library so that it is up before the engine is.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

PARENT = "CORESAMPLE_ENGINE_PARENT"
"""Variable with the process id that a process expects as its parent: the one that started it."""
FDS = "CORESAMPLE_ENGINE_FDS"
"""Variable with the file descriptors that the command inherits."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, and tell the processes it starts who theirs is.

    The signal comes when the *thread* that started this process ends: whoever starts one does so from a thread that
    lives on. It reaches no grandchildren, so every process of the group asks for it.
    """
    expected = os.environ.get(PARENT)
    os.environ[PARENT] = str(os.getpid())
    if expected is None or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != int(expected):  # it ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_group_when_host_is_gone() -> None:
    os.read(0, 1)  # unbuffered: a buffered read would abort the interpreter at exit
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Run the command in this group; returns its exit status, 128 and the number for a signal."""
    # A handler, not SIG_IGN: ignored signals are inherited by the engine, handlers are not.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=_kill_group_when_host_is_gone, daemon=True).start()
    die_with_parent()
    pass_fds = [int(fd) for fd in os.environ.get(FDS, "").split(",") if fd]
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, pass_fds=pass_fds)
    for fd in pass_fds:
        os.close(fd)  # so that the host sees at once that the engine is gone, whatever this process does
    status = command.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
