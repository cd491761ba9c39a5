"""A large index is read by parts: the same samples, and every part that is not as it was written is noticed."""

import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from extract_core.errors import CorruptDataError
from extract_core.reader import HiddenStatesDataset
from extract_core.store import index as module
from extract_core.store import layout
from extract_core.store.index import INDEX_SCHEMA, open_index, read_index, write_index
from extract_core.store.indexparts import IndexParts
from extract_core.store.records import IndexRef
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import read_manifest
from tests.unit.store.kit import make_dataset

GROUP = 3


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A version of twelve samples in row groups of three, none of which is small enough to be read whole."""
    monkeypatch.setattr(module, "_WHOLE", 0)
    monkeypatch.setattr(module, "_GROUP_SAMPLES", GROUP)
    root = Root.open(str(tmp_path / "data"))
    manifest, known = make_dataset(root, tmp_path / "spool", shards=3)
    return root, manifest, known


def parts_of(root, manifest) -> IndexParts:
    found = open_index(root, manifest)
    assert isinstance(found, IndexParts)
    return found


def test_the_same_samples(made):
    root, manifest, known = made
    whole, parts = read_index(root, manifest), parts_of(root, manifest)
    assert parts.num_rows == whole.num_rows == 12 and parts.column_names == whole.column_names
    assert pa.concat_tables(parts.tables()).equals(whole)
    assert parts.take([11, 0, 5]).equals(whole.take([11, 0, 5]))
    assert parts.slice(2, 3).equals(whole.slice(2, 3)) and parts.slice(11, 5).num_rows == 1
    assert parts.take([]).schema.equals(INDEX_SCHEMA)
    for name in INDEX_SCHEMA.names:
        assert parts.column(name).equals(whole.column(name)), name
    with pytest.raises(IndexError, match="sample 12 of 12"):
        parts.take([12])
    items = [item["sample_id"] for item in HiddenStatesDataset(root.url)]
    assert items == list(known) and verify(root).problems == []


def test_a_split_and_a_pickle(made):
    root, _, known = made
    data = HiddenStatesDataset(root.url, split="test")
    ids = [name for name in known if name.endswith("-1")]
    for some in (data, pickle.loads(pickle.dumps(data))):
        assert [item["sample_id"] for item in some] == ids == some.index.column("sample_id").to_pylist()
        assert len(some) == 3
    assert len(pickle.dumps(data.index)) < 60_000


def test_only_what_is_asked_for_is_read(made, monkeypatch):
    root, manifest, _ = made
    asked = []
    plain = Root.read_range

    def counting(self, rel, start, stop):
        asked.append(stop - start)
        return plain(self, rel, start, stop)

    parts = parts_of(root, manifest)
    monkeypatch.setattr(Root, "read_range", counting)
    for position in (4, 3, 5, 4):
        parts.take([position])
    assert len(asked) == 1 and asked[0] < manifest.index.nbytes / 3, "one request for the samples of a row group"
    asked.clear()
    parts.column("split")
    assert len(asked) == 4 and sum(asked) < manifest.index.nbytes / 20


def test_every_flip_is_noticed(made):
    """Whatever byte it is in, but for the four that begin every Parquet file."""
    root, manifest, _ = made
    path = root.local_path(manifest.index.path)
    sound = path.read_bytes()
    for at in [*range(4, 1500, 3), *range(1500, len(sound), 17)]:
        flipped = bytearray(sound)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(CorruptDataError, match=path.stem):
            list(parts_of(root, manifest).tables())
    path.write_bytes(sound[:-1])
    with pytest.raises(CorruptDataError, match=rf"expected {len(sound)} bytes, found {len(sound) - 1}"):
        HiddenStatesDataset(root.url)
    path.unlink()
    with pytest.raises(CorruptDataError, match="of version 1 is missing"):
        HiddenStatesDataset(root.url)


def test_a_damaged_part_leaves_the_others_readable(made):
    root, manifest, known = made
    path = root.local_path(manifest.index.path)
    data = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(1).column(6)
    data[chunk.data_page_offset + 5] ^= 4
    path.write_bytes(data)
    dataset = HiddenStatesDataset(root.url)
    assert dataset[0]["sample_id"] == next(iter(known)) and dataset[11]["sample_id"] == list(known)[11]
    with pytest.raises(CorruptDataError, match=r"column token_ids.* of row group 1 has xxh3"):
        dataset[GROUP]


def test_an_index_without_checksums_is_read_whole(made):
    """As older Coresamples wrote it."""
    root, manifest, _ = made
    table = read_index(root, manifest)
    path = root.local_path("indexes/older")
    pq.write_table(table, path, compression="zstd", row_group_size=4096)
    digest = module.hashlib.sha256(path.read_bytes()).hexdigest()
    ref = IndexRef(path=layout.index_path(digest), sha256=digest, nbytes=path.stat().st_size, rows=table.num_rows)
    path.rename(root.local_path(ref.path))
    found = open_index(root, manifest.model_copy(update={"index": ref}))
    assert isinstance(found, pa.Table) and found.equals(table)


def test_however_the_samples_come(made, monkeypatch):
    """The same samples are the same file; row groups end at so many samples or tokens."""
    root, manifest, _ = made
    table = read_index(root, manifest)
    assert write_index(root, iter([table.slice(n, 1) for n in range(12)])) == manifest.index
    assert write_index(root, iter([table.slice(0, 7), table.slice(7, 0), table.slice(7)])) == manifest.index
    monkeypatch.setattr(module, "_GROUP_SAMPLES", 100)
    lengths = table.column("n_tokens").to_pylist()
    for most in (1, 9, 20, 10**6):
        monkeypatch.setattr(module, "_GROUP_TOKENS", most)
        ref = write_index(root, (table.slice(n, 5) for n in range(0, 12, 5)))
        assert ref.rows == 12 and ref == write_index(root, table)
        meta = pq.read_metadata(root.local_path(ref.path))
        sizes = [meta.row_group(n).num_rows for n in range(meta.num_row_groups)]
        left, expected = lengths, []
        while left:
            count = max(1, sum(sum(left[: n + 1]) <= most for n in range(len(left))))
            expected.append(count)
            left = left[count:]
        assert sizes == expected
    empty = write_index(root, iter(()))
    assert empty.rows == 0 and read_manifest(root).index == manifest.index


def test_an_empty_index(made):
    root, manifest, _ = made
    empty = manifest.model_copy(update={"index": write_index(root, INDEX_SCHEMA.empty_table())})
    parts = parts_of(root, empty)
    assert parts.num_rows == 0 and parts.column("split").to_pylist() == [] and list(parts.tables()) == []
    assert read_index(root, empty).num_rows == 0
