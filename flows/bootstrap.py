"""Sets a Prefect server up for Coresample: ``python -m flows.bootstrap``.

Makes the work pools, their queues and the automations, then deploys everything in prefect.yaml. May be run again at any
time: what is there is brought up to date, limits that are not named stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import flows  # noqa: F401 -- sets Prefect's settings before Prefect is imported

CPU_POOL, GPU_POOL = "coresample-cpu", "coresample-gpu"
QUEUES = {"interactive": 1, "backfill": 10}
"""Queues of both pools and their priorities; 1 goes first."""
HERE = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status of ``prefect deploy``."""
    parser = argparse.ArgumentParser(prog="python -m flows.bootstrap", description=__doc__)
    parser.add_argument("--pool-type", default="process", help="process, kubernetes or docker (default: process)")
    parser.add_argument("--gpu-slots", type=int, help="most workers of the GPU pool at once")
    parser.add_argument("--cpu-slots", type=int, help="most runs of the CPU pool at once")
    parser.add_argument(
        "--base-job-template", metavar="FOLDER", help="holds coresample-cpu.json and coresample-gpu.json, for the pools"
    )
    parser.add_argument("--notify", metavar="BLOCK", help="notification block, such as slack-webhook/team")
    parser.add_argument("--stall-minutes", type=float, default=90, help="silence that is worth an alert (default: 90)")
    parser.add_argument("--no-deploy", action="store_true", help="leave prefect.yaml alone")
    chosen = parser.parse_args(arguments)
    for line in set_up(chosen):
        print(line)
    if chosen.no_deploy:
        return 0
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "prefect.yaml"]
    # Where it is set, Prefect would write this machine's folder into the deployments; each worker is to use its own.
    environment = {name: value for name, value in os.environ.items() if name != "CORESAMPLE_HOME"}
    return subprocess.call(command, cwd=HERE, env=environment)


def set_up(chosen: argparse.Namespace) -> list[str]:
    """Pools, queues and automations; returns a line for each."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    from flows.automations import apply, automations

    lines = []
    folder = Path(chosen.base_job_template) if chosen.base_job_template else None
    with get_client(sync_client=True) as client:
        for pool, slots in ((CPU_POOL, chosen.cpu_slots), (GPU_POOL, chosen.gpu_slots)):
            given = {"base_job_template": json.loads((folder / f"{pool}.json").read_text())} if folder else {}
            try:
                client.read_work_pool(pool)
            except ObjectNotFound:
                client.create_work_pool(WorkPoolCreate(name=pool, type=chosen.pool_type, **given))
                lines.append(f"work pool {pool} of type {chosen.pool_type} created")
            else:
                lines.append(f"work pool {pool} is there")
                if given:
                    client.update_work_pool(pool, WorkPoolUpdate(**given))
                    lines.append(f"work pool {pool}: base job template renewed")
            if slots is not None:
                client.update_work_pool(pool, WorkPoolUpdate(concurrency_limit=slots))
                lines.append(f"work pool {pool}: at most {slots} runs at once")
            for queue, priority in QUEUES.items():
                try:
                    client.create_work_queue(name=queue, priority=priority, work_pool_name=pool)
                    lines.append(f"work queue {pool}/{queue}, priority {priority}")
                except ObjectAlreadyExists:
                    continue
        block = None
        if chosen.notify:
            kind, _, name = chosen.notify.partition("/")
            block = client.read_block_document_by_name(name, kind).id
    return [*lines, *apply(automations(block, stall=timedelta(minutes=chosen.stall_minutes)))]


if __name__ == "__main__":
    sys.exit(main())
