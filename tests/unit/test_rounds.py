"""Quarantined samples are tried again by later runs, each time in a further immutable record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extract_core import local, pipeline
from extract_core.cli import app
from extract_core.errors import IncompleteError
from extract_core.job import Job, prepare
from extract_core.reader import HiddenStatesDataset
from extract_core.settings import JobSettings
from extract_core.store import layout
from extract_core.store.commits import read_commits
from extract_core.store.gc import Policy, collect, survey
from extract_core.store.records import CommitRecord
from extract_core.store.verify import verify
from extract_core.store.versions import list_versions
from tests.unit.rows_kit import Rows, ids, requested, run, ten_chats
from tests.unit.store.versions_kit import age


@pytest.fixture
def settings(tmp_path: Path) -> JobSettings:
    return ten_chats(tmp_path)


@pytest.fixture
def job(settings: JobSettings) -> Job:
    return prepare(settings)


def largest(job: Job) -> int:
    return max(job.plan.meta.shards, key=lambda shard: shard.samples).index


def quarantine(job: Job) -> list[str]:
    return job.root.list(layout.quarantine_dir(job.plan.fingerprint))


def records(job: Job) -> list[str]:
    return job.root.list(layout.commits_dir(job.plan.fingerprint))


def sound(job: Job) -> None:
    for version in list_versions(job.root):
        report = verify(job.root, version)
        assert report.ok, [str(problem) for problem in report.problems]


def test_the_next_run_rescues_what_it_can(settings: JobSettings, job: Job) -> None:
    shard = largest(job)
    bad = ids(job, shard)[0]
    first, _, _ = run(settings, spoil={bad})
    assert first.manifest.accounting.quarantined == {"not_finite": 1}
    assert quarantine(job) == [f"{bad}.json"]
    before = {name: job.root.read_bytes(f"{layout.commits_dir(job.plan.fingerprint)}/{name}") for name in records(job)}

    second, engines, _ = run(settings)
    assert requested(engines) == [[bad]], "only the quarantined sample"
    assert engines[0].requests[0].rows == job.plan.shard(shard)["n_tokens"][ids(job, shard).index(bad)].as_py()
    assert second.new and second.manifest.version == 2 and second.manifest.accounting.published == 10
    assert len(second.manifest.shards) == len(first.manifest.shards) + 1
    assert records(job) == sorted([*before, f"{shard:05d}.r1.json"])
    for name, data in before.items():
        assert job.root.read_bytes(f"{layout.commits_dir(job.plan.fingerprint)}/{name}") == data
    assert quarantine(job) == []
    sound(job)
    dataset = HiddenStatesDataset(job.root.url)
    assert {dataset[n]["sample_id"] for n in range(10)} == {
        name for s in job.plan.meta.shards for name in ids(job, s.index)
    }

    third, engines, _ = run(settings)
    assert not third.new and third.manifest == second.manifest and not engines

    age(job.root)
    collected = collect(job.root, Policy(1, 3600))
    assert {item.kind for item in collected.items} == {"version", "index"}
    sound(job)
    assert survey(job.root, Policy(1, 0)).items == []


def test_what_fails_again_stays_and_is_left_after_some_runs(settings: JobSettings, job: Job) -> None:
    bad = ids(job, 0)[0]
    first, _, _ = run(settings, spoil={bad})
    for round, attempts in ((1, 2), (2, 3)):
        again, engines, notes = run(settings, spoil={bad})
        assert requested(engines) == [[bad]]
        assert not again.new and again.manifest == first.manifest and again.shards == 1
        assert "1 sample stays quarantined; version 1" in notes
        (item,) = read_commits(job.root, job.plan.fingerprint)[0].excluded
        assert (item.sample_id, item.reason, item.attempts) == (bad, "not_finite", attempts)
        written = json.loads(job.root.read_bytes(layout.quarantine_path(job.plan.fingerprint, bad)))
        assert (written["round"], written["attempts"]) == (round, attempts)
    last, engines, _ = run(settings)
    assert not engines and not last.new and list_versions(job.root) == [1]
    more, engines, _ = run(settings.model_copy(update={"quarantine_runs": 4}))
    assert requested(engines) == [[bad]] and more.manifest.version == 2
    assert pipeline.open_shards(job) == []
    sound(job)


@pytest.mark.parametrize("runs", [0, 1])
def test_never_again(settings: JobSettings, job: Job, runs: int) -> None:
    once = settings.model_copy(update={"quarantine_runs": runs})
    assert prepare(once).plan.fingerprint == job.plan.fingerprint
    first, _, _ = run(once, spoil={ids(job, 0)[0]})
    again, engines, _ = run(once)
    assert not engines and again.manifest == first.manifest


def test_a_killer_is_tried_alone_and_takes_nobody_along(settings: JobSettings, job: Job) -> None:
    shard = largest(job)
    assert len(ids(job, shard)) >= 3
    killer, bad = ids(job, shard)[:2]
    first, engines, _ = run(settings, spoil={bad}, killers={killer})
    assert first.manifest.accounting.quarantined == {"kills_engine": 1, "not_finite": 1}
    second, engines, _ = run(settings, killers={killer})
    assert [request.solo for request in engines[0].requests] == [[killer], [killer]]
    assert requested(engines) == [[killer, bad], [bad]], "one death is enough for a known killer"
    assert engines[0].blamed == 0
    assert second.manifest.accounting.quarantined == {"kills_engine": 1}
    (item,) = read_commits(job.root, job.plan.fingerprint)[shard].excluded
    assert item.sample_id == killer and item.attempts == 3 and "again, as in an earlier run" in item.detail
    third, engines, _ = run(settings, killers={killer})
    assert requested(engines) == [[killer]] and not third.new, "no engine is started to capture nothing"
    sound(job)


def test_many_quarantined_samples_of_a_shard_may_fail_again(settings: JobSettings, job: Job) -> None:
    """A first round with so many failures is the machine's fault; a retry of known failures is not."""
    bad = {ids(job, shard.index)[0] for shard in job.plan.meta.shards}
    run(settings.model_copy(update={"completeness": 0.0}), spoil=bad)
    again, _, notes = run(settings, spoil=bad)
    assert not again.new and f"{len(bad)} samples stay quarantined" in notes


def test_below_the_threshold_the_next_run_goes_on(settings: JobSettings, job: Job) -> None:
    strict = settings.model_copy(update={"completeness": 1.0})
    bad = ids(job, 1)[0]
    with pytest.raises(IncompleteError, match="The next run of this job tries 1 quarantined sample again") as caught:
        run(strict, spoil={bad})
    assert "delete" not in str(caught.value)
    once = strict.model_copy(update={"quarantine_runs": 1})
    with pytest.raises(IncompleteError, match="were tried by 1 runs; quarantine_runs lets more of them try"):
        run(once)
    result, engines, _ = run(strict)
    assert result.manifest.version == 1 and requested(engines) == [[bad]]
    sound(job)


def test_killed_between_a_rescue_and_its_publication(settings: JobSettings, job: Job) -> None:
    bad = ids(job, 0)[0]
    run(settings, spoil={bad})
    local.extract(job, Rows(job))  # type: ignore[arg-type]
    result, engines, _ = run(settings)
    assert not engines and result.new and result.manifest.accounting.published == 10
    sound(job)


def test_a_version_of_fewer_samples_is_not_published_over_a_rescue(settings: JobSettings, job: Job) -> None:
    """A slow publisher checked its records before another run rescued a sample."""
    bad = ids(job, 0)[0]
    local.extract(job, Rows(job, spoil={bad}))  # type: ignore[arg-type]
    report = pipeline.validate(job)
    local.extract(job, Rows(job))  # type: ignore[arg-type]
    manifest = pipeline.publish(job, report)
    assert manifest.accounting.published == 10 and manifest.version == 1
    assert manifest.provenance["rounds"] == 1


def test_two_runs_at_one_retry(settings: JobSettings, job: Job) -> None:
    """The first record of a round stands; a sample counts once even where two rounds hold it."""
    bad = ids(job, 0)[0]
    run(settings, spoil={bad})
    (task,) = pipeline.open_shards(job)
    for salt in (0, 1):
        engine = Rows(job, salt=salt)
        with local.spool.RunFolder(job.spool) as folder:
            captured = pipeline.capture_shard(job, engine, folder, task)  # type: ignore[arg-type]
            record = pipeline.commit_shard(job, captured)
    stored = job.root.list(layout.SHARDS)
    assert len(stored) == len(job.plan.meta.shards) + 1, "the loser's shard is gone"
    late = CommitRecord.model_validate({**record.model_dump(), "round": 2, "attempt": "f" * 32})
    job.root.create_exclusive(layout.commit_path(job.plan.fingerprint, 0, 2), late.dump())
    known = read_commits(job.root, job.plan.fingerprint)[0]
    assert len(known.samples) == len(ids(job, 0)) and known.excluded == [] and len(known.stored) == 2
    assert pipeline.publish(job, pipeline.validate(job)).accounting.published == 10
    sound(job)


def test_plan_and_status_tell_what_a_run_would_try(settings: JobSettings, job: Job, tmp_path: Path) -> None:
    bad = ids(job, 0)[0]
    run(settings, spoil={bad})

    def printed(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return done.stdout

    plan = ["plan", str(tmp_path / "job.yaml")]
    document = json.loads(printed(*plan, "--json"))
    assert document["to_retry"] == 1 and document["published_version"] == 1
    assert "A run tries 1 quarantined sample again" in printed(*plan)
    run(settings, spoil={bad})
    assert f"{bad} (shard 0, tried by 2 runs): not_finite" in printed("status", job.root.url)
    once = [*plan, "--set", "quarantine_runs=1"]
    assert json.loads(printed(*once, "--json"))["to_retry"] == 0
    assert "Published already as version 1: a run has nothing to do" in printed(*once)
