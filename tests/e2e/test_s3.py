"""A whole job into an S3 bucket, over the real protocol on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def bucket(monkeypatch) -> Iterator[dict[str, Any]]:
    """Storage options of a bucket ``coresample-e2e`` on a server of its own."""
    import boto3
    from moto.server import ThreadedMotoServer

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="coresample-e2e")
    yield {"endpoint_url": endpoint}
    server.stop()


def test_a_job_into_a_bucket(tiny_model, bucket: dict[str, Any], tmp_path: Path) -> None:
    from extract_core import local
    from extract_core.reader import HiddenStatesDataset
    from extract_core.settings import load_job
    from extract_core.store.root import Root
    from extract_core.store.verify import verify

    chats = tiny.write_chats(tmp_path / "chats.jsonl", 30)
    url = "s3://coresample-e2e/team/data"
    job = tiny.write_job(
        tmp_path / "job.yaml",
        model=tiny_model,
        chats=chats,
        root=Path("unused"),
        store={"shard_bytes": "1MiB", "spool": str(tmp_path / "spool"), "storage_options": bucket},
    )
    settings = load_job(job, {"root": url})
    result = local.run(settings)
    assert result.manifest.accounting.published == 30
    assert len(result.manifest.shards) > 1
    report = verify(Root.open(url, bucket))
    assert report.problems == []
    assert report.samples == 30
    dataset = HiddenStatesDataset(url, storage_options=bucket)
    assert dataset[7]["hidden_states"].shape == (len(dataset[7]["input_ids"]), 3, tiny.HIDDEN)
    assert not list((tmp_path / "spool").glob("*/*.tmp"))
    assert not local.run(settings).new
