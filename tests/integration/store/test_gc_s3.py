"""gc, tags and diff on an object store."""

import time
import uuid

import pytest

from extract_core.reader import HiddenStatesDataset
from extract_core.store import layout
from extract_core.store.diff import diff
from extract_core.store.gc import Policy, collect, survey
from extract_core.store.root import Root
from extract_core.store.tags import list_tags, open_ref, write_tag
from extract_core.store.verify import verify
from extract_core.store.versions import list_versions, read_manifest
from tests.unit.store.versions_kit import fingerprint_of, publish_plan

pytestmark = pytest.mark.integration


@pytest.fixture
def root(s3_options, tmp_path):
    root = Root.open(f"s3://bucket/{uuid.uuid4().hex}/data", s3_options)
    for plan, seeds in ((1, (1, 2)), (2, (2, 3)), (3, (3, 4))):
        publish_plan(root, tmp_path / "spool", plan, seeds)
    return root


def later():
    return time.time() + 7200


def test_listing(root):
    entries = root.entries("")
    assert {entry.path for entry in entries} >= {"latest.json", layout.manifest_path(1)}
    assert root.entries("versions") == [entry for entry in entries if entry.path.startswith("versions/")]
    assert all(abs(entry.mtime - time.time()) < 300 and entry.nbytes > 0 for entry in entries)
    assert root.modified("latest.json") == next(entry.mtime for entry in entries if entry.path == "latest.json")
    assert root.modified("none") is None and root.entries("none") == []


def test_gc(root):
    write_tag(root, "good", 1)
    assert survey(root, Policy(1, 3600)).items == []  # all young
    dry = survey(root, Policy(1, 3600), now=later())
    assert [item.version for item in dry.of("version")] == [2] and list_versions(root) == [1, 2, 3]
    done = collect(root, Policy(1, 3600), now=later())
    assert {item.path for item in done.items} == {item.path for item in dry.items}
    assert list_versions(root) == [1, 3] and fingerprint_of(2) not in root.list(layout.PLANS)
    assert all(verify(root, version).ok for version in (1, 3))
    assert collect(root, Policy(1, 3600), now=later()).items == []
    assert len(root.list(layout.SHARDS)) == 4 and root.list(layout.TAGS) == ["good.json"]


def test_unfinished_uploads(root):
    fs, prefix = root._open_remote()
    bucket, key, _ = fs.split_path(prefix)
    for name in (f"{key}/shards/x", f"{key}-other/shards/y"):  # the second is another dataset's
        fs.call_s3("create_multipart_upload", Bucket=bucket, Key=name)
    assert [upload.path for upload in root.unfinished_uploads()] == ["shards/x"]
    if root.unfinished_uploads()[0].mtime is None or root.unfinished_uploads()[0].mtime > later():
        pytest.skip("this server does not say when an upload began")
    assert [item.kind for item in collect(root, Policy(grace_s=3600), now=later()).items] == ["upload"]
    assert root.unfinished_uploads() == []
    left = fs.call_s3("list_multipart_uploads", Bucket=bucket)["Uploads"]
    assert [item["Key"] for item in left] == [f"{key}-other/shards/y"]


def test_tags_and_diff(root, s3_options):
    write_tag(root, "good", 2)
    assert list_tags(root) == {"good": 2}
    assert open_ref(f"{root.url}@good", s3_options)[1] == 2
    other, version = open_ref(f"{root.url}@none", s3_options)
    assert other.url == f"{root.url}@none" and version is None
    assert HiddenStatesDataset(root.url, version="good", storage_options=s3_options).manifest.version == 2
    result = diff((root, read_manifest(root, 1)), (root, read_manifest(root, 2)))
    assert result.shards["shared"] == 1 and {n: g.count for n, g in result.samples.items() if g.count} == {
        "added": 2,
        "removed": 2,
        "source": 2,
    }
