"""A large index on S3 is not fetched: opening a version and reading a sample are a few requests."""

import uuid

import pytest

from extract_core.reader import HiddenStatesDataset
from extract_core.store import index as module
from extract_core.store.root import Root
from tests.unit.store.kit import make_dataset

pytestmark = pytest.mark.integration


def test_a_sample_of_a_large_index(s3_options, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_WHOLE", 0)
    monkeypatch.setattr(module, "_GROUP_SAMPLES", 2)
    root = Root.open(f"s3://bucket/{uuid.uuid4().hex}", s3_options)
    manifest, known = make_dataset(root, tmp_path / "spool")
    asked = []
    plain = Root.read_range

    def counting(self, rel, start, stop):
        asked.append((rel, stop - start))
        return plain(self, rel, start, stop)

    monkeypatch.setattr(Root, "read_range", counting)
    data = HiddenStatesDataset(root.url, storage_options=s3_options)
    assert asked == [(manifest.index.path, manifest.index.nbytes)], "the end of the file, of which there is not more"
    asked.clear()
    item = data[5]
    assert item["sample_id"] == list(known)[5]
    (rel, size), *rows = asked
    assert rel == manifest.index.path and size < manifest.index.nbytes / 3
    assert len(rows) == 2 and all(path.startswith("shards/") for path, _ in rows)
    assert [item["sample_id"] for item in data] == list(known)
