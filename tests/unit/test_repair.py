"""Lost and damaged objects come back: the same bits heal the version, other bits make a new one."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from extract_core import local, pipeline
from extract_core.engine.protocol import FinalNorm
from extract_core.errors import CheckFailedError, CorruptDataError
from extract_core.job import Job, prepare
from extract_core.settings import JobSettings
from extract_core.store import layout
from extract_core.store.commits import read_commits
from extract_core.store.gc import Policy, collect, survey
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import list_versions, read_manifest
from tests.unit.rows_kit import Rows, ids, requested, run, ten_chats
from tests.unit.store.test_store_publish import die_at, in_child
from tests.unit.store.versions_kit import age


@pytest.fixture
def settings(tmp_path: Path) -> JobSettings:
    return ten_chats(tmp_path)


@pytest.fixture
def job(settings: JobSettings) -> Job:
    return prepare(settings)


def file_of(job: Job, shard: int, round: int = 0) -> str:
    return str(read_commits(job.root, job.plan.fingerprint)[shard].records[round].object)


def flip(root: Root, rel: str, at: int | None = None) -> None:
    path = root.local_path(rel)
    assert path is not None
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def problems(root: Root, version: int | None = None) -> list[str]:
    return [str(problem) for problem in verify(root, version).problems]


def test_a_lost_shard_of_the_same_bits_heals_the_version(settings: JobSettings, job: Job) -> None:
    first, _, _ = run(settings)
    lost = file_of(job, 1)
    os.truncate(job.root.local_path(lost) or "", 100)
    assert problems(job.root)
    again, engines, _ = run(settings)
    assert requested(engines) == [ids(job, 1)]
    assert not again.new and again.shards == 1 and again.manifest == first.manifest
    assert list_versions(job.root) == [1] and problems(job.root) == []


def test_a_lost_shard_of_other_bits_makes_a_new_version(settings: JobSettings, job: Job) -> None:
    first, _, _ = run(settings)
    lost = file_of(job, 1)
    job.root.delete(lost)
    again, engines, notes = run(settings, salt=1)
    assert requested(engines) == [ids(job, 1)]
    assert f"{lost} could not be made again bit by bit; its commit record now names shards/" in notes
    assert again.new and again.manifest.version == 2
    assert file_of(job, 1) != lost and file_of(job, 1) in again.manifest.objects
    assert problems(job.root, 2) == []
    (text,) = problems(job.root, 1)
    assert text.startswith(f"{lost}: shard is missing") and f"samples in it: {ids(job, 1)[0]}" in text
    third, engines, _ = run(settings)
    assert not engines and third.manifest == again.manifest
    age(job.root)
    collect(job.root, Policy(1, 3600))
    assert list_versions(job.root) == [2] and problems(job.root) == [] and first.manifest.version == 1


def test_lost_shards_of_both_rounds(settings: JobSettings, job: Job) -> None:
    """Each round is made again with the samples that it held."""
    shard = max(job.plan.meta.shards, key=lambda shard: shard.samples).index
    bad = ids(job, shard)[0]
    run(settings, spoil={bad})
    second, _, _ = run(settings)
    for round in (0, 1):
        job.root.delete(file_of(job, shard, round))
    third, engines, _ = run(settings)
    assert requested(engines) == [ids(job, shard)[1:], [bad]]
    assert third.manifest == second.manifest and problems(job.root) == []
    job.root.delete(file_of(job, shard, 1))
    fourth, engines, _ = run(settings, salt=1)
    assert requested(engines) == [[bad]] and fourth.manifest.version == 3
    assert fourth.manifest.accounting.published == 10 and problems(job.root) == []


def test_a_lost_shard_whose_samples_fail_now(settings: JobSettings, job: Job) -> None:
    shard = max(job.plan.meta.shards, key=lambda shard: shard.samples).index
    run(settings)
    job.root.delete(file_of(job, shard))
    bad = ids(job, shard)[1]
    second, _, _ = run(settings, spoil={bad})
    assert second.manifest.version == 2 and second.manifest.accounting.quarantined == {"not_finite": 1}
    third, engines, _ = run(settings)
    assert requested(engines) == [[bad]] and third.manifest.accounting.published == 10
    assert problems(job.root) == []


def the_shard(job: Job) -> str:
    return file_of(job, 0)


def the_retry(job: Job) -> str:
    return file_of(job, 1, 1)


def the_norm(job: Job) -> str:
    norm = read_manifest(job.root).final_norm
    assert norm is not None and norm.path is not None
    return norm.path


def the_index(job: Job) -> str:
    return read_manifest(job.root).index.path


def the_manifest(job: Job) -> str:
    return layout.manifest_path(list_versions(job.root)[-1])


def the_record(job: Job) -> str:
    return layout.commit_path(job.plan.fingerprint, 1)


def the_retry_record(job: Job) -> str:
    return layout.commit_path(job.plan.fingerprint, 1, 1)


def the_plan(job: Job) -> str:
    return layout.plan_meta_path(job.plan.fingerprint)


def the_layout(job: Job) -> str:
    return layout.plan_path(job.plan.fingerprint, job.plan.meta.plan_sha256)


OBJECTS = [
    the_shard,
    the_retry,
    the_norm,
    the_index,
    the_manifest,
    the_record,
    the_retry_record,
    the_plan,
    the_layout,
]


@pytest.mark.parametrize("salt", [0, 1], ids=["same bits", "other bits"])
@pytest.mark.parametrize("which", OBJECTS)
def test_every_flipped_object_is_found_and_repaired(
    settings: JobSettings, job: Job, which: Callable[[Job], str], salt: int
) -> None:
    run(settings, spoil={ids(job, 1)[0]})
    before, _, _ = run(settings)
    assert before.manifest.version == 2 and problems(job.root) == []
    rel = which(job)
    flip(job.root, rel)
    found = problems(job.root)
    assert found and all(rel in text for text in found), found

    after, engines, _ = run(settings, repair=True, salt=salt)
    assert problems(job.root) == []
    assert after.manifest.accounting == before.manifest.accounting
    names = {str(function.__name__) for function in (the_shard, the_retry, the_record, the_retry_record)}
    other_bits = salt and which.__name__ in names
    assert after.manifest.version == (3 if other_bits or which is the_manifest else 2)
    assert after.new == (after.manifest.version == 3)
    assert bool(engines) == (which.__name__ in names or which is the_norm)
    assert len(requested(engines)) <= 1, "nothing else is extracted"
    again, engines, notes = run(settings, repair=True)
    assert not engines and not again.new and "there is nothing to repair" in notes


def test_without_repair_damage_is_named_not_mended(settings: JobSettings, job: Job) -> None:
    run(settings)
    flip(job.root, the_shard(job))
    assert not run(settings)[0].new, "bytes are read by verify and by --repair"
    flip(job.root, the_layout(job))
    with pytest.raises(CorruptDataError, match="run the job with --repair: it is planned again"):
        run(settings)
    flip(job.root, the_layout(job))
    flip(job.root, the_manifest(job))
    with pytest.raises(CorruptDataError, match="run the job with --repair: what it names is published again"):
        run(settings)
    run(settings, repair=True)
    assert problems(job.root) == [] and list_versions(job.root) == [1, 2]


def test_a_damaged_record_of_an_unfinished_run(settings: JobSettings, job: Job) -> None:
    tasks = pipeline.open_shards(job)
    local.extract(job, Rows(job), todo=tasks[:2])  # type: ignore[arg-type]
    flip(job.root, the_record(job))
    with pytest.raises(CorruptDataError, match="run the job with --repair: only this shard is extracted anew"):
        run(settings)
    result, engines, _ = run(settings, repair=True)
    assert requested(engines) == [ids(job, task.shard) for task in tasks[1:]]
    assert result.manifest.version == 1 and problems(job.root) == []


def test_the_loser_keeps_what_a_version_had_lost(settings: JobSettings, job: Job) -> None:
    """Two runs replace a lost shard; the second computes the old bits, and the old version is whole again."""
    run(settings)
    lost = file_of(job, 0)
    job.root.delete(lost)
    (task,) = pipeline.open_shards(job)
    for salt in (1, 0, 2):
        with local.spool.RunFolder(job.spool) as folder:
            captured = pipeline.capture_shard(job, Rows(job, salt=salt), folder, task)  # type: ignore[arg-type]
            pipeline.commit_shard(job, captured)
        assert file_of(job, 0) != lost
    assert pipeline.publish(job, pipeline.validate(job)).version == 2
    assert problems(job.root, 1) == [] and problems(job.root, 2) == []
    stored = {f"{layout.SHARDS}/{name}" for name in job.root.list(layout.SHARDS)}
    assert stored == {path for n in (1, 2) for path in read_manifest(job.root, n).objects if path.startswith("shards/")}


def test_a_zombie_changes_nothing(settings: JobSettings, job: Job) -> None:
    """A worker wakes up after its shard was taken over and published: its commit loses, its object goes."""
    task = pipeline.open_shards(job)[0]
    folder = local.spool.RunFolder(job.spool)
    zombies = [
        pipeline.capture_shard(job, Rows(job, salt=salt), folder, task)  # type: ignore[arg-type]
        for salt in (0, 5)
    ]
    run(settings)
    before = {p: p.read_bytes() for p in Path(job.root.url).rglob("*") if p.is_file() and ".spool" not in p.parts}
    for zombie in zombies:
        standing = pipeline.commit_shard(job, zombie)
        assert standing.attempt != zombie.attempt
    folder.close()
    after = {p: p.read_bytes() for p in Path(job.root.url).rglob("*") if p.is_file() and ".spool" not in p.parts}
    assert after == before and problems(job.root) == []


def test_killed_at_every_step_of_a_replacement(settings: JobSettings, job: Job, tmp_path: Path) -> None:
    """Whatever a kill leaves, the next run ends with a sound latest version; gc finds the rest."""
    import shutil

    run(settings)
    job.root.delete(file_of(job, 1))
    template, root = tmp_path / "template", Path(job.root.url)
    shutil.copytree(root, template)
    step = 0
    while True:
        shutil.rmtree(root)
        shutil.copytree(template, root)

        def work(step: int = step) -> None:
            die_at(step, str(root))
            run(settings, salt=1)

        ended = in_child(work)
        assert ended in (0, -9), step
        result, _, _ = run(settings, salt=1)
        assert problems(job.root) == [] and result.manifest.version == 2, step
        assert list_versions(job.root) == [1, 2]
        age(job.root)
        collect(job.root, Policy(1, 3600))
        assert problems(job.root) == []
        used = {Path(path).name for path in read_manifest(job.root).objects if path.startswith("shards/")}
        assert set(job.root.list(layout.SHARDS)) == used
        assert survey(job.root, Policy(1, 0)).items == []
        if ended == 0:
            break
        step += 3
    assert step > 10


def test_runs_that_replace_one_record_at_once(settings: JobSettings, job: Job) -> None:
    """Three processes, each with other bits: one record stands, the latest version is sound, gc finds the rest."""
    run(settings)
    job.root.delete(file_of(job, 0))
    job.root.delete(file_of(job, 1))
    children = []
    for salt in (1, 2, 3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run(settings, salt=salt)
                status = 0
            except BaseException:
                traceback.print_exc()  # a child's failure would be a bare exit status
                sys.stderr.flush()
            finally:
                os._exit(status)
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ended == [0, 0, 0]
    result, _, _ = run(settings)
    assert problems(job.root) == [] and result.manifest.version >= 2
    for version in list_versions(job.root)[1:]:
        assert problems(job.root, version) == []
    age(job.root)
    collect(job.root, Policy(1, 3600))
    assert problems(job.root) == [] and survey(job.root, Policy(1, 0)).items == []
    used = {path for path in read_manifest(job.root).objects if path.startswith("shards/")}
    assert {f"{layout.SHARDS}/{name}" for name in job.root.list(layout.SHARDS)} == used


def test_a_shard_with_another_norm_is_replaced_when_its_file_is_deleted(settings: JobSettings, job: Job) -> None:
    """Its rows are the same, since they are taken before the norm; the record is another one."""
    odd = Rows(job)
    odd.final_norm = FinalNorm("rms", 1e-6, 0.0, odd.final_norm.weight)
    local.extract(job, odd, todo=pipeline.open_shards(job)[:1])  # type: ignore[arg-type]
    with pytest.raises(CheckFailedError, match="delete the files of the wrong shards and run the job again"):
        run(settings)
    job.root.delete(file_of(job, 0))
    result, engines, _ = run(settings)
    assert requested(engines) == [ids(job, 0)] and result.manifest.version == 1
    assert problems(job.root) == [] and result.manifest.final_norm is not None
    assert result.manifest.final_norm.epsilon == 1e-5
