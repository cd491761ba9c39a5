import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from extract_core.errors import StoreError
from extract_core.store import layout
from extract_core.store.commits import read_commits
from extract_core.store.index import INDEX_SCHEMA, write_index
from extract_core.store.norms import StoredNorm, write_norm
from extract_core.store.root import Root
from extract_core.store.shard import HEADER_BYTES, ShardReader
from extract_core.store.verify import verify
from extract_core.store.versions import publish, read_manifest
from tests.unit.store.kit import FINGERPRINT, HIDDEN, attempt, build_manifest, index_table, make_dataset, make_shard


@pytest.fixture
def root(tmp_path):
    root = Root.open(str(tmp_path / "data"))
    make_dataset(root, tmp_path / "spool")
    return root


def flip(root: Root, rel: str, at: int) -> None:
    path = Path(root.url) / rel
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def texts(root):
    return [str(problem) for problem in verify(root).problems]


def test_sound(root):
    seen = []
    report = verify(root, on_progress=lambda done, total, name: seen.append((done, total, name)))
    assert report.ok
    assert report.problems == []
    manifest = read_manifest(root)
    assert (report.version, report.shards, report.samples) == (1, 2, 8)
    assert (report.tokens, report.segments) == (manifest.totals.tokens, 14)
    assert report.bytes_read == manifest.totals.bytes
    assert seen[-1][0] == seen[-1][1] == manifest.totals.bytes
    assert report.to_dict()["ok"] is True


def test_no_such_version(root):
    with pytest.raises(StoreError, match="no version 4"):
        verify(root, 4)


def test_flipped_row_names_every_sample_of_it(root):
    shard = read_manifest(root).shards[0]
    flip(root, shard.path, HEADER_BYTES + 10)  # the first rows are the prefix that three samples share
    problems = verify(root).problems
    assert {p.object for p in problems} == {shard.path}
    assert [p.what for p in problems if p.sample is None] == ["sha256 differs"]
    assert len({p.sample for p in problems if "xxh3 of rows 0..4" in p.what}) == 3


def test_flipped_token_id(root):
    shard = read_manifest(root).shards[1]
    header = ShardReader(Path(root.url) / shard.path).header
    flip(root, shard.path, header.tokens_offset + 4 * (header.rows - 1))
    found = texts(root)
    assert any("sha256 differs" in text for text in found)
    assert any(f"token id of row {header.rows - 1} differs from the index: expected" in text for text in found)
    assert not any("xxh3" in text for text in found)


@pytest.mark.parametrize("at", [0, 3, 9, 60, HEADER_BYTES - 1])
def test_flipped_header(root, at):
    shard = read_manifest(root).shards[0]
    flip(root, shard.path, at)
    assert any(text.startswith(f"{shard.path}: sha256 differs") for text in texts(root))


def test_cut_shard(root):
    shard = read_manifest(root).shards[0]
    os.truncate(Path(root.url) / shard.path, HEADER_BYTES + 500)
    found = texts(root)
    assert any("wrong size in bytes: expected" in text for text in found)
    assert any("lie outside the file" in text and "sample s0-" in text for text in found)


def test_missing_shard_and_flipped_other_are_both_listed(root):
    first, second = read_manifest(root).shards
    root.delete(first.path)
    flip(root, second.path, HEADER_BYTES)
    found = texts(root)
    assert any(f"{first.path}: shard is missing" in text for text in found)
    assert any(f"{second.path}: sha256 differs" in text for text in found)


def test_flipped_index(root):
    index = read_manifest(root).index
    flip(root, index.path, index.nbytes // 2)
    (text,) = texts(root)
    assert "is damaged: expected" in text
    root.delete(index.path)
    (text,) = texts(root)
    assert "is missing" in text


def test_flipped_norm(root):
    norm = read_manifest(root).final_norm
    flip(root, norm.path, norm.nbytes - 1)
    (text,) = texts(root)
    assert text.startswith(f"{norm.path}: final norm") and "is damaged: expected" in text
    root.delete(norm.path)
    (text,) = texts(root)
    assert text.startswith(norm.path) and text.endswith("is missing")


def test_norm_of_another_width(root):
    wide = write_norm(root, StoredNorm("rms", 1e-5, 0.0, np.ones(HIDDEN + 1, dtype=np.float32)), {})
    commits, index, who = read_commits(root, FINGERPRINT), read_manifest(root).index, attempt()
    publish(root, lambda n: build_manifest(n, who, commits, index, wide), who)
    (text,) = texts(root)
    assert wide.path in text and "hidden size" in text


def test_flipped_manifest(root):
    flip(root, layout.manifest_path(1), 300)
    (text,) = texts(root)
    assert "does not match its own checksum" in text or "is not JSON" in text


def test_index_that_lies(root, tmp_path):
    """An index with a sound digest but wrong content: every wrong thing is named."""
    commits = read_commits(root, FINGERPRINT)
    known = {s.sample_id: s for number in range(2) for s in make_shard(tmp_path / "again", 4, seed=number)[1]}
    rows = index_table(commits, known).to_pylist()
    rows[0]["token_ids"][1] += 1
    rows[1]["loss_mask"].pop()
    rows[2]["loss_mask"][0] = 7
    rows[3]["segments"][0]["xxh3"] = "0" * 16
    rows[4]["segments"][1]["byte_offset"] += 2
    rows[5]["segments"][1]["shard"] = "e" * 64
    rows[6]["sample_id"] = rows[0]["sample_id"]
    rows[7]["norm_mean"] = [1.0]
    index = write_index(root, pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    who = attempt()
    publish(root, lambda n: build_manifest(n, who, commits, index), who)
    found = "\n".join(texts(root))
    for expected in (
        "token id of row 1 differs from the index",
        "wrong number of loss_mask",
        "loss mask has values other than 0 and 1",
        "expected 0000000000000000",
        "byte range of rows",
        "refers to shard eeee",
        "sample is listed twice",
        "norm_mean is not one finite number per layer",
    ):
        assert expected in found
    assert verify(root, 1).ok


def test_segments_that_overlap(root, tmp_path):
    """Samples share a segment or nothing: one that begins a row early takes a row of another."""
    commits = read_commits(root, FINGERPRINT)
    known = {s.sample_id: s for number in range(2) for s in make_shard(tmp_path / "again", 4, seed=number)[1]}
    rows = index_table(commits, known).to_pylist()
    width = rows[0]["segments"][0]["byte_length"] // rows[0]["segments"][0]["rows"]
    rows[2]["segments"][1]["first_row"] -= 1
    rows[2]["segments"][1]["byte_offset"] -= width
    index = write_index(root, pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    who = attempt()
    publish(root, lambda n: build_manifest(n, who, commits, index), who)
    (found,) = [text for text in texts(root) if "overlaps another" in text]
    assert f"sample {rows[2]['sample_id']}" in found and f"of sample {rows[1]['sample_id']}" in found
