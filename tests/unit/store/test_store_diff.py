import pytest

from extract_core.errors import CorruptDataError
from extract_core.store.diff import NAMES, diff
from extract_core.store.index import read_index
from extract_core.store.root import Root
from extract_core.store.versions import publish, read_manifest
from tests.unit.store.kit import attempt
from tests.unit.store.versions_kit import changed_index, publish_plan


@pytest.fixture
def root(tmp_path):
    root = Root.open(str(tmp_path / "data"))
    publish_plan(root, tmp_path / "spool", 1, (1, 2))
    return root


def manifest(root, version):
    return root, read_manifest(root, version)


def publish_changed(root, change, **fields):
    """A version whose index went through ``change``."""
    first = read_manifest(root, 1)
    index = changed_index(root, read_index(root, first), change)
    who = attempt()

    def build(version):
        tree = {**first.model_dump(), "version": version, "attempt": who, "index": index.model_dump(), **fields}
        tree["totals"]["samples"] = tree["accounting"]["published"] = index.rows
        tree["accounting"]["input"] = index.rows + 1
        return type(first).model_validate(tree)

    return publish(root, build, who).version


def counts(result):
    return {name: group.count for name, group in result.samples.items() if group.count}


def test_the_same(root, tmp_path):
    publish_plan(root, tmp_path / "spool", 2, (1, 2))
    result = diff(manifest(root, 1), manifest(root, 2))
    assert result.same and result.unchanged == 4 and counts(result) == {} and result.shards["shared"] == 2
    assert result.to_dict()["same"] is True


def test_added_and_removed(root, tmp_path):
    publish_plan(root, tmp_path / "spool", 2, (1, 3, 4))
    result = diff(manifest(root, 1), manifest(root, 2))
    # the samples of seed 2 and those of seed 3 come from the same rows of the input
    assert counts(result) == {"added": 2, "changed": 2} and result.unchanged == 2
    assert result.samples["changed"].first == ["s2-1 -> s3-1", "s2-2 -> s3-2"]
    assert result.samples["added"].first == ["s4-1", "s4-2"]
    assert result.shards["shared"] == 1 and result.shards["only_after"] == 2 and not result.same
    back = diff(manifest(root, 2), manifest(root, 1))
    assert counts(back) == {"removed": 2, "changed": 2}


def test_what_changed_of_a_sample(root):
    def change(rows):
        rows[0]["token_ids"][0] += 1
        rows[1]["loss_mask"][0] ^= 1
        rows[2]["split"] = "dev"
        rows[3]["segments"][0]["xxh3"] = "0" * 16
        rows[3]["source_row"] += 5
        return list(reversed(rows))

    publish_changed(root, change)
    result = diff(manifest(root, 1), manifest(root, 2))
    assert counts(result) == {"tokens": 1, "mask": 1, "split": 1, "values": 1, "source": 1}
    assert result.unchanged == 0 and result.not_compared == 0
    assert result.samples["values"].first == ["s2-2"]


def test_fields_and_values_that_cannot_be_compared(root):
    spec = {"model": {"name": "other"}, "tokenizer": {"template_sha256": "x"}}
    publish_changed(root, lambda rows: rows[::-1], spec=spec, dtype="float16", layer_ids=[1, 2, 4])
    result = diff(manifest(root, 1), manifest(root, 2))
    assert result.fields["dtype"] == ("bfloat16", "float16") and result.fields["layer_ids"] == ([2, 4, 6], [1, 2, 4])
    assert result.fields["spec.model.name"] == ("tiny", "other")
    assert result.fields["spec.tokenizer"] == (None, {"template_sha256": "x"})
    assert result.not_compared == 4 and result.unchanged == 0 and not result.same


def test_only_the_first_names(root):
    def change(rows):
        return [{**rows[0], "sample_id": f"n{n:02d}", "source_row": 1000 + n} for n in range(30)]

    publish_changed(root, change)
    group = diff(manifest(root, 1), manifest(root, 2)).samples["added"]
    assert group.count == 30 and group.first == [f"n{n:02d}" for n in range(NAMES)]


def test_empty_and_many_batches(root, monkeypatch):
    monkeypatch.setattr("extract_core.store.columns._ROWS", 1)
    publish_changed(root, lambda rows: rows[1:])
    result = diff(manifest(root, 1), manifest(root, 2))
    assert counts(result) == {"removed": 1} and result.unchanged == 3


def test_damage(root):
    publish_changed(root, lambda rows: rows[1:])
    path = root.local_path(read_manifest(root, 2).index.path)
    path.write_bytes(b"x" * 100)
    with pytest.raises(CorruptDataError, match=r"index .* cannot be read"):
        diff(manifest(root, 1), manifest(root, 2))
    path.unlink()
    with pytest.raises(CorruptDataError, match="of version 2 is missing"):
        diff(manifest(root, 1), manifest(root, 2))
