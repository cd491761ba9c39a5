"""The store: local write path, S3 write path and lossless encoding, each against what it must be measured by.

S3: one file is uploaded by Coresample and by plain clients in turn (``benchmarks.store_upload``) to Ceph's radosgw on
loopback where that is installed, else to moto, which is far slower than any client.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import store_encoding, store_local, store_upload

MEMORY = Path("/dev/shm")
SHARDS, SHARD_BYTES = 8, 64 * 2**20
UPLOAD_BYTES, BUCKET = 32 * 2**20, "bench"


def run(dataset: Path, folder: Path, rounds: int, parts: list[str]) -> dict[str, Any]:
    """Measure.

    Args:
        dataset: a published local dataset of bfloat16 rows, for the encoding.
        folder: on the disk to be measured.
        rounds: pairs of rounds of the local path; the others take as many rounds.
        parts: of local, spool, encoding and upload.
    """
    result: dict[str, Any] = {"benchmark": "store", "cores": os.cpu_count()}
    for part in parts:
        before = os.getloadavg()[0]
        if part in ("local", "spool"):
            with tempfile.TemporaryDirectory(prefix="coresample-bench-", dir=MEMORY) as memory:
                figures = store_local.run(
                    folder,
                    rounds=rounds,
                    shards=SHARDS,
                    shard_bytes=SHARD_BYTES,
                    spool=Path(memory) / "spool" if part == "spool" else None,
                )
        elif part == "encoding":
            cores = os.sched_getaffinity(0)
            figures = store_encoding.run(dataset, rounds=rounds)
            os.sched_setaffinity(0, cores)
        elif part == "upload":
            figures = _upload(folder, rounds)
        else:
            raise SystemExit(f"no part {part!r}; there are local, spool, encoding and upload")
        result[part] = figures | {
            "date": time.strftime("%Y-%m-%d"),
            "load_before": before,
            "load_after": os.getloadavg()[0],
        }
        print(part, json.dumps({k: v for k, v in figures.items() if k != "pairs"}, indent=1), flush=True)
    return result


def _upload(folder: Path, rounds: int) -> dict[str, Any]:
    from tests.faults import radosgw

    with ExitStack() as stack:
        if not radosgw.missing():
            # It keeps what was overwritten for hours, and answers nothing any more once it is full.
            server = stack.enter_context(radosgw.RadosGateway(UPLOAD_BYTES * 9 * (rounds + 1)))
            server.make_bucket(BUCKET)
            name, endpoint, key, secret = "radosgw", server.endpoint, server.key, server.secret
        else:
            name, endpoint, key, secret = "moto", _moto(stack), "test", "test"
        figures = store_upload.run(endpoint, BUCKET, key, secret, folder, nbytes=UPLOAD_BYTES, rounds=rounds)
    return {"server": name, **figures}


def _moto(stack: ExitStack) -> str:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    stack.callback(server.stop)
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    login = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **login).create_bucket(Bucket=BUCKET)
    return endpoint
