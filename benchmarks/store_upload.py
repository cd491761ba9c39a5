"""Uploads of one file to one S3 server: Coresample and plain clients in turn.

Coresample's figures hold its checks (a digest of the file while it is read, one of each part, the finished object); the
plain clients upload and check nothing afterwards. All use their defaults, obstore also with larger parts.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import xxhash

from extract_core.store import layout
from extract_core.store.bulk import Choice
from extract_core.store.root import Root

OURS = "coresample"
Put = Callable[[Path, str], Any]


def clients(endpoint: str, bucket: str, key: str, secret: str) -> dict[str, Put]:
    """Every way to upload a local file under a name."""
    import boto3
    import obstore
    import s3fs
    from obstore.store import S3Store

    options = {"key": key, "secret": secret, "endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}}
    login = {"aws_access_key_id": key, "aws_secret_access_key": secret, "region_name": "us-east-1"}
    boto = boto3.client("s3", endpoint_url=endpoint, **login)
    fs = s3fs.S3FileSystem(**options)
    store = S3Store(
        bucket,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id=key,
        secret_access_key=secret,
        client_options={"allow_http": True, "timeout": "10m"},
    )

    def ours(client: Choice) -> Put:
        root = Root.open(f"s3://{bucket}/{client}", options, client)
        known: dict[Path, tuple[str, str]] = {}

        def put(path: Path, name: str) -> None:
            if path not in known:  # in a run, sealing the shard has told
                data = path.read_bytes()
                known[path] = hashlib.sha256(data).hexdigest(), xxhash.xxh3_128_hexdigest(data)
            sha256, quick = known[path]
            link = path.with_name(f"{path.name}.link")
            os.link(path, link)  # put_file consumes what it is given
            root.put_file(link, layout.shard_path(sha256), xxh3_128=quick)

        return put

    return {
        "boto3 upload_file": lambda path, name: boto.upload_file(str(path), bucket, name),
        "s3fs put_file": lambda path, name: fs.put_file(str(path), f"{bucket}/{name}"),
        "obstore put": lambda path, name: obstore.put(store, name, path),
        "obstore put, 16 MiB parts": lambda path, name: obstore.put(
            store, name, path, chunk_size=16 * 2**20, max_concurrency=8
        ),
        f"{OURS}, s3fs": ours("s3fs"),
        f"{OURS}, obstore": ours("obstore"),
    }


def run(endpoint: str, bucket: str, key: str, secret: str, folder: Path, *, nbytes: int, rounds: int) -> dict[str, Any]:
    """Rounds of all clients, each in another order; MB/s, processor seconds per GB, ratios to the fastest plain one.

    ``ratio_of_median`` compares medians over all rounds, ``ratio_of_best`` the best round of each.
    """
    ways = clients(endpoint, bucket, key, secret)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "file"
    path.write_bytes(os.urandom(nbytes))
    name = f"shards/{hashlib.sha256(path.read_bytes()).hexdigest()}.safetensors"
    rates: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    shuffle = random.Random(0)
    for number in range(rounds + 1):
        for way in shuffle.sample(list(ways), len(ways)):
            used, started = time.process_time(), time.perf_counter()
            ways[way](path, name)
            seconds = time.perf_counter() - started
            if number:  # the first round makes connections
                rates[way].append(nbytes / 1e6 / seconds)
                cpu[way].append((time.process_time() - used) / (nbytes / 1e9))
    plain = [way for way in ways if not way.startswith(OURS)]
    fastest, best = (max(f(rates[way]) for way in plain) for f in (median, max))
    return {
        "bytes": nbytes,
        "rounds": rounds,
        "clients": {
            way: {
                "mb_s": {"median": median(values), "min": min(values), "max": max(values)},
                "cpu_s_per_gb": median(cpu[way]),
                "ratio_of_median": median(values) / fastest,
                "ratio_of_best": max(values) / best,
            }
            for way, values in rates.items()
        },
    }
