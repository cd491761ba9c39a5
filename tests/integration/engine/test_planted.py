"""Each bug that tools of this kind have had, planted in a real engine, is caught before a row is published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from extract_core.engine.preflight import Probe, preflight
from extract_core.engine.protocol import EngineSpec
from extract_core.engine.supervisor import EngineSupervisor
from extract_core.errors import PreflightError

from . import planted

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

LAYERS = [1, 2, 4]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSupervisor]:
    spec = EngineSpec(
        model=str(tiny_model),
        layer_ids=LAYERS,
        max_model_len=300,
        dtype="float32",
        store_dtype="float32",
        max_num_batched_tokens=1024,
        kv_cache_bytes=2**27,
        extra={"worker_cls": "tests.integration.engine.planted.Planted"},
    )
    with EngineSupervisor(spec, tmp_path_factory.mktemp("logs"), start_timeout_s=250, step_timeout_s=60) as running:
        yield running


def _run(engine: EngineSupervisor, folder: Path, bug: int, reference: str = "never") -> dict[str, object]:
    """The self-test on prompts of different lengths, all with the bug; the rest of each prompt is the same text."""
    prompts = [np.array([bug, *range(20, length)], dtype=np.int32) for length in (180, 175, 130, 70)]
    probe = Probe(layer_ids=LAYERS, n_layers=4, compute_dtype="float32", folder=folder, reference=reference)
    return preflight(engine, prompts, probe)


def test_without_a_bug_everything_agrees(engine: EngineSupervisor, tmp_path: Path) -> None:
    figures = _run(engine, tmp_path, 7, reference="always")
    assert figures["top1_agreement"] == 1.0
    assert figures["chunked_p90"] < 1e-5
    assert set(figures["reference"]) == {"1", "2", "4"}
    assert max(figures["reference"].values()) < 1e-5


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        pytest.param(planted.ZERO, "zero_row: layer 2", id="all-zero rows"),
        pytest.param(planted.NAN, "not_finite: layer 4", id="NaN"),
        pytest.param(planted.EARLY_MIDDLE, "captured as layer 2 is layer 1 of", id="off by one"),
        pytest.param(planted.ORDER, "token_echo", id="rows of another request"),
        pytest.param(planted.EARLY_LAST, "norm of layer 4 differs", id="off by one at the last layer"),
        pytest.param(planted.POST_NORM, "is the model.s output after the final norm", id="post-norm"),
        pytest.param(planted.LAST_CHUNK, "missing rows", id="last chunk missing"),
        pytest.param(planted.PREFIX_HIT, "missing rows", id="rows short under prefix cache"),
        pytest.param(planted.STALE, "norm of layer 4 differs", id="stale buffer"),
    ],
)
def test_a_planted_bug_is_caught(engine: EngineSupervisor, tmp_path: Path, bug: int, message: str) -> None:
    reference = "always" if bug == planted.EARLY_MIDDLE else "never"
    with pytest.raises(PreflightError, match=message):
        _run(engine, tmp_path, bug, reference)
    assert not list(tmp_path.iterdir())
