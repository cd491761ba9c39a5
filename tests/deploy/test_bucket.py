"""docker/make_bucket.py, as the service `bucket` of the compose file runs it."""

import os
import subprocess
import sys

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.deploy import kit


@pytest.fixture
def store():
    """A store, with the environment that compose gives its clients."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    filled = dict.fromkeys(("PREFECT_AUTH_STRING", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"), "x")
    given = kit.interpolate(kit.compose()["services"]["bucket"]["environment"], filled)
    yield os.environ | given | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    server.stop()


def make(environment):
    """Run the script."""
    command = [sys.executable, *kit.compose()["services"]["bucket"]["command"][1:]]
    return subprocess.run(command, env=environment, cwd=kit.ROOT, capture_output=True, text=True, check=False)


def test_the_bucket_is_made_once(store):
    for _ in range(2):
        done = make(store)
        assert (done.returncode, done.stdout) == (0, "bucket coresample is there\n"), done.stderr
    client = boto3.client(
        "s3",
        endpoint_url=store["AWS_ENDPOINT_URL"],
        aws_access_key_id="x",
        aws_secret_access_key="x",
        region_name="us-east-1",
    )
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["coresample"]


def test_a_store_that_refuses_is_told(store):
    done = make(store | {"BUCKET": "ab"})
    assert done.returncode == 1 and "cannot make bucket ab" in done.stderr
