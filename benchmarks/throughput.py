"""Extraction against vLLM's own prefill and its own connector, in one run: ``python -m benchmarks throughput``.

Every contestant has its engine in a process of its own, all stay loaded, and they take turns over the same samples:
``LLM.generate(max_tokens=1)`` with nothing captured, Coresample from the first step to the last commit record (capture,
write, row checks, digests, durable shards), and ``extract_hidden_states`` with vLLM's connector until its last file is
complete. The figures are ratios round by round, so that a machine that slows down slows all.

Here: the demo's real model on the CPU, real chats, a local disk, memory-backed storage or an S3 server on loopback
(moto). The connector writes files only, so that S3 is for prefill and Coresample.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.contestants import Spec
from benchmarks.gpu import KINDS, environment_of_engines, machine_facts
from benchmarks.rounds import Entry, Session, entries

ENTRIES = {
    "uniform": "prefill,ours,connector",
    "turns": "prefill-cached,ours,connector-cached,ours-alone",
    "system": "prefill-cached,ours,connector-cached,ours-alone",
}
LONGEST, UNIFORM_PROMPTS = 1024, 12
KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--workload", default="uniform,turns,system", help="which of the workloads")
    parser.add_argument("--chats", type=int, default=8, help="conversations of turns and system")
    parser.add_argument("--prompts", type=int, default=UNIFORM_PROMPTS, help="prompts of uniform")
    parser.add_argument("--contestants", help=f"instead of {ENTRIES}")
    parser.add_argument("--target", default="disk", choices=("disk", "shm", "s3"))
    parser.add_argument("--sink", type=float, default=0, metavar="BYTES_PER_S", help="limit what can be stored")


def run(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Measure, with the demo's model; ``out`` is written after every single run."""
    chats = workloads.real_chats(options.chats, Path(options.dir))
    plan: list[tuple[workloads.Workload, Sequence[Entry]]] = []
    for name in options.workload.split(","):
        made = workloads.make(name, chats, prompts=options.prompts, length=min(LONGEST, workloads.UNIFORM_TOKENS))
        longest = LONGEST if name == "turns" else LONGEST + workloads.SYSTEM_TOKENS
        short = {ids[:longest].tobytes(): ids[:longest] for ids in made.samples}
        chosen = options.contestants or ENTRIES[name]
        if options.target == "s3":
            chosen = ",".join(word for word in chosen.split(",") if not word.startswith("connector"))
        plan.append((workloads.Workload(name, list(short.values())), entries(chosen)))
    folder = {"shm": "/dev/shm"}.get(options.target)
    with (
        tempfile.TemporaryDirectory(prefix="coresample-bench-", dir=folder) as store,
        _scratch() as scratch,
        _target(options.target, Path(store)) as (target, storage, environment),
    ):
        specs = _specs(options, target, storage, Path(store), scratch)
        head = {
            "benchmark": "throughput",
            "model": "SmolLM2-135M-Instruct",
            "layers": specs["ours"].layers,
            "dtype": specs["ours"].dtype,
            "store_dtype": specs["ours"].store_dtype,
            "target": options.target,
            "sink_bytes_per_s": options.sink,
            "shard_bytes": specs["ours"].shard_bytes,
            "machine": machine_facts(),
            "load": os.getloadavg(),
        }
        every = {**environment_of_engines(), **environment}
        # One after the other: two cores import vLLM no faster together.
        session = Session(specs, scratch / "run", out, head, every, warm_tokens=256, at_once=False)
        try:
            return session.run(plan, options.rounds)
        finally:
            for log in (scratch / "run").glob("*.log") if session.result["failed"] else []:
                print(f"==== {log.name}\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")


def _specs(
    options: argparse.Namespace, target: str, storage: dict[str, Any], store: Path, scratch: Path
) -> dict[str, Spec]:
    common = Spec(
        kind="prefill",
        model=str(Path(options.dir) / "SmolLM2-135M-Instruct"),
        layers=[2, 15, 27, 30],
        dtype="float32",  # most CPUs have no bfloat16 units
        store_dtype="float32",  # what the connector writes; the same bytes for both
        target=target,
        scratch=str(scratch / "ours"),
        max_model_len=LONGEST + workloads.SYSTEM_TOKENS + 2,
        step_tokens=2048,
        max_num_seqs=16,
        kv_bytes=2**30,
        block_size=32,  # the CPU backend's own 128 tokens share less of a prefix
        enforce_eager=True,
        bytes_per_s=options.sink or None,
        shard_bytes=128 * 2**20,
        storage_options=storage,
    )
    made = {}
    for name in KINDS:
        kind = name.partition("-")[0]
        where = f"{target}/ours" if kind == "ours" else str(store / kind)
        made[name] = replace(common, kind=kind, cached=name.endswith("cached") or kind == "ours", target=where)
    return made


@contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="coresample-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _target(name: str, store: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Root of ours, its storage options and environment variables that it needs."""
    if name != "s3":
        yield str(store), {}, {}
        return
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _make_bucket(url)
        options = {"endpoint_url": url}
        yield "s3://bench", options, KEYS
    finally:
        server.terminate()
        server.wait()


def _make_bucket(url: str) -> None:
    import boto3
    import botocore.exceptions

    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="bench", aws_secret_access_key="bench", region_name="us-east-1"
    )
    for _ in range(100):
        try:
            client.create_bucket(Bucket="bench")
            return
        except botocore.exceptions.EndpointConnectionError:
            time.sleep(0.3)
    raise TimeoutError(f"no S3 server at {url} after 30 s")
