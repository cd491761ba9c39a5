"""Health check of the images: ``health.py URL`` or ``health.py services``; exit status 0 when healthy.

A URL must answer 200: a worker's ``/health`` (it polled its server lately) or the server's ``/api/health``. The process
of the services has no port; what it sends is a heartbeat to Redis every few seconds, under its host's name.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta

TIMEOUT_S = 5
OLDEST = timedelta(seconds=60)
DOCKET = "prefect"
"""Docket of ``prefect server services start``: fixed in Prefect 3.7.7, whatever PREFECT_SERVER_DOCKET_NAME says."""


def answers(url: str) -> str | None:
    """What is wrong with an HTTP endpoint; None when it answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return None if response.status == 200 else f"{url} answered {response.status}"
    except (urllib.error.URLError, OSError) as error:
        return f"{url}: {error}"


async def services_beat(url: str) -> str | None:
    """What is wrong with the services process on this host; None when its last heartbeat is young."""
    from docket import Docket
    from redis.exceptions import RedisError

    host = socket.gethostname()
    try:
        async with Docket(name=DOCKET, url=url) as docket:
            beats = [worker.last_seen for worker in await docket.workers() if worker.name.startswith(f"{host}#")]
    except (RedisError, OSError) as error:
        return f"Redis: {error}"
    if not beats:
        return f"no heartbeat of services on {host}"
    age = datetime.now(UTC) - max(beats)
    return None if age < OLDEST else f"last heartbeat of services on {host} was {age.total_seconds():.0f} s ago"


def main(arguments: list[str]) -> int:
    """Run the check that the one argument names; 0 healthy, 1 not, 2 wrong usage."""
    if len(arguments) != 1:
        print("usage: health.py URL | health.py services", file=sys.stderr)
        return 2
    if arguments[0] == "services":
        url = os.environ.get("PREFECT_SERVER_DOCKET_URL", "")
        if not url.startswith(("redis://", "rediss://")):
            print("PREFECT_SERVER_DOCKET_URL must be a redis:// URL", file=sys.stderr)
            return 2
        problem = asyncio.run(services_beat(url))
    else:
        problem = answers(arguments[0])
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
