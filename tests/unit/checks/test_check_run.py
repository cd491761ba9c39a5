import numpy as np
import pytest

from extract_core.checks.run import check_run
from extract_core.settings import CheckSettings
from extract_core.store import layout
from extract_core.store.commits import ShardCommits
from extract_core.store.records import Accounting, CommitRecord, Excluded, FinalNormRef, SampleRecord, SegmentRecord
from tests.unit.store.kit import FINGERPRINT, attempt

LAYERS = [2, 15, 27, 30]
TYPICAL = np.array([40.0, 150.0, 400.0, 900.0])
SINK = np.array([80.0, 60000.0, 60000.0, 1200.0])


def record(sample_id, sha, random, n_tokens=None, factor=1.0, sink=SINK, agrees=True):
    """Norms as real models have them: rows spread around a layer's typical norm, a first token that towers above."""
    n = n_tokens or int(np.exp(random.uniform(np.log(8), np.log(2000))))
    rest = TYPICAL * np.exp(random.normal(0, 0.08, 4)) * factor
    peak = sink * np.exp(random.normal(0, 0.02, 4))
    mean = (rest * (n - 1) + peak) / n
    segment = SegmentRecord(
        shard=sha, first_row=0, rows=n, byte_offset=65536, byte_length=n * 4 * 64 * 2, xxh3="0" * 16
    )
    return SampleRecord(
        sample_id=sample_id,
        n_tokens=n,
        segments=[segment],
        greedy_token=5,
        top1_token=5 if agrees else 6,
        norm_mean=mean.tolist(),
        norm_max=peak.tolist(),
    )


def run(shards=10, per_shard=20, change=None, seed=0, disagree=0.02):
    random = np.random.default_rng(seed)
    commits, planned = {}, {}
    for number in range(shards):
        sha = f"{number:064x}"
        samples = []
        for i in range(per_shard):
            options = {"agrees": random.random() >= disagree}
            options.update((change(number, i) if change else None) or {})
            samples.append(record(f"{number}-{i}", sha, random, **options))
        made = CommitRecord(
            fingerprint=FINGERPRINT,
            shard=number,
            object=layout.shard_path(sha),
            sha256=sha,
            nbytes=10**9,
            rows=10**6,
            layer_ids=LAYERS,
            hidden_size=64,
            dtype="bfloat16",
            samples=samples,
            excluded=[],
            attempt=attempt(),
        )
        commits[number] = ShardCommits((made,))
        planned[number] = [sample.sample_id for sample in samples]
    total = shards * per_shard
    return commits, planned, Accounting(input=total, published=total)


def changed(shard, **change):
    return ShardCommits((shard.records[0].model_copy(update=change),))


def report(made, **settings):
    commits, planned, accounting = made
    return check_run(commits, planned, accounting, layer_ids=LAYERS, settings=CheckSettings(**settings))


def failed(made, **settings):
    return {result.name: result.detail for result in report(made, **settings).failures}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("shards", "per_shard"), [(1, 1), (1, 5), (3, 4), (10, 20), (40, 50)])
def test_honest_runs_pass(seed, shards, per_shard):
    assert failed(run(shards, per_shard, seed=seed)) == {}


def test_report_for_the_manifest():
    made = report(run())
    assert made.passed
    entries = made.to_dict()
    assert set(entries) == {
        "coverage",
        "accounting",
        "layers",
        "final_norm",
        "layers_differ",
        "norms",
        "top1_agreement",
    }
    assert entries["top1_agreement"]["threshold"] == 0.9
    assert 0.9 < entries["top1_agreement"]["value"] <= 1


def with_norms(norm_of):
    commits, planned, accounting = run()
    made = {}
    for shard, commit in commits.items():
        norm = norm_of(shard)
        engine = {} if norm is None else {"final_norm": norm.model_dump(mode="json")}
        made[shard] = changed(commit, engine=engine)
    return made, planned, accounting


def norm(digit="a", epsilon=1e-5):
    sha = digit * 64
    return FinalNormRef(kind="rms", epsilon=epsilon, path=layout.norm_path(sha), sha256=sha, nbytes=100)


def test_shards_with_another_norm_are_named():
    found = failed(with_norms(lambda shard: norm("b", 1e-6) if shard in (3, 7) else norm()))
    assert set(found) == {"final_norm"}
    assert "shards 3, 7 have norm rms, epsilon 1e-06, offset 0, sha256 bbbb" in found["final_norm"]
    assert "shards 0, 1, 2, 4, 5, 6, 8, 9 have norm rms, epsilon 1e-05" in found["final_norm"]
    unknown = FinalNormRef(kind="unknown", reason="no formula")
    assert "shards 2 have norm unknown" in failed(with_norms(lambda s: unknown if s == 2 else norm()))["final_norm"]


def test_records_that_do_not_tell_the_norm_agree_with_any():
    assert failed(with_norms(lambda shard: norm() if shard > 4 else None)) == {}
    assert failed(with_norms(lambda shard: FinalNormRef(kind="unknown", reason=f"engine {shard}"))) == {}


def test_lengths_from_one_token_to_many_pass():
    """The towering first row must not make short samples look odd."""
    assert failed(run(4, 50, change=lambda s, i: {"n_tokens": 1 + i % 12 if s else None})) == {}


def test_single_odd_chats_are_named_not_fatal():
    made = report(run(change=lambda s, i: {"factor": 20.0} if (s, i) in ((3, 4), (7, 1)) else None))
    assert made.passed
    assert set(made.outliers) == {"3-4", "7-1"}
    detail = {result.name: result.detail for result in made.results}["norms"]
    assert "sample 3-4 layer" in detail
    assert "run median" in detail


def test_mixed_data_passes():
    """A third of the chats in another script, with norms a third higher."""
    assert failed(run(change=lambda s, i: {"factor": 1.35} if i % 3 == 0 else None)) == {}


def test_one_shard_of_other_layers():
    shifted = np.array([150.0, 400.0, 900.0, 40.0]) / TYPICAL
    found = failed(run(40, 20, change=lambda s, i: {"factor": shifted} if s == 17 else None))
    assert set(found) == {"norms"}
    assert "20 of 20 samples of shard 17" in found["norms"]


def test_zeros_or_garbage_in_many_samples():
    for change in ({"factor": 0.01}, {"sink": SINK * 1e6}):
        assert set(failed(run(change=lambda s, i, change=change: change if i == 0 else None))) == {"norms"}


def test_rows_of_other_requests():
    found = failed(run(20, 30, change=lambda s, i: {"agrees": False} if s == 3 else None))
    assert set(found) == {"top1_agreement"}
    assert "0 of 30 samples of shard 3 agree" in found["top1_agreement"]
    found = failed(run(20, 30, disagree=0.3))
    assert "at least 90.0% are expected" in found["top1_agreement"]
    assert failed(run(20, 30, disagree=0.3), top1_agreement=0.6) == {}
    assert set(failed(run(1, 5, disagree=1.0))) == {"top1_agreement"}


def test_last_layer_not_captured():
    commits, planned, accounting = run(2, 10)
    for number, commit in commits.items():
        samples = [s.model_copy(update={"top1_token": None, "greedy_token": None}) for s in commit.samples]
        commits[number] = changed(commit, samples=samples)
    result = {r.name: r for r in report((commits, planned, accounting)).results}["top1_agreement"]
    assert result.passed
    assert result.value is None
    assert "not measured" in result.detail


def test_copied_layer():
    commits, planned, accounting = run(2, 10)
    for number, commit in commits.items():
        samples = [
            s.model_copy(
                update={name: [getattr(s, name)[i] for i in (0, 0, 2, 3)] for name in ("norm_mean", "norm_max")}
            )
            for s in commit.samples
        ]
        commits[number] = changed(commit, samples=samples)
    found = failed((commits, planned, accounting))
    assert found == {"layers_differ": "layers 2 and 15 have the same norms in 100.0% of samples"}


def test_coverage():
    commits, planned, accounting = run(3, 4)
    planned[0] = [*planned[0], "lost"]
    planned[1] = planned[1][1:]
    planned[5] = ["far"]
    detail = failed((commits, planned, accounting))["coverage"]
    for text in ("shard 0 lacks 1 samples: lost", "shard 1 has unplanned 1 samples: 1-0", "shard 5 has no commit"):
        assert text in detail
    commits, planned, accounting = run(2, 3)
    del planned[1]
    assert "shard 1 is committed but not planned" in failed((commits, planned, accounting))["coverage"]
    commits, planned, accounting = run(2, 3)
    twin = (
        commits[0]
        .samples[0]
        .model_copy(
            update={
                "segments": [
                    commits[0].samples[0].segments[0].model_copy(update={"shard": commits[1].records[0].sha256})
                ]
            }
        )
    )
    commits[1] = changed(commits[1], samples=[*commits[1].samples, twin])
    planned[1] = [*planned[1], "0-0"]
    assert "1 samples are in more than one shard: 0-0" in failed((commits, planned, accounting))["coverage"]


def test_accounting():
    commits, planned, _ = run(2, 3)
    excluded = [Excluded(sample_id="x", reason="zero_row"), Excluded(sample_id="y", reason="crash")]
    commits[0] = changed(commits[0], excluded=excluded)
    planned[0] = [*planned[0], "x", "y"]
    right = Accounting(input=9, published=6, dropped={"empty": 1}, quarantined={"zero_row": 1, "crash": 1})
    assert failed((commits, planned, right)) == {}
    wrong = Accounting(input=9, published=7, dropped={"empty": 1}, quarantined={"zero_row": 1})
    detail = failed((commits, planned, wrong))["accounting"]
    assert "7 samples are said to be published, the commits hold 6" in detail
    assert "the commits exclude {'zero_row': 1, 'crash': 1}" in detail


def test_other_layers_than_asked():
    commits, planned, accounting = run(2, 3)
    commits[1] = changed(commits[1], layer_ids=[1, 15, 27, 30], dtype="float16")
    detail = failed((commits, planned, accounting))["layers"]
    assert "[1, 15, 27, 30], the job asks for [2, 15, 27, 30]" in detail
    assert "dtypes differ" in detail
