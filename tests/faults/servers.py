"""The two S3 servers of the suite, each a process (or three) beside the tests, with one set of keys for both."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from typing import Any

from tests.faults import radosgw

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": radosgw.KEY,
    "AWS_SECRET_ACCESS_KEY": radosgw.SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
PATIENCE = {"config_kwargs": {"connect_timeout": 3, "read_timeout": 3}}
"""Storage options of a client that does not wait long, so that a server that hangs is noticed."""


@dataclass
class Server:
    """A running server with an empty bucket.

    Attributes:
        name: "moto" or "radosgw".
        endpoint: its URL.
    """

    name: str
    endpoint: str
    process: Any

    def stop(self) -> None:
        """End it."""
        if isinstance(self.process, radosgw.RadosGateway):
            self.process.stop()
        else:
            self.process.kill()
            self.process.wait()

    def options(self, endpoint: str = "") -> dict[str, Any]:
        """Storage options without secrets, through another endpoint (a proxy) if one is given."""
        return {"endpoint_url": endpoint or self.endpoint, **PATIENCE}

    def url(self) -> str:
        """A root that nothing has used."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}/data"


def missing(name: str) -> str:
    """Why a server cannot run here; empty when it can."""
    return radosgw.missing() if name == "radosgw" else ""


def start(name: str) -> Server:
    """Start a server and make the bucket."""
    if name == "radosgw":
        gateway = radosgw.RadosGateway().start()
        found = Server(name, gateway.endpoint, gateway)
    else:
        port = radosgw.free_port()
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        found = Server(name, f"http://127.0.0.1:{port}", process)
        _wait(found.endpoint)
    import boto3

    boto3.client(
        "s3",
        endpoint_url=found.endpoint,
        aws_access_key_id=radosgw.KEY,
        aws_secret_access_key=radosgw.SECRET,
        region_name="us-east-1",
    ).create_bucket(Bucket=BUCKET)
    return found


def _wait(endpoint: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(endpoint, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
