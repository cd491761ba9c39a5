"""Inputs in an object store, read over HTTP from a local S3 server."""

from __future__ import annotations

import hashlib
import json

import boto3
import pytest
from moto.server import ThreadedMotoServer

from extract_core.chat import Sample, input_files, read_samples
from extract_core.errors import InputDataError
from extract_core.settings import ChatSettings, DataSettings
from tests.unit.chat.kit import GOOD, chat_tokenizer

LINE = json.dumps(GOOD).encode() + b"\n"


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=url)
    client.create_bucket(Bucket="chats")
    for name in ("run/a.jsonl", "run/b.jsonl"):
        client.put_object(Bucket="chats", Key=name, Body=LINE)
    client.put_object(Bucket="chats", Key="empty/a.jsonl", Body=b"")
    yield url
    server.stop()


def _data(path: str, endpoint: str) -> DataSettings:
    return DataSettings(path=path, storage_options={"endpoint_url": endpoint, "use_listings_cache": False})


def test_objects_prefixes_and_patterns(endpoint) -> None:
    for path, count in (("s3://chats/run", 2), ("s3://chats/run/a.jsonl", 1), ("s3://chats/run/*.jsonl", 2)):
        data, tokenizer = _data(path, endpoint), chat_tokenizer()
        items = list(read_samples(data, ChatSettings(), tokenizer, max_length=64, vocab_size=tokenizer.vocab_size))
        assert len(items) == count
        assert all(isinstance(item, Sample) for item in items)
        assert items[0].source.file == "s3://chats/run/a.jsonl"
        assert input_files(data)[0].sha256() == hashlib.sha256(LINE).hexdigest()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("s3://chats/none.jsonl", "no such object or folder"),
        ("s3://nobucket/none.jsonl", "no such object or folder"),
        ("s3://chats/none*.jsonl", "no object matches this pattern"),
        ("s3://chats/empty/a.jsonl", "the file is empty"),
    ],
)
def test_objects_that_cannot_be_used(endpoint, path, text) -> None:
    with pytest.raises(InputDataError, match=text) as caught:
        input_files(_data(path, endpoint))
    assert path in str(caught.value)


def test_server_that_does_not_answer(endpoint) -> None:
    with pytest.raises(InputDataError, match=r"cannot be reached: .*check the URL"):
        input_files(DataSettings(path="s3://chats/run", storage_options={"endpoint_url": "http://127.0.0.1:9"}))
