import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from extract_core.errors import CorruptDataError, SettingsError, StoreError
from extract_core.reader import HiddenStatesDataset
from extract_core.store.commits import read_commits
from extract_core.store.records import FinalNormRef, Manifest
from extract_core.store.root import Root
from extract_core.store.shard import HEADER_BYTES, ShardReader
from extract_core.store.versions import publish, read_manifest
from tests.unit.store.kit import FINGERPRINT, HIDDEN, LAYERS, attempt, build_manifest, make_dataset, make_norm


@pytest.fixture
def made(tmp_path):
    root = Root.open(str(tmp_path / "data"))
    _, known = make_dataset(root, tmp_path / "spool")
    return root, known


def same(item, sample):
    assert item["sample_id"] == sample.sample_id
    assert item["input_ids"].dtype == item["loss_mask"].dtype == torch.int64
    assert item["input_ids"].tolist() == sample.tokens.tolist()
    assert item["loss_mask"].tolist() == sample.mask.tolist()
    assert torch.equal(item["hidden_states"], sample.hidden)


def test_whole_samples(made):
    root, known = made
    data = HiddenStatesDataset(root.url)
    assert len(data) == len(known) == 8
    assert data.layer_ids == list(LAYERS)
    for item, sample in zip(data, known.values(), strict=True):
        same(item, sample)
    same(data[-1], list(known.values())[-1])
    with pytest.raises(IndexError):
        data[8]


def test_sample_in_one_piece_is_not_copied(made):
    root, _ = made
    data = HiddenStatesDataset(root.url)
    alone = data[3]["hidden_states"]
    assert alone.data_ptr() == data[3]["hidden_states"].data_ptr()
    before = alone.clone()
    alone.zero_()
    assert torch.equal(HiddenStatesDataset(root.url)[3]["hidden_states"], before)


def test_choices(made):
    root, known = made
    sample = list(known.values())[1]
    some = HiddenStatesDataset(root.url, layers=[6, 2], dtype=torch.float32)[1]["hidden_states"]
    assert torch.equal(some, sample.hidden[:, [2, 0]].float())
    assert len(HiddenStatesDataset(f"{root.url}@1", split="test")) == 2
    assert len(HiddenStatesDataset(Path(root.url), version=1)) == 8
    for arguments, kind, message in (
        ({"split": "dev"}, SettingsError, r"no split 'dev'; it has \['test', 'train'\]"),
        ({"layers": [3]}, SettingsError, r"layers \[3\] are not in"),
        ({"version": "newest"}, SettingsError, "neither a number"),
        ({"version": 3}, StoreError, "no version 3"),
    ):
        with pytest.raises(kind, match=message):
            HiddenStatesDataset(root.url, **arguments)


LOADER = """
import sys
import torch
from torch.utils.data import DataLoader
from extract_core.reader import HiddenStatesDataset

if __name__ == "__main__":
    root, context, result = sys.argv[1:]
    data = HiddenStatesDataset(root)
    data[0]  # an open shard in the parent must not matter
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=context)
    torch.save([{**item, "hidden_states": item["hidden_states"].clone()} for item in loader], result)
"""


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers(made, context, tmp_path):
    """In a process of its own: forking one that holds the threads and locks of every test before is a trap."""
    root, known = made
    result = tmp_path / "items.pt"
    command = [sys.executable, "-c", LOADER, root.url, context, str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for item, sample in zip(torch.load(result, weights_only=True), known.values(), strict=True):
        same(item, sample)


def test_pickled(made):
    root, known = made
    data = HiddenStatesDataset(root.url)
    data[0]
    same(pickle.loads(pickle.dumps(data))[0], next(iter(known.values())))


def test_damage_names_shard_and_sample(made):
    root, _ = made
    shard = read_manifest(root).shards[0]
    path = Path(root.url) / shard.path
    sound = path.read_bytes()

    def damaged(data, position=0):
        path.write_bytes(data)
        with pytest.raises(CorruptDataError, match=rf"sample s0-.*{shard.sha256}") as caught:
            HiddenStatesDataset(root.url)[position]
        return str(caught.value)

    flipped = bytearray(sound)
    flipped[HEADER_BYTES + 3] ^= 128
    assert "rows 0..4" in damaged(flipped)
    path.write_bytes(flipped)
    HiddenStatesDataset(root.url, verify=False)[0]
    HiddenStatesDataset(root.url)[3]  # another sample of the same shard is sound
    assert "expected from its header" in damaged(sound[:-1])
    assert "header has layers" in damaged(sound.replace(b'"BF16"', b'"F16" '))  # same bytes, read as another type
    assert "header has layers" in damaged(sound.replace(b"[2, 4, 6]", b"[2, 4, 5]"))
    path.unlink()
    with pytest.raises(CorruptDataError, match=r"s0-1.*is missing"):
        HiddenStatesDataset(root.url)[0]


def test_final_norm_turns_rows_of_the_last_layer_into_what_lm_head_reads(made):
    root, known = made
    data = HiddenStatesDataset(root.url)
    theirs = torch.nn.RMSNorm(HIDDEN, eps=1e-5)
    theirs.weight.data = torch.from_numpy(make_norm().weight)
    for norm in (data.final_norm, pickle.loads(pickle.dumps(data)).final_norm):
        rows = data[0]["hidden_states"][:, -1]
        torch.testing.assert_close(norm.apply(rows), theirs(rows.float()).detach())
    root.delete(data.manifest.final_norm.path)
    assert data.final_norm is data.final_norm
    fresh = HiddenStatesDataset(root.url)
    assert len(fresh) == len(known)  # a lost norm does not keep anybody from the rows
    with pytest.raises(CorruptDataError, match="final norm .* is missing"):
        _ = fresh.final_norm


def test_a_version_without_a_known_norm_says_why(made):
    root, _ = made
    commits, index = read_commits(root, FINGERPRINT), read_manifest(root).index

    def published(**change) -> HiddenStatesDataset:
        who = attempt()

        def build(number: int) -> Manifest:
            return build_manifest(number, who, commits, index).model_copy(update=change)

        return HiddenStatesDataset(root.url, version=publish(root, build, who).version)

    for data, why in (
        (published(final_norm=FinalNormRef(kind="unknown", reason="no formula fits")), "no formula fits"),
        (published(final_norm=None), "a Coresample that did not keep norms"),
    ):
        with pytest.raises(SettingsError, match=rf"has no final norm: .*{why}; apply the model's own"):
            _ = data.final_norm
    rows = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    none = published(final_norm=FinalNormRef(kind="none")).final_norm
    assert torch.equal(none.apply(rows), rows.float())


def test_shard_reader_of_a_published_shard(made):
    root, known = made
    shard = read_manifest(root).shards[0]
    reader = ShardReader(Path(root.url) / shard.path)
    assert reader.header.rows == shard.rows
    assert torch.equal(reader.rows(0, 4), next(iter(known.values())).hidden[:4])
