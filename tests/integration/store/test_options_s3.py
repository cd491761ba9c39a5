"""fsspec options of a root, each against a real server: both clients must talk to it as s3fs users expect."""

import json
import re
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta

import pytest

from extract_core.errors import RootError, StoreError
from extract_core.store import upload
from extract_core.store.root import Root
from tests.integration.store.servers import Faulty, client, serving

pytestmark = pytest.mark.integration

MIB = 2**20
DATA = bytes(range(256)) * (11 * MIB // 256)


@pytest.fixture(scope="module")
def server():
    app = Faulty()
    with serving(app) as options:
        yield app, options


@pytest.fixture
def endpoint(server, monkeypatch, tmp_path):
    """The server's address, in an environment that names no credentials."""
    app, options = server
    app.seen.clear()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr(upload, "PART_BYTES", 5 * MIB)
    return options["endpoint_url"]


def works(folder, options, client_name="obstore"):
    """Write, list and read through a root; gives it back."""
    root = Root.open(f"s3://bucket/{uuid.uuid4().hex}", options, client_name)
    assert root.probe_exclusive()
    source = folder / "file"
    source.write_bytes(DATA)
    root.put_file(source, "shards/x")
    assert root.list("shards") == ["x"]
    assert root.read_range("shards/x", 5, 9) == DATA[5:9]
    bulk, why = root.bulk_client()
    assert (bulk is not None) == (client_name == "obstore"), why
    assert bulk is None or bulk.usable
    return root


@pytest.mark.parametrize("client_name", ["s3fs", "obstore"])
@pytest.mark.parametrize(
    "where",
    [
        lambda url: {"endpoint_url": url},
        lambda url: {"client_kwargs": {"endpoint_url": url}},
        lambda url: {"client_kwargs": {"endpoint_url": url, "region_name": "eu-west-3"}},
        lambda url: {"endpoint_url": url, "config_kwargs": {"s3": {"addressing_style": "path"}}},
        lambda url: {"endpoint_url": url, "config_kwargs": {"signature_version": "s3v4"}},
        lambda url: {"endpoint_url": url, "requester_pays": True},
        lambda url: {"endpoint_url": url, "token": "session"},
    ],
    ids=["top", "client_kwargs", "region", "path", "signature", "requester", "token"],
)
def test_keys_and_endpoints(endpoint, tmp_path, client_name, where):
    works(tmp_path, {"key": "testing", "secret": "testing", **where(endpoint)}, client_name)


@pytest.mark.parametrize("client_name", ["s3fs", "obstore"])
def test_profile(endpoint, tmp_path, client_name):
    """Keys, region and endpoint all from a profile of the AWS configuration."""
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = ap-south-1\nendpoint_url = {endpoint}\ns3 =\n  addressing_style = path\n"
    )
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = labkey\naws_secret_access_key = labsecret\n")
    seen = credentials_seen(endpoint)
    root = works(tmp_path, {"profile": "lab"}, client_name)
    assert seen() == {"labkey/ap-south-1"}
    assert root.bulk_client()[1] is None


def credentials_seen(endpoint):
    """Access keys and regions that later requests are signed with."""
    found = set()
    app = _APPS[endpoint]

    def before(request):
        match = re.search(r"Credential=([^/]+)/\d+/([^/]+)/", request.environ.get("HTTP_AUTHORIZATION", ""))
        found.add("/".join(match.groups()) if match else "unsigned")

    app.before = before

    def end():
        app.before = None
        return found

    return end


_APPS = {}


@pytest.fixture(autouse=True)
def _known(server):
    _APPS[server[1]["endpoint_url"]] = server[0]


def test_environment_does_not_win_over_the_job(endpoint, tmp_path, monkeypatch):
    """obstore reads variables of its own accord: the job's endpoint, region and credentials must hold."""
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_REGION": "mars-1",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_ACCESS_KEY_ID": "other",
        "AWS_SECRET_ACCESS_KEY": "other",
    }.items():
        monkeypatch.setenv(name, value)
    seen = credentials_seen(endpoint)
    options = {"key": "mine", "secret": "mine", "endpoint_url": endpoint}
    works(tmp_path, {**options, "client_kwargs": {"region_name": "us-east-2"}})
    assert seen() == {"mine/us-east-2"}


def test_keys_of_the_environment(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "envkey")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "envsecret")
    seen = credentials_seen(endpoint)
    works(tmp_path, {"endpoint_url": endpoint})
    assert {item.partition("/")[0] for item in seen()} == {"envkey"}


VIRTUAL = """
import json, sys
from pathlib import Path
from extract_core.store import upload
from tests.integration.store.test_options_s3 import works

upload.PART_BYTES = 5 * 2**20
works(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.parametrize("client_name", ["s3fs", "obstore"])
def test_virtual_hosts(endpoint, server, tmp_path, client_name):
    """The bucket in the host name, which the machine must resolve: the child has a hosts file of its own."""
    app, _ = server
    (tmp_path / "hosts").write_text("127.0.0.1 localhost store.test bucket.store.test\n")
    options = {"key": "testing", "secret": "testing", "endpoint_url": endpoint.replace("127.0.0.1", "store.test")}
    options["config_kwargs"] = {"s3": {"addressing_style": "virtual"}}
    script = 'mount --bind "$1" /etc/hosts && exec "$2" -c "$3" "$4" "$5" "$6"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(tmp_path / "hosts")]
    arguments = [sys.executable, VIRTUAL, str(tmp_path), json.dumps(options), client_name]
    hosts = []

    app.before = lambda request: hosts.append(request.environ["HTTP_HOST"].partition(":")[0])
    try:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    finally:
        app.before = None
    if done.returncode and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert set(hosts) == {"bucket.store.test"}


@pytest.mark.parametrize("client_name", ["s3fs", "auto"])
def test_anonymous_reading_of_a_public_bucket(endpoint, server, client_name):
    _, options = server
    admin = client(options)
    admin.put_object(Bucket="bucket", Key="public/versions/000001.json", Body=b"hello", ACL="public-read")
    seen = credentials_seen(endpoint)
    root = Root.open("s3://bucket/public", {"anon": True, "endpoint_url": endpoint}, client_name)
    assert root.read_bytes("versions/000001.json") == b"hello"
    assert root.list("versions") == ["000001.json"]
    assert root.read_range("versions/000001.json", 1, 3) == b"el"
    assert seen() == {"unsigned"}


@pytest.mark.parametrize("client_name", ["s3fs", "obstore"])
def test_anonymous_writing(endpoint, server, tmp_path, client_name):
    admin = client(server[1])
    all_of_it = {"Effect": "Allow", "Principal": "*", "Action": "s3:*"}
    policy = {"Version": "2012-10-17", "Statement": [{**all_of_it, "Resource": ["arn:aws:s3:::bucket/*"]}]}
    admin.put_bucket_policy(Bucket="bucket", Policy=json.dumps(policy))
    seen = credentials_seen(endpoint)
    try:
        works(tmp_path, {"anon": True, "endpoint_url": endpoint}, client_name)
    finally:
        admin.delete_bucket_policy(Bucket="bucket")
    assert "unsigned" in seen()
    assert not any(item.startswith("testing/") for item in seen() - {"testing/us-east-1"})


def test_credentials_that_run_out_are_renewed_for_obstore_too(endpoint, tmp_path):
    """A profile whose keys come from a program: they expire, and the program is asked again."""
    count = tmp_path / "count"
    program = tmp_path / "keys.sh"
    soon = (datetime.now(UTC) + timedelta(seconds=30)).isoformat()  # less than botocore's 10 minutes: always renewed
    answer = {"Version": 1, "AccessKeyId": "KEY", "SecretAccessKey": "s", "SessionToken": "t", "Expiration": soon}
    program.write_text(
        f"#!/bin/sh\necho x >> {count}\nn=$(wc -l < {count})\ncat <<EOF\n"
        + json.dumps(answer).replace("KEY", "key$n")
        + "\nEOF\n"
    )
    program.chmod(0o755)
    (tmp_path / "config").write_text(f"[profile lab]\nregion = us-east-1\ncredential_process = {program}\n")
    seen = credentials_seen(endpoint)
    works(tmp_path, {"profile": "lab", "endpoint_url": endpoint})
    keys = {item.partition("/")[0] for item in seen()}
    assert len(keys) >= 2
    assert all(key.startswith("key") for key in keys)


@pytest.mark.parametrize(
    ("code", "status", "advice"),
    [
        ("ExpiredToken", 400, "expired: renew"),
        ("RequestTimeTooSkewed", 403, "clocks"),
        ("InvalidAccessKeyId", 403, "access key"),
        ("SignatureDoesNotMatch", 403, "secret key"),
        ("AccessDenied", 403, "permissions"),
    ],
)
def test_what_is_wrong_with_the_credentials_is_said_at_once(server, endpoint, tmp_path, code, status, advice):
    def refuse(environ, start_response):
        length = int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"].read(length)
        asked.append(environ["REQUEST_METHOD"])
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        start_response(f"{status} No", headers)
        return [body]

    asked = []
    app = _APPS[endpoint]
    old, app.app = app.app, refuse
    try:
        root = Root.open("s3://bucket/x", {"key": "a", "secret": "b", "endpoint_url": endpoint})
        with pytest.raises(StoreError, match=advice) as caught:
            root.put_bytes("x", b"1")
        assert isinstance(caught.value, RootError)
        assert asked == ["PUT"]  # not tried again
        with pytest.raises(StoreError, match=advice):
            root.create_exclusive("x", b"1")
    finally:
        app.app = old
