"""plan and run: what they print, with the run itself replaced."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from extract_core import local
from extract_core.cli import app, work
from extract_core.errors import SettingsError
from extract_core.local import RunResult
from extract_core.planning.estimate import Rate, earlier_rate, estimate, measured_rate
from extract_core.progress import reporter
from extract_core.store.root import Root
from extract_core.store.shard import HEADER_BYTES
from tests.unit.cli.kit import coresample, make_chats, make_model, settings, tree, write_job
from tests.unit.store.kit import make_dataset


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def place(tmp_path, model):
    (tmp_path / "model").symlink_to(model)
    make_chats(tmp_path / "chats.jsonl")
    write_job(tmp_path / "job.yaml")
    return tmp_path


def call(*arguments, code=0):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_plan(place):
    with (place / "chats.jsonl").open("a") as file:
        first = (place / "chats.jsonl").read_text().splitlines()[0]
        file.write(f"{first}\nnot json\n")
    document = json.loads(call("plan", place / "job.yaml", "--json").stdout)
    assert document["input"] == 7 == document["samples"] + document["duplicates"] + sum(document["dropped"].values())
    assert document["duplicates"] == 1 and document["dropped"] == {"not_json": 1}
    assert 0 < document["supervised_tokens"] < document["tokens"]
    per_token = document["row_bytes"] + 4  # the token id
    assert document["bytes"] == document["tokens"] * per_token + document["shards"] * HEADER_BYTES
    assert set(document["layers"]) == {"2", "3", "6"}
    assert document["estimate"]["kind"] == "measured" and document["estimate"]["seconds"] > 0
    with open(document["dropped_file"]) as file:
        assert [json.loads(line)["reason"] for line in file] == ["duplicate", "not_json"]
    before = tree(place / "dataset")
    text = call("plan", place / "job.yaml").stdout
    assert tree(place / "dataset") == before
    for words in (
        "7 read = 5 samples + 1 duplicate + 1 dropped",
        "not_json 1",
        document["dropped_file"],
        "6: after block 6 of 6 (the last), before the final norm",
        "supervised",
        "sample lengths",
        "GFLOP/s",
        "no model was run",
    ):
        assert words in text, text


def test_plan_shows_the_memory(place):
    document = json.loads(call("plan", place / "job.yaml", "--json").stdout)["memory"]
    assert document["fits"] and document["verdict"] == "fits" and document["device"] == "cpu"
    assert document["engine"]["kv_cache_bytes"] == document["engine"]["buffer_bytes"] == 64 * 2**20
    assert {line["name"] for line in document["lines"] if line["estimate"]} == {"activations", "engine process"}
    sums = {place["name"]: place["needed"] for place in document["places"]}
    for name, needed in sums.items():
        assert needed == sum(line["nbytes"] for line in document["lines"] if line["place"] == name)
    text = call("plan", place / "job.yaml").stdout
    assert "memory on this machine (~ is an estimate)" in text and "  64.0 MiB  KV cache (a step, and two" in text
    done = call("plan", place / "job.yaml", "--set", "engine.kv_cache_bytes=900TiB")
    assert "A run would be refused here: main memory: 900.0 TiB needed" in done.stdout
    assert "Lower engine.kv_cache_bytes to " in done.stdout


def test_run_is_refused_before_the_engine_loads(place):
    """In a process of its own: a run without Prefect, which would start an engine right after."""
    done = coresample("run", place / "job.yaml", "--no-prefect", "--set", "engine.kv_cache_bytes=900TiB")
    assert done.returncode == 2, done.stderr
    assert "error: the job does not fit this machine: main memory: 900.0 TiB needed" in done.stderr
    assert "memory: 900.0 TiB of" in done.stderr and "Traceback" not in done.stderr
    assert tree(place / "dataset" / ".spool") == {}


def test_root_and_set_override_the_job_file(place):
    call("plan", place / "job.yaml", "--root", place / "other", "--set", "layers=[0,6]", "--set", "data.limit=2", "-q")
    assert not (place / "dataset").exists()
    document = json.loads(
        call("plan", place / "job.yaml", "--root", place / "other", "--set", "layers=[0, 6]", "--json").stdout
    )
    assert document["samples"] == 5 and list(document["layers"]) == ["0", "6"]


def test_histogram():
    assert work.histogram({}) == []
    assert work.histogram({"1": 1, "4": 30}) == [("1", 1, "█"), ("2 to 2", 0, ""), ("3 to 4", 30, "█" * 30)]


@pytest.fixture
def result(tmp_path):
    root = Root.open(str(tmp_path / "made"))
    (tmp_path / "spool").mkdir()
    manifest, _ = make_dataset(root, tmp_path / "spool")
    return RunResult(manifest, root.url, True, 12.3)


def test_run_without_prefect(place, result, monkeypatch):
    def fake(job, *, repair):
        assert not repair
        print("chatter of a library on standard output")
        reporter().note("a note")
        return result

    monkeypatch.setattr(local, "run", fake)
    text = call("run", place / "job.yaml", "--no-prefect", "--quiet").stdout
    ref = f"{result.root}@1"
    for words in (
        "Published version 1",
        f"dataset     {ref}",
        "accounting  9 input rows = 8 published + 0 duplicates + 1 dropped (empty 1) + 0 quarantined",
        f"coresample verify {ref}",
        f"coresample inspect {ref}",
        "HiddenStatesDataset",
    ):
        assert words in text, text
    object.__setattr__(result, "new", False)
    assert (
        "Nothing to do: this job is published already, as version 1"
        in call("run", place / "job.yaml", "--no-prefect").stdout
    )


def test_run_calls_the_flow(place, result, monkeypatch):
    seen = []

    def runner(job, *, repair):
        seen.append((job, repair))
        return result

    monkeypatch.setattr(work, "prefect_runner", lambda verbose: runner)
    call("run", place / "job.yaml", "--set", "chat.max_length=64", "-q")
    call("run", place / "job.yaml", "--repair", "-q")
    assert seen[0][0].chat.max_length == 64
    assert [repair for _, repair in seen] == [False, True]


def test_run_that_extracted_again_says_what_stays(place, result, monkeypatch):
    again = dataclasses.replace(result, new=False, shards=2)
    monkeypatch.setattr(local, "run", lambda job, *, repair: again)
    text = call("run", place / "job.yaml", "--no-prefect", "-q").stdout
    assert "Nothing new: 2 shard files extracted again in 12 s; version 1 of" in text
    document = json.loads(call("run", place / "job.yaml", "--no-prefect", "--json").stdout)
    assert document["shards_extracted"] == 2 and document["new"] is False


def test_runner_without_prefect(monkeypatch):
    monkeypatch.setattr(work, "FLOW", "flows.nothing_here:run_flow")
    with pytest.raises(SettingsError, match="--no-prefect"):
        work.prefect_runner(True)
    monkeypatch.setattr(work, "FLOW", "json.nothing_here:x")
    with pytest.raises(ModuleNotFoundError):
        work.prefect_runner(True)


def test_json_stays_pure(place):
    """What libraries and child processes write to descriptor 1 does not reach standard output."""
    code = (
        "import os, subprocess, sys\n"
        "from extract_core.cli.common import emit, pure_stdout\n"
        "with pure_stdout(True):\n"
        "    print('python'); os.write(1, b'native\\n'); subprocess.run(['echo', 'child'])\n"
        "emit({'a': 1})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == {"a": 1}
    assert all(word in done.stderr for word in ("python", "native", "child"))


def test_full_disk(place):
    """A root on a disk of 32 KiB: the plan does not fit."""
    with (place / "chats.jsonl").open("w") as file:
        for n in range(600):
            answer = hashlib.sha256(str(n).encode()).hexdigest()  # does not compress
            messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    (place / "disk").mkdir()
    script = 'mount -t tmpfs -o size=32k tmpfs "$1" && exec "$2" -m extract_core.cli plan "$3" --root "$1/data"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*command, str(place / "disk"), sys.executable, str(place / "job.yaml")],
        capture_output=True,
        text=True,
        timeout=240,
        env=dict(os.environ),
    )
    if done.returncode and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "No space left on device; free space or raise the quota" in done.stderr


# -- the time estimate -----------------------------------------------------------------------------------------------


def test_measured_rate(monkeypatch):
    from extract_core.planning import estimate as module

    monkeypatch.setattr(module, "matmul_flops", lambda hidden, dtype: (100e9, "2 CPU threads"))
    rate = measured_rate(125_000_000, hidden_size=768, dtype="float32")
    assert rate == Rate(
        200.0,
        "measured",
        "a float32 matrix product on 2 CPU threads ran at 100 GFLOP/s here; half of it over 125 million parameters",
    )
    assert measured_rate(125_000_000, hidden_size=768, dtype="float32", gpus=2).tokens_per_s == 400


def test_rate_of_an_earlier_run(place):
    """Commit records of the same model, layers and dtype in this root win over a measurement."""
    from extract_core.job import prepare
    from extract_core.store.commits import write_commit
    from tests.unit.store.test_store_records import commit

    job = prepare(settings(place / "job.yaml"))
    spec = job.spec.document
    assert earlier_rate(job.root, spec) is None
    record = commit(
        fingerprint=job.plan.fingerprint, engine={"device": "H200"}, timings={"tokens": 900.0, "engine_s": 3.0}
    )
    write_commit(job.root, record)
    rate = earlier_rate(job.root, spec)
    assert rate.tokens_per_s == 300 and rate.kind == "earlier_run"
    assert "900 tokens in 1 shards of this root took 3.0 s on H200" in rate.source
    found = estimate(job.root, spec, tokens=600, parameters=1, hidden_size=16)
    assert found.seconds == 2.0 and found.to_dict()["kind"] == "earlier_run"
    assert earlier_rate(job.root, {**spec, "layer_ids": [1]}) is None
    assert earlier_rate(job.root, {**spec, "compute_dtype": "bfloat16"}) is None
