"""A whole job from the command line on the real demo model: plan, run, status, verify, inspect, run again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from extract_core.reader import HiddenStatesDataset
from tests.unit.cli.kit import coresample, write_job

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def job(tmp_path, demo_model, sharegpt):
    return write_job(
        tmp_path / "job.yaml",
        model={"path": str(demo_model), "dtype": "float32"},
        data={"path": str(sharegpt(8))},
        chat={"max_length": 256},
        store={"shard_bytes": "2MiB", "dtype": "bfloat16"},
        completeness=0.5,
    )


def printed(*arguments, code=0):
    done = coresample(*arguments, "--json", timeout=600)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def check_final_norm(root, model):
    """The stored norm, on stored rows of layer n, gives what the model's own lm_head reads, and so the next token."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    data = HiddenStatesDataset(root)
    assert data.final_norm.kind == "rms"
    top1 = data.index.column("top1_token").to_pylist()
    with torch.inference_mode():
        for n in range(len(data)):
            rows = data[n]["hidden_states"][:, -1]
            normed = data.final_norm.apply(rows)
            torch.testing.assert_close(normed, hf.model.norm(rows.float()), rtol=1e-4, atol=1e-4)
            assert int(hf.lm_head(normed[-1]).argmax()) == top1[n]
        theirs = hf.model(data[0]["input_ids"][None]).last_hidden_state[0]  # after the norm
        ours = data.final_norm.apply(data[0]["hidden_states"][:, -1])
    errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert errors.max() < 2**-7, "rows are stored in bfloat16"


def test_interrupted_then_finished(job, tmp_path, demo_model):
    """Ctrl-C after the first shard keeps it; the same command goes on and publishes; a third run has nothing to do."""
    root = tmp_path / "dataset"
    plan = printed("plan", job)
    assert plan["shards"] >= 2 and plan["estimate"]["kind"] == "measured"

    command = [sys.executable, "-m", "extract_core.cli", "run", str(job), "--no-prefect"]
    first = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts its background jobs with SIGINT ignored, and that is inherited all the way down to here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 300
        while not list(root.glob("plans/*/commits/*.json")) and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(first.pid, signal.SIGINT)
        _, words = first.communicate(timeout=120)
    finally:
        first.kill()
    assert first.returncode == 130, words
    assert "committed shards are kept" in words and "Traceback" not in words
    (status,) = printed("status", root)["plans"]
    kept = status["shards_committed"]
    assert kept >= 1 and status["published_versions"] == []
    attempts = {entry["shard"]: entry.get("attempt") for entry in status["shards"]}

    result = printed("run", job)  # through Prefect
    assert result["new"] and result["version"] == 1 and result["samples"] == plan["samples"]
    assert result["tokens"] == plan["tokens"]
    assert all(check["passed"] for check in result["checks"].values())
    (status,) = printed("status", root)["plans"]
    assert status["shards_committed"] == plan["shards"] and status["published_versions"] == [1]
    again = {entry["shard"]: entry["attempt"] for entry in status["shards"]}
    assert {shard: again[shard] for shard, attempt in attempts.items() if attempt} == {
        shard: attempt for shard, attempt in attempts.items() if attempt
    }

    assert printed("verify", f"{root}@1")["ok"]
    check_final_norm(root, demo_model)
    seen = printed("inspect", root)
    assert seen["final_norm"]["kind"] == "rms" and seen["final_norm"]["path"].startswith("norms/")
    spans = seen["sample"]["spans"]
    assert spans[0]["supervised"] is False and any(span["supervised"] and span["text"].strip() for span in spans)
    assert "".join(span["text"] for span in spans).startswith("<|im_start|>system")
    assert printed("plan", job)["published_version"] == 1

    third = coresample("run", job, "--no-prefect", timeout=300)
    assert third.returncode == 0 and "Nothing to do" in third.stdout


def test_below_the_threshold_nothing_is_published(job, tmp_path, sharegpt):
    """Exit code 3, the counts by reason, and no version."""
    rows = sharegpt(8).read_text().splitlines()[:2]
    (tmp_path / "half.jsonl").write_text("\n".join([*rows, "not json", "nor this"]) + "\n")
    done = coresample(
        "run",
        job,
        "--no-prefect",
        "--set",
        f"data.path={tmp_path / 'half.jsonl'}",
        "--set",
        "completeness=0.9",
        timeout=600,
    )
    assert done.returncode == 3, done.stderr
    assert "2 of 4 input rows are malformed or quarantined" in done.stderr and "not_json 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "dataset" / "versions").exists()
