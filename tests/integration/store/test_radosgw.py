"""The store on a real S3 server that is not moto: Ceph's radosgw."""

import hashlib
import os
import uuid

import pytest

from extract_core.store.gc import Policy, survey
from extract_core.store.publisher import sole_publisher
from extract_core.store.root import Root
from extract_core.store.verify import verify
from tests.faults.radosgw import RadosGateway, Unavailable
from tests.unit.store.kit import make_dataset, race_to_create

pytestmark = [pytest.mark.integration, pytest.mark.system, pytest.mark.slow]

MIB = 2**20


@pytest.fixture(scope="module")
def options():
    gateway = RadosGateway(device_bytes=2 * 2**30)
    try:
        gateway.start()
    except Unavailable as error:
        pytest.skip(str(error))
    try:
        gateway.make_bucket("bucket")
        yield gateway.options()
    finally:
        gateway.stop()


@pytest.fixture(params=["s3fs", "obstore"])
def root(request, options):
    return Root.open(f"s3://bucket/{uuid.uuid4().hex}", options, request.param)


@pytest.mark.parametrize("nbytes", [0, 1000, 8 * MIB, 8 * MIB + 1, 40 * MIB])
def test_uploads(root, tmp_path, nbytes):
    data = os.urandom(nbytes)
    path = tmp_path / "file"
    path.write_bytes(data)
    rel = f"shards/{hashlib.sha256(data).hexdigest()}.safetensors"
    root.put_file(path, rel)
    assert root.read_bytes(rel) == data
    if nbytes > 8 * MIB:
        assert root.read_range(rel, 8 * MIB - 5, 8 * MIB + 1) == data[8 * MIB - 5 : 8 * MIB + 1]
    bulk, why = root.bulk_client()
    assert bulk is None or bulk._failures == 0, why
    assert root.unfinished_uploads() == []


def test_exclusive_create(root):
    assert root.probe_exclusive() is True

    race_to_create(root, "versions/000001.json", 16)
    with sole_publisher(root):
        assert root.list("publishers") == []


def test_dataset(root, tmp_path):
    make_dataset(root, tmp_path / "spool")
    assert verify(root).problems == []
    assert survey(root, Policy()).items == []
