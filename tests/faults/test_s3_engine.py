"""Whole jobs with a real engine, into each S3 server through the proxy that fails on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.faults import kit
from tests.faults.proxy import FaultProxy

FAMILY = "S3, engine"
WHAT = "errors, resets, hangs, lost answers, cut and flipped bodies at 5 % of requests"
pytestmark = [pytest.mark.engine, pytest.mark.system, pytest.mark.timeout(900)]

CHATS = 30
KINDS = ("500", "503", "500 after", "hang", "reset", "reset after", "truncated", "flip response", "flip request")


@pytest.mark.parametrize("name", ["moto", "radosgw"] if kit.full() else ["radosgw"])
def test_a_job_through_faults(case, server, model, name: str) -> None:
    here = server(name)
    url, spool = here.url(), case.folder / "spool"
    with FaultProxy(here.endpoint, seed=6) as proxy:
        proxy.rates = dict.fromkeys(KINDS, 0.05 / len(KINDS))
        proxy.hang_s = 4
        job = tiny.write_job(
            case.folder / "job.yaml",
            model=model,
            chats=tiny.write_chats(case.folder / "chats.jsonl", CHATS, seed=6),
            root=Path("unused"),
            preflight={"reference": "never"},
            store={"shard_bytes": "1MiB", "spool": str(spool), "storage_options": here.options(proxy.endpoint)},
        )
        for _ in range(4):
            outcome = case.clear(case.run("run", str(job), "--root", url, "--no-prefect", "--quiet", timeout_s=400))
            case.injected = proxy.injected
            if outcome.code == 0:
                break
            proxy.quiet()
        assert outcome.code == 0, outcome.text[-4000:]
        assert case.injected > 0
    case.settled(url, here.options(), rows=CHATS, spools=(spool,))
