"""Ends Prefect's private server when the run that started it is gone, however it went.

Run as ``python reaper.py PID`` with a pipe of the run as standard input: when that closes, the process is killed unless
it has ended by itself. Imports nothing but the standard library.
"""

import os
import signal
import sys


def main() -> None:
    """Hold the process by a descriptor, which another process of the same number cannot take over, and wait."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        held = os.pidfd_open(int(sys.argv[1]))
        os.read(0, 1)
        signal.pidfd_send_signal(held, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended


if __name__ == "__main__":
    main()
