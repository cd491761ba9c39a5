"""``verify --deep``: honest datasets pass, and wrong rows under right checksums do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extract_core import local
from extract_core.cli import app
from extract_core.settings import load_job
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import read_manifest
from tests import tiny
from tests.forge import Rows, forge

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

CHATS = 12


def call(*arguments: object, code: int = 0) -> dict:
    done = CliRunner().invoke(app, ["verify", *map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def dataset(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    job = tiny.write_job(
        folder / "job.yaml",
        model=tiny_model,
        chats=tiny.write_chats(folder / "chats.jsonl", CHATS, words=12),
        root=folder / "dataset",
        store={"shard_bytes": "300KiB", "dtype": "bfloat16", "encoding": "none"},
    )
    manifest = local.run(load_job(job)).manifest
    assert len(manifest.shards) > 1 and manifest.totals.samples == CHATS
    return folder / "dataset"


def test_an_honest_dataset_passes(dataset: Path) -> None:
    deep = call(dataset, "--deep", "--samples", 5, "--seed", 3)["deep"]
    assert deep["ok"] and deep["problems"] == [] and (deep["samples"], deep["seed"]) == (5, 3)
    assert [layer["layer"] for layer in deep["layers"]] == [1, 2, 4]
    for layer in deep["layers"]:
        assert layer["passed"] and layer["samples"] == 5 and layer["rows"] == deep["rows"]
        assert 0 <= layer["median_error"] <= layer["max_error"] < deep["tolerance"] < 0.01
        assert layer["equal_share"] > 0.9
    assert deep["next_token"]["same"] == deep["next_token"]["samples"] == 5
    assert deep["engine"]["vllm"] and deep["notes"] == []


def test_an_honest_dataset_in_a_bucket_passes(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="deep")
        for file in dataset.rglob("*"):
            if file.is_file() and ".spool" not in file.parts:
                client.upload_file(str(file), "deep", f"data/{file.relative_to(dataset)}")
        option = f"endpoint_url={endpoint}"
        deep = call("s3://deep/data", "--deep", "--samples", 2, "--storage-option", option)["deep"]
        assert deep["ok"] and deep["samples"] == 2
    finally:
        server.stop()


def test_wrong_rows_under_right_checksums_fail(dataset: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(dataset, tmp_path / "forged"))
    wrong: dict[str, str] = {}

    def change(rows: Rows) -> None:
        shifted, a, b, layers, row, swapped, *right = sorted(rows)
        rows[shifted][1:] = rows[shifted][:-1].copy()
        common = min(len(rows[a]), len(rows[b]))
        rows[a][:common], rows[b][:common] = rows[b][:common].copy(), rows[a][:common].copy()
        rows[layers][:, [0, 1]] = rows[layers][:, [1, 0]]
        rows[row][len(rows[row]) // 2, 2] = 0
        rows[swapped][[30, 31]] = rows[swapped][[31, 30]]
        wrong.update({shifted: "shifted", a: "a", b: "b", layers: "layers", row: "row", swapped: "swapped"})
        assert right

    engine = {**read_manifest(Root.open(str(root)), None).spec["engine"], "vllm": "0.1.0"}
    forge(root, change, {"engine": engine})
    assert verify(Root.open(str(root))).ok
    names = {kind: sample for sample, kind in wrong.items()}
    deep = call(root, "--deep", "--samples", 999, code=1)["deep"]
    assert not deep["ok"] and deep["samples"] == CHATS

    def said(kind: str) -> str:
        return "\n".join(text for text in deep["problems"] if text.startswith(f"sample {names[kind]},"))

    assert "is that of the position before it" in said("shifted")
    assert f"rows are those of sample {names['b']}" in said("a")
    assert f"rows are those of sample {names['a']}" in said("b")
    assert "layer 1: rows differ" in said("layers") and "layer 2: rows differ" in said("layers")
    assert "layer 4" not in said("layers") and said("row").startswith(f"sample {names['row']}, layer 4: row ")
    assert "is that of the position after it" in said("swapped")
    assert {text.split(",")[0].removeprefix("sample ") for text in deep["problems"]} == set(wrong)
    assert [layer["passed"] for layer in deep["layers"]] == [False] * 3
    assert len(deep["notes"]) == 1 and "0.1.0 made the rows" in deep["notes"][0]


def test_another_model_is_refused_and_a_moved_one_is_found(
    dataset: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((other / "config.json").read_text("utf-8"))
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}), encoding="utf-8")
    (other / "added.json").write_text("{}", encoding="utf-8")
    error = call(dataset, "--deep", "--model", other, code=2)["error"]
    assert "added.json (is new), config.json (has other content)" in error["message"]

    root = Path(shutil.copytree(dataset, tmp_path / "moved"))
    manifest = read_manifest(Root.open(str(root)), None)
    moved = {"model": {**manifest.spec["model"], "name": str(tmp_path / "gone")}}
    forge(root, lambda rows: None, moved)
    error = call(root, "--deep", code=2)["error"]
    assert "does not exist" in error["message"] and "Give --model" in error["message"]
    deep = call(root, "--deep", "--samples", 1, "--model", tiny_model, "--set", "engine.kv_cache_bytes=64MiB")["deep"]
    assert deep["ok"]
