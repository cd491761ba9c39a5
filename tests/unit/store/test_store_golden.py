"""Datasets that earlier versions of Coresample wrote, read with the present one; scripts/golden.py made them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

from extract_core.cli import app
from extract_core.reader import HiddenStatesDataset
from extract_core.store import records
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import read_manifest

GOLDEN = Path(__file__).parents[2] / "golden"
SCHEMAS = Path(records.__file__).parent / "schemas"
DATASETS = sorted(GOLDEN.glob("schema-*"))
NAMES = [folder.name for folder in DATASETS]

golden = pytest.mark.parametrize("folder", DATASETS, ids=NAMES)


def schema_of(kind: str, tree: dict) -> dict:
    return json.loads((SCHEMAS / f"{kind}-{tree['schema_version']}.json").read_text("utf-8"))


def as_json(*arguments: object) -> dict:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_every_schema_version_has_a_dataset() -> None:
    found = {json.loads(next(f.glob("dataset/versions/*.json")).read_text("utf-8"))["schema_version"] for f in DATASETS}
    assert found == set(range(1, records.Manifest.newest + 1))


@golden
def test_rows_are_those_that_were_written(folder: Path) -> None:
    expected, kept = np.load(folder / "rows.npy"), json.loads((folder / "rows.json").read_text("utf-8"))
    samples = {item["sample_id"]: item for item in HiddenStatesDataset(folder / "dataset")}
    assert list(samples) == kept["samples"]
    found = np.concatenate([samples[name]["hidden_states"][: kept["positions"]].float().numpy() for name in samples])
    assert found.dtype == expected.dtype and np.array_equal(found, expected)
    assert all(len(item["input_ids"]) == len(item["hidden_states"]) for item in samples.values())


@golden
def test_it_verifies(folder: Path) -> None:
    report = verify(Root.open(str(folder / "dataset")))
    assert report.ok, report.problems
    assert (report.samples, report.shards) == (4, 2)


@golden
def test_records_fit_their_json_schema(folder: Path) -> None:
    for pattern, kind in (("versions/*.json", "manifest"), ("plans/*/commits/*.json", "commit-record")):
        files = list((folder / "dataset").glob(pattern))
        assert files
        for file in files:
            tree = json.loads(file.read_text("utf-8"))
            jsonschema.validate(tree, schema_of(kind, tree), cls=jsonschema.Draft202012Validator)
            tree["surprise"] = 1
            with pytest.raises(jsonschema.ValidationError, match="surprise"):
                jsonschema.validate(tree, schema_of(kind, tree), cls=jsonschema.Draft202012Validator)


@golden
def test_commands_show_it(folder: Path) -> None:
    root = folder / "dataset"
    manifest = read_manifest(Root.open(str(root)), 1)
    shown = as_json("inspect", root, "--sample", 0)
    assert shown["sample"]["sample_id"] == json.loads((folder / "rows.json").read_text("utf-8"))["samples"][0]
    (version,) = as_json("versions", root)["versions"]
    assert (version["samples"], version["layer_ids"]) == (4, [1, 2, 4])
    (plan,) = as_json("status", root)["plans"]
    assert (plan["fingerprint"], plan["quarantined"], plan["shards_committed"]) == (manifest.fingerprint, 1, 2)
    assert plan["published_versions"] == [1]


@golden
@pytest.mark.parametrize("other", DATASETS, ids=NAMES)
def test_diff_between_schema_versions(folder: Path, other: Path) -> None:
    document = as_json("diff", f"{folder / 'dataset'}@1", f"{other / 'dataset'}@1")
    counts = {name: group["count"] for name, group in document["samples"].items()}
    assert not any(counts.values()), counts
    alike = folder.name.partition("-bf16")[1] == other.name.partition("-bf16")[1]  # encoded rows have other checksums
    assert (document["unchanged"], document["not_compared"]) == ((4, 0) if alike else (0, 4))


@golden
def test_damage_is_found(folder: Path, tmp_path: Path) -> None:
    root = shutil.copytree(folder / "dataset", tmp_path / "dataset")
    shard = next(root.glob("shards/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[80_000] ^= 1
    shard.write_bytes(data)
    assert not verify(Root.open(str(root))).ok
