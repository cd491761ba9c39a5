"""status, verify and inspect over small whole datasets."""

import json

import pytest
from typer.testing import CliRunner

from extract_core.cli import app
from extract_core.errors import CorruptDataError
from extract_core.planning.plan import PlanMeta, PlannedShard
from extract_core.store import layout
from extract_core.store.commits import read_commits, write_commit
from extract_core.store.records import CommitRecord, Excluded
from extract_core.store.root import Root
from tests.unit.store.kit import FINGERPRINT, HIDDEN, LAYERS, attempt, make_dataset


@pytest.fixture
def made(tmp_path):
    root = Root.open(str(tmp_path / "data"))
    (tmp_path / "spool").mkdir()
    manifest, samples = make_dataset(root, tmp_path / "spool")
    return root, manifest, samples


def call(*arguments, code=0):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.stdout


def as_json(*arguments, code=0):
    return json.loads(call(*arguments, "--json", code=code))


def write_plan(root, extra_shards=1, **change):
    commits = read_commits(root, FINGERPRINT)
    shards = [PlannedShard(index=n, rows=c.rows, samples=len(c.samples)) for n, c in commits.items()]
    shards += [PlannedShard(index=len(shards) + n, rows=10, samples=2) for n in range(extra_shards)]
    fields = {
        "fingerprint": FINGERPRINT,
        "spec": {"model": {"name": "tiny"}, "layer_ids": list(LAYERS)},
        "plan_sha256": "0" * 64,
        "row_bytes": 96,
        "shards": shards,
        "input": 20,
        "samples": sum(shard.samples for shard in shards),
        "tokens": sum(shard.rows for shard in shards),
        "rows": sum(shard.rows for shard in shards),
        "computed": sum(shard.rows for shard in shards),
        "supervised_tokens": 5,
        "truncated": 0,
        "duplicates": 0,
        "dropped": {},
        "malformed": 0,
        "mask_methods": {"prefix": 4},
        "length_histogram": {"16": 4},
        "longest": 12,
    }
    meta = PlanMeta(**{**fields, **change})
    root.put_bytes(layout.plan_meta_path(FINGERPRINT), meta.model_dump_json().encode())
    return meta


def write_excluded(root, shard):
    write_commit(
        root,
        CommitRecord(
            fingerprint=FINGERPRINT,
            shard=shard,
            object=None,
            sha256=None,
            nbytes=0,
            rows=0,
            layer_ids=list(LAYERS),
            hidden_size=HIDDEN,
            dtype="bfloat16",
            samples=[],
            excluded=[Excluded(sample_id="evil", reason="kills_engine", detail="died twice", attempts=2)],
            attempt=attempt(),
        ),
    )


# -- status ----------------------------------------------------------------------------------------------------------


def test_status_of_an_unfinished_plan(made):
    root, manifest, _ = made
    meta = write_plan(root)
    root.delete(layout.manifest_path(1))
    document = as_json("status", root.url)
    assert document["versions"] == []
    (plan,) = document["plans"]
    assert plan["shards_total"] == 3 and plan["shards_committed"] == 2
    assert [shard["state"] for shard in plan["shards"]] == ["committed", "committed", "open"]
    assert plan["rows_open"] == 10 and plan["rows_committed"] == meta.tokens - 10
    assert plan["bytes_committed"] == manifest.totals.bytes
    assert plan["published_versions"] == []
    text = call("status", root.url)
    assert "published versions none; 1 plan\n" in text and "1 shard open" in text
    assert "2 of 3 shards" in text and "00002" in text and "open" in text


def test_status_of_a_published_plan_whose_record_is_missing(made):
    root, *_ = made
    write_plan(root, extra_shards=0)
    root.delete(layout.commit_path(FINGERPRINT, 1))
    (plan,) = as_json("status", root.url)["plans"]
    assert [shard["state"] for shard in plan["shards"]] == ["committed", "record_missing"]
    assert plan["records_missing"] == 1 and plan["seconds_left"] is None and plan["rows_open"] == 0
    text = call("status", root.url)
    assert "published as version 1" in text and "1 commit record missing from" in text and "record missing" in text
    said = text.replace(root.url, "")  # whose folder may be named in any way
    assert " left" not in said and "open" not in said


def test_status_names_the_quarantined(made):
    root, *_ = made
    write_plan(root)
    write_excluded(root, 2)
    (plan,) = as_json("status", root.url)["plans"]
    assert plan["shards_committed"] == 3 and plan["seconds_left"] in (None, 0)
    assert plan["quarantine"] == [
        {"shard": 2, "runs": 1, "sample_id": "evil", "reason": "kills_engine", "detail": "died twice", "attempts": 2}
    ]
    text = call("status", root.url)
    assert "1 sample quarantined (kills_engine 1)" in text and "evil (shard 2, tried by 1 run): kills_engine" in text


def test_status_shows_few_shards_unless_asked(made):
    root, *_ = made
    write_plan(root, extra_shards=50)
    short, long = call("status", root.url), call("status", root.url, "--all")
    assert "32 more shards; see --all" in short and "00051" not in short
    assert "00051" in long and "see --all" not in long


def test_status_without_plans(tmp_path, made):
    root, *_ = made
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["status", str(tmp_path / "empty")])
    assert done.exit_code == 2 and "holds no plan" in done.stderr and "coresample run" in done.stderr
    assert as_json("status", root.url)["plans"] == []  # published, and its plan was removed since
    assert "holds no plan that begins with zz" not in call("status", root.url, "--plan", "zz")


def test_status_of_damaged_records(made):
    root, *_ = made
    write_plan(root)
    path = root.local_path(layout.commit_path(FINGERPRINT, 0))
    path.write_bytes(path.read_bytes().replace(b'"rows"', b'"rowz"'))
    done = CliRunner().invoke(app, ["status", root.url])
    assert done.exit_code == 1
    assert f"{path} does not match its own checksum" in done.stdout
    assert "run the job with --repair: only this shard is extracted anew" in done.stdout
    assert "00001" in done.stdout and "committed" in done.stdout  # the others are shown
    (plan,) = as_json("status", root.url, code=1)["plans"]
    assert [shard["state"] for shard in plan["shards"]][:2] == ["damaged", "committed"]
    assert plan["shards_damaged"] == 1 and "run the job with --repair" in plan["shards"][0]["problem"]
    with pytest.raises(CorruptDataError, match=f"{path} does not match .* run the job with --repair"):
        read_commits(root, FINGERPRINT)
    root.put_bytes(layout.plan_meta_path(FINGERPRINT), b'{"fingerprint": 3}')
    done = CliRunner().invoke(app, ["status", root.url])
    assert done.exit_code == 1 and "plan.json is not a plan" in done.stderr


# -- verify ----------------------------------------------------------------------------------------------------------


def test_verify(made):
    root, manifest, samples = made
    assert "Sound:" in call("verify", root.url) and "Sound:" in call("verify", f"{root.url}@1", "--quiet")
    document = as_json("verify", root.url)
    assert document["ok"] and document["samples"] == len(samples) and document["bytes_read"] == manifest.totals.bytes
    for command in ("verify", "inspect", "status"):
        for version, words in (("7", "has no version 7; there are: 1"), ("0", "version 0"), ("x", "is no version")):
            done = CliRunner().invoke(app, [command, f"{root.url}@{version}"])
            assert done.exit_code == 2 and words in done.stderr


def test_verify_lists_every_problem(made):
    root, manifest, _ = made
    first, second = (root.local_path(shard.path) for shard in manifest.shards)
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.chmod(0o644)
    first.write_bytes(data)
    second.unlink()
    text = call("verify", root.url, code=1)
    assert (
        f"{manifest.shards[0].path}: sha256 differs" in text and f"{manifest.shards[1].path}: shard is missing" in text
    )
    assert (
        "What to do: run the job with --repair: it reads everything and makes 1 damaged object anew "
        f"({manifest.shards[0].path})" in text
    )
    assert "samples in it: s0-1, s0-2" in text
    document = as_json("verify", root.url, code=1)
    assert not document["ok"] and len(document["problems"]) >= 2 and manifest.shards[0].path in document["remedy"]


def test_verify_says_how_a_norm_comes_back(made):
    root, manifest, _ = made
    path = root.local_path(manifest.final_norm.path)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    text = call("verify", root.url, code=1)
    assert text.startswith("1 problem in ") and f"{manifest.final_norm.path}: final norm" in text
    assert (
        f"run the job with --repair: it reads everything and makes 1 damaged object anew ({manifest.final_norm.path})"
        in text
    )


def test_verify_counts_one_problem_in_the_singular(made):
    root, manifest, _ = made
    root.local_path(manifest.shards[1].path).unlink()
    text = call("verify", root.url, code=1)
    assert text.startswith("1 problem in ") and "--repair" not in text
    assert "What to do: run the job again: what is missing is extracted anew" in text


# -- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect(made):
    root, manifest, samples = made
    document = as_json("inspect", root.url)
    assert document["layers"] == {
        "2": "after block 2 of 6",
        "4": "after block 4 of 6",
        "6": "after block 6 of 6 (the last), before the final norm",
    }
    assert document["final_norm"] == manifest.final_norm.model_dump()
    assert document["totals"] == manifest.totals.model_dump()
    row = document["sample"]
    expected = samples[row["sample_id"]]
    assert row["token_ids"] == expected.tokens.tolist() and row["loss_mask"] == expected.mask.tolist()
    assert row["spans"] is None  # no tokenizer
    assert set(document["norms"]) == {"2", "4", "6"}
    text = call("inspect", root.url)
    assert f"rms, epsilon 1e-05; weights in {manifest.final_norm.path}" in "".join(text.split("\n"))
    assert "after block 4 of 6" in text and "token ids: the model's tokenizer is not here" in text
    assert ("⟦" in text) == bool(expected.mask.any())


def test_inspect_chooses_a_sample(made):
    root, _, samples = made
    second = as_json("inspect", root.url, "--sample", 1)["sample"]
    assert second["position"] == 1
    assert as_json("inspect", root.url, "--sample", second["sample_id"])["sample"]["position"] == 1
    assert as_json("inspect", root.url, "--sample=-1")["sample"]["position"] == len(samples) - 1
    for wrong, words in (
        (len(samples), "positions go from 0 to"),
        ("nosuchsample", "no sample of version 1 has this id"),
        ("²", "no sample of version 1 has this id"),
        ("1-", "no sample of version 1 has this id"),
    ):
        done = CliRunner().invoke(app, ["inspect", root.url, "--sample", str(wrong)])
        assert done.exit_code == 2 and words in done.stderr
