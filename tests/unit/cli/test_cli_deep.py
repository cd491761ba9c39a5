"""What ``verify --deep`` refuses before an engine is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extract_core.cli import app
from extract_core.store.root import Root
from extract_core.store.versions import read_manifest
from scripts import golden
from tests.forge import forge
from tests.unit.store.kit import make_dataset

GOLDEN = Path(__file__).parents[2] / "golden" / "schema-2" / "dataset"


def refusal(*arguments: object, code: int = 2) -> str:
    done = CliRunner().invoke(app, ["verify", *map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)["error"]["message"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden.make_model(tmp_path_factory.mktemp("golden") / "model")


@pytest.mark.parametrize(
    "option", [("--samples", 3), ("--seed", 1), ("--model", "x"), ("--set", "engine.a=1"), ("--trust-remote-code",)]
)
def test_options_of_deep_alone(option: tuple[object, ...]) -> None:
    assert refusal(GOLDEN, *option) == f"{option[0]} is an option of --deep; add --deep, or leave it out"


def test_settings_that_are_not_of_this_machine(model: Path) -> None:
    assert "only engine settings" in refusal(GOLDEN, "--deep", "--set", "layers=2")
    message = refusal(GOLDEN, "--deep", "--model", model, "--set", "engine.quantization=fp8")
    assert "engine.quantization cannot be set here" in message and "gpu_memory_utilization" in message
    assert "engine.kv_cache_bytes" in refusal(GOLDEN, "--deep", "--model", model, "--set", "engine.kv_cache_bytes=no")


def test_a_model_that_is_gone_or_another(model: Path, tmp_path: Path) -> None:
    assert "config.json" in refusal(GOLDEN, "--deep", "--model", tmp_path)
    other = Path(shutil.copytree(model, tmp_path / "other"))
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    assert "model.safetensors (has other content)" in refusal(GOLDEN, "--deep", "--model", other)


def test_memory_that_does_not_suffice(model: Path) -> None:
    message = refusal(GOLDEN, "--deep", "--model", model, "--set", "engine.kv_cache_bytes=1KiB")
    assert "does not fit" in message and "kv_cache_bytes" in message


def test_code_of_the_model_runs_only_where_it_is_allowed(model: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(GOLDEN, tmp_path / "dataset"))
    forge(root, lambda rows: None, {"trust_remote_code": True})
    assert "--trust-remote-code" in refusal(root, "--deep", "--model", model)


def test_a_version_that_no_job_made(tmp_path: Path) -> None:
    make_dataset(Root.open(str(tmp_path / "data")), tmp_path / "spool")
    assert "does not say which model and engine made it" in refusal(tmp_path / "data", "--deep")


def test_damage_comes_first(tmp_path: Path) -> None:
    root = Path(shutil.copytree(GOLDEN, tmp_path / "dataset"))
    shard = root / read_manifest(Root.open(str(root)), 1).shards[0].path
    data = bytearray(shard.read_bytes())
    data[80_000] ^= 1
    shard.write_bytes(data)
    done = CliRunner().invoke(app, ["verify", str(root), "--deep", "--json"])
    document = json.loads(done.stdout)
    assert done.exit_code == 1 and document["deep"] is None and document["problems"]
    assert "No rows were extracted again" in CliRunner().invoke(app, ["verify", str(root), "--deep", "-q"]).stdout
