"""The Hugging Face reference: which rows it gives, and that it never answers with weights that are not the model's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from extract_core.engine import reference
from tests.compat.families import BLOCKS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_CHECK = """
import sys, numpy as np, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
ids = torch.arange(5, 25)[None]
with torch.inference_mode():
    out = model(input_ids=ids, output_hidden_states=True)
np.savez(sys.argv[2], states=torch.stack(out.hidden_states, 2)[0].numpy(), token=out.logits[0, -1].argmax().numpy(),
         weight=model.model.norm.weight.detach().numpy())
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    subprocess.run([sys.executable, "-m", "tests.compat.families", "make", str(folder), "llama", "kimi-k2"], check=True)
    return folder


def test_rows_are_the_streams_between_blocks_and_the_last_is_before_the_norm(models, tmp_path):
    subprocess.run([sys.executable, "-c", _CHECK, str(models / "llama"), str(tmp_path / "check.npz")], check=True)
    ids = np.arange(5, 25, dtype=np.int32)
    made = reference.compute(models / "llama", [ids, ids[:3]], [BLOCKS, 0, 4], tmp_path)
    assert [rows.shape for rows in made.rows] == [(20, 3, 128), (3, 3, 128)]
    assert made.rows[0].dtype == np.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.npz"]
    with np.load(tmp_path / "check.npz") as check:
        states, weight = check["states"], check["weight"]
        assert made.greedy[0] == int(check["token"])
    np.testing.assert_allclose(made.rows[0][:, 1:], states[:, [0, 4]], rtol=1e-4, atol=1e-4)
    last = made.rows[0][:, 0]
    normed = last / np.sqrt((last**2).mean(-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(normed, states[:, BLOCKS], rtol=1e-4, atol=1e-4)


def test_a_model_type_that_transformers_does_not_know_is_read_by_its_class(models, tmp_path):
    [rows] = reference.compute(models / "kimi-k2", [np.arange(9, 19)], range(BLOCKS + 1), tmp_path).rows
    assert rows.shape == (10, BLOCKS + 1, 128)


def test_missing_weights_are_refused(models, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((models / "llama" / "config.json").read_bytes())
    weights = load_file(models / "llama" / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(reference.ReferenceFailedError, match=r"1 weights.*missing_keys.*layers\.3\.mlp\.up_proj"):
        reference.compute(broken, [np.arange(3)], [1], tmp_path)


def test_a_failed_process_is_shown_with_the_end_of_what_it_printed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(reference.ReferenceFailedError, match="Hugging Face forward of .* failed: ") as caught:
        reference.compute(tmp_path, [np.arange(3)], [1], tmp_path)
    assert "no-such-type" in caught.value.log_tail


def test_a_slow_process_is_given_up(models, tmp_path):
    with pytest.raises(reference.ReferenceFailedError, match="given up after 0 s"):
        reference.compute(models / "llama", [np.arange(3)], [1], tmp_path, timeout_s=0.01)
