import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from extract_core.errors import CorruptDataError
from extract_core.store import layout
from extract_core.store.records import (
    Accounting,
    CommitRecord,
    Excluded,
    FinalNormRef,
    IndexRef,
    Manifest,
    SampleRecord,
    SegmentRecord,
    ShardRef,
    Totals,
    canonical_json,
)
from tests.unit.store.kit import FINGERPRINT, attempt

SHA = "0123456789abcdef" * 4


def segment(**change):
    fields = {"shard": SHA, "first_row": 0, "rows": 3, "byte_offset": 65536, "byte_length": 3 * 2 * 4 * 2}
    return SegmentRecord(**{**fields, "xxh3": "0" * 16, **change})


def sample(**change):
    fields = {"sample_id": "größe-1", "n_tokens": 3, "segments": [segment()], "greedy_token": 5, "top1_token": None}
    return SampleRecord(**{**fields, "norm_mean": [1.5, 2.0], "norm_max": [2.0, 1e30], **change})


def commit(**change):
    fields = {
        "fingerprint": FINGERPRINT,
        "shard": 3,
        "object": layout.shard_path(SHA),
        "sha256": SHA,
        "nbytes": 70000,
        "rows": 3,
        "layer_ids": [2, 6],
        "hidden_size": 4,
        "dtype": "bfloat16",
        "samples": [sample()],
        "excluded": [Excluded(sample_id="b", reason="engine_crash", detail="twice", attempts=2)],
        "attempt": attempt(),
        "engine": {"version": "1", "settings": {"a": [1, None]}},
        "timings": {"extract": 0.1},
    }
    return CommitRecord(**{**fields, **change})


def manifest(**change):
    fields = {
        "version": 1,
        "attempt": attempt(),
        "coresample_version": "0",
        "fingerprint": FINGERPRINT,
        "spec": {"layers": [2, 6]},
        "layer_ids": [2, 6],
        "n_layers": 6,
        "hidden_size": 4,
        "dtype": "bfloat16",
        "index": IndexRef(path=layout.index_path(SHA), sha256=SHA, nbytes=10, rows=1),
        "shards": [ShardRef(path=layout.shard_path(SHA), sha256=SHA, nbytes=70000, rows=3)],
        "accounting": Accounting(input=4, published=1, duplicates=1, dropped={"empty": 1}, quarantined={"crash": 1}),
        "totals": Totals(samples=1, tokens=3, bytes=70000),
    }
    return Manifest(**{**fields, **change})


@pytest.mark.parametrize("record", [commit(), manifest()], ids=["commit", "manifest"])
def test_round_trip_and_canonical_form(record):
    data = record.dump()
    assert type(record).load(data, "x") == record
    assert data.endswith(b"}\n")
    assert b"\n" not in data[:-1]
    tree = json.loads(data)
    assert list(tree) == sorted(tree)
    assert tree["checksum"].startswith("sha256:")


@pytest.mark.parametrize("record", [commit(), manifest()], ids=["commit", "manifest"])
def test_every_flipped_byte_is_noticed(record):
    data = record.dump()
    for at in range(len(data)):
        for bit in (1, 32):
            bad = bytearray(data)
            bad[at] ^= bit
            with pytest.raises(CorruptDataError, match="plans/x"):
                type(record).load(bytes(bad), "plans/x")


@given(cut=st.integers(0, 400))
def test_truncated_record(cut):
    data = commit().dump()
    with pytest.raises(CorruptDataError):
        CommitRecord.load(data[:cut], "x")


def test_newer_schema_is_named():
    tree = {**json.loads(commit().dump()), "schema_version": 4}
    with pytest.raises(CorruptDataError, match="schema_version 4, this Coresample reads up to 3"):
        CommitRecord.load(canonical_json(tree), "x")


def test_manifests_of_before_norms_were_kept_still_load():
    tree = {**manifest().model_dump(mode="json"), "schema_version": 1}
    del tree["final_norm"]
    checksum = "sha256:" + hashlib.sha256(canonical_json(tree)).hexdigest()
    old = Manifest.load(canonical_json({**tree, "checksum": checksum}), "x")
    assert old.final_norm is None and old.schema_version == 1
    assert list(old.objects) == [layout.shard_path(SHA)]
    assert Manifest.load(old.dump(), "x") == old
    with pytest.raises(CorruptDataError, match="schema_version 4, this Coresample reads up to 3; install a newer"):
        Manifest.load(canonical_json({**tree, "schema_version": 4}), "x")


def test_norm_in_the_records():
    norm = FinalNormRef(kind="rms", epsilon=1e-6, offset=1.0, path=layout.norm_path(SHA), sha256=SHA, nbytes=96)
    record = commit(engine={"final_norm": norm.model_dump(mode="json")})
    assert CommitRecord.load(record.dump(), "x").final_norm == norm
    assert record.objects == {layout.shard_path(SHA): 70000, layout.norm_path(SHA): 96}
    assert Manifest.load(manifest(final_norm=norm).dump(), "x").final_norm == norm
    assert commit().final_norm is None
    with pytest.raises(ValidationError, match="not named by its digest"):
        commit(engine={"final_norm": {**norm.model_dump(mode="json"), "path": "norms/x"}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"object": None}, "without an object"),
        ({"object": None, "sha256": None}, "without an object"),
        ({"object": "shards/other.safetensors"}, "not named by its digest"),
        ({"samples": []}, "has rows and samples"),
        ({"samples": [sample(), sample()]}, "repeated"),
        ({"excluded": [Excluded(sample_id="größe-1", reason="x")]}, "repeated"),
        ({"samples": [sample(segments=[segment(shard="f" * 64)])]}, "another shard"),
        ({"rows": 2}, "outside the 2 rows"),
        ({"nbytes": 65540}, "outside the 65540 bytes"),
        ({"hidden_size": 5}, "bytes for 3 rows"),
        ({"samples": [sample(norm_mean=[1.0], norm_max=[1.0])]}, "norms of 1 layers"),
        ({"layer_ids": [6, 2]}, "ascending"),
        ({"created": "yesterday"}, "UTC"),
        ({"attempt": "me"}, "attempt"),
        ({"fingerprint": "../.."}, "fingerprint"),
        ({"rows": "3"}, "rows"),
        ({"colour": "red"}, "colour"),
        ({"timings": {"a": float("nan")}}, "timings"),
    ],
)
def test_commit_record_refuses(change, message):
    with pytest.raises(ValidationError, match=message):
        commit(**change)


def test_commit_of_a_shard_without_survivors():
    empty = commit(object=None, sha256=None, nbytes=0, rows=0, samples=[])
    assert CommitRecord.load(empty.dump(), "x") == empty


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"totals": Totals(samples=2, tokens=3, bytes=70000)}, "numbers of samples differ"),
        ({"totals": Totals(samples=1, tokens=3, bytes=7)}, "totals say 7 bytes"),
        ({"accounting": Accounting(input=2, published=2)}, "numbers of samples differ"),
        ({"n_layers": 5}, "above the model's 5 blocks"),
        ({"version": 0}, "version"),
        ({"norm_state": "post"}, "norm_state"),
        ({"shards": [ShardRef(path=layout.shard_path(SHA), sha256=SHA, nbytes=35000, rows=3)] * 2}, "listed twice"),
    ],
)
def test_manifest_refuses(change, message):
    with pytest.raises(ValidationError, match=message):
        manifest(**change)


def test_accounting_is_an_equation():
    with pytest.raises(ValidationError, match=r"10 input rows, but 7 published \+ 1 duplicates \+ 1 dropped"):
        Accounting(input=10, published=7, duplicates=1, dropped={"empty": 1}, quarantined={})


def test_sample_rows_add_up():
    with pytest.raises(ValidationError, match="4 tokens but 3 rows"):
        sample(n_tokens=4)


def test_layout_names():
    assert layout.commit_path(FINGERPRINT, 12) == f"plans/{FINGERPRINT}/commits/00012.json"
    assert layout.commit_path(FINGERPRINT, 123456).endswith("/123456.json")
    assert layout.manifest_path(1) == "versions/000001.json"
    assert layout.plan_path(FINGERPRINT, "ab" * 32) == f"plans/{FINGERPRINT}/plan-{'ab' * 8}.parquet"
    assert layout.plan_meta_path(FINGERPRINT).endswith("/plan.json")
    assert layout.dropped_path(FINGERPRINT).endswith("/dropped.jsonl")
    assert layout.quarantine_path(FINGERPRINT, "chat-1.2").endswith("/quarantine/chat-1.2.json")
    assert len(layout.quarantine_path(FINGERPRINT, "a/../b").rpartition("/")[2]) == 64 + 5
    for number in (0, 12, 99999, 100000, 1234567):
        for round in (0, 1, 12):
            name = layout.commit_path(FINGERPRINT, number, round).rpartition("/")[2]
            assert layout.commit_shard(name) == (number, round)
    assert layout.commit_path(FINGERPRINT, 12, 1).endswith("/00012.r1.json")
    for name in ("00012.r0.json", "00012.r01.json", "00012.r.json", "12.json", "00012.json.bak"):
        assert layout.commit_shard(name) is None
    for number in (1, 999999, 1000000):
        assert layout.manifest_version(layout.manifest_path(number).rpartition("/")[2]) == number
    for name in ("latest.json", "1.json", "000001.json.bak", "000000.json", ".tmp-000001.json"):
        assert layout.manifest_version(name) is None
    for call in (
        lambda: layout.manifest_path(0),
        lambda: layout.commit_path(FINGERPRINT, -1),
        lambda: layout.commit_path("../..", 1),
        lambda: layout.shard_path("abc"),
    ):
        with pytest.raises(ValueError, match=r"versions count|negative|not a fingerprint|not a sha256"):
            call()
