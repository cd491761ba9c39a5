"""Requests carry the engine's block hashes, and the self-test cuts prefills into chunks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from extract_core.engine.compat import engine_environment
from extract_core.engine.preflight import Probe, preflight
from extract_core.engine.protocol import EngineSpec
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.errors import PreflightError

from . import saboteur

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SABOTEUR = {"worker_cls": "tests.integration.engine.saboteur.Saboteur"}


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> EngineSpec:
    return EngineSpec(
        model=str(tiny_model),
        layer_ids=[1, 2, 4],
        max_model_len=500,
        dtype="float32",
        store_dtype="float32",
        max_num_batched_tokens=512,
        kv_cache_bytes=2**28,
        extra=SABOTEUR,
    )


@pytest.fixture(scope="module")
def engine(spec: EngineSpec, tmp_path_factory):
    with EngineSupervisor(spec, tmp_path_factory.mktemp("logs"), start_timeout_s=250, step_timeout_s=30) as running:
        yield running


def test_block_hashes_are_the_engines_own_and_a_request_without_is_refused(spec: EngineSpec) -> None:
    output = subprocess.run(
        [sys.executable, "-m", "tests.integration.engine.probe_requests", msgspec.json.encode(spec).decode()],
        env={**os.environ, **engine_environment(cpu=True, eager=True)},
        capture_output=True,
        text=True,
    )
    [line] = [line for line in output.stdout.splitlines() if line.startswith("RESULT ")] or [output.stderr[-3000:]]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["hashes"] == 400 // result["block"] > 0
    assert result["equal_to_the_engines_own"]
    assert result["skips_reading"]
    assert "without the engine's block hasher" in result["refused"]


def _preflight(engine: EngineSupervisor, folder: Path, *first_tokens: int) -> dict[str, object]:
    prompts = [np.array([token, *range(20, 140)], dtype=np.int32) for token in first_tokens]
    probe = Probe(layer_ids=[1, 2, 4], n_layers=4, compute_dtype="float32", folder=folder, reference="always")
    return preflight(engine, prompts, probe)


def test_preflight_compares_chunks_with_a_whole_prefill(engine: EngineSupervisor, tmp_path: Path) -> None:
    figures = _preflight(engine, tmp_path, 7, 8, 9, 10)
    assert figures["chunk"] == 40
    assert figures["chunked_p90"] < 1e-5
    assert figures["top1_agreement"] == 1.0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("token", "message"),
    [(saboteur.ZERO, r"zero_row: layer 2"), (saboteur.NAN, "not_finite: layer 4"), (saboteur.COPY, "identical_rows")],
)
def test_preflight_stops_a_broken_capture(engine: EngineSupervisor, tmp_path: Path, token: int, message: str) -> None:
    with pytest.raises(PreflightError, match=message):
        _preflight(engine, tmp_path, 7, token)
    assert not list(tmp_path.iterdir())


def test_preflight_catches_a_last_layer_that_is_not_the_last(engine: EngineSupervisor, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"norm of layer 4 differs from the model.s own output"):
        _preflight(engine, tmp_path, *[saboteur.EARLY] * 4)
