"""Steps of a run after the engine: commit, check, publish; rows come from the test, everything else is real."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extract_core import local, pipeline, retries
from extract_core.engine.protocol import FinalNorm, ShardDone
from extract_core.errors import (
    CaptureError,
    CheckFailedError,
    CorruptDataError,
    IncompleteError,
    RootConflictError,
    StoreError,
    StoreUnavailableError,
)
from extract_core.job import Job, new_attempt, open_root, prepare
from extract_core.pipeline import Captured
from extract_core.pipeline.commit import _check_and_seal
from extract_core.planning.plan import segments_of
from extract_core.reader import HiddenStatesDataset
from extract_core.spool import SpoolLimit
from extract_core.store import layout
from extract_core.store.commits import read_commits
from extract_core.store.norms import read_norm
from extract_core.store.records import FinalNormRef
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import list_versions
from extract_core.store.writer import ShardWriter

from .cli import kit


@pytest.fixture
def job(tmp_path: Path) -> Job:
    kit.make_model(tmp_path / "model")
    kit.make_chats(tmp_path / "chats.jsonl", 10)
    return prepare(kit.settings(kit.write_job(tmp_path / "job.yaml", layers=[1, 2, 5], store__shard_bytes="20KiB")))


def first_of(job: Job, shard: int) -> str:
    return str(job.plan.shard(shard)["sample_id"][0])


def norm(weight: float) -> FinalNorm:
    return FinalNorm("rms", 1e-5, 0.0, np.full(kit.HIDDEN, weight, dtype="<f4").tobytes())


NORM = norm(2.0)


def captured(
    job: Job,
    shard: int,
    *,
    spoil: str | None = None,
    how: float = float("nan"),
    final_norm: FinalNorm | None = NORM,
) -> Captured:
    """A shard of random rows, as the engine would have left it on the spool; one sample's layer is ``how``."""
    table = job.plan.shard(shard)
    rows = job.plan.meta.shards[shard].rows
    attempt = new_attempt()
    job.spool.mkdir(exist_ok=True)
    path = job.spool / f"{shard:05d}-{attempt}.tmp"
    writer = ShardWriter(path, rows=rows, layer_ids=job.layer_ids, hidden_size=kit.HIDDEN, dtype=job.dtype)
    generator = torch.Generator().manual_seed(shard)
    random = torch.randn(rows, len(job.layer_ids), kit.HIDDEN, generator=generator)
    for sample, segments, ids in zip(
        table["sample_id"].to_pylist(), segments_of(table), table["token_ids"].to_pylist(), strict=True
    ):
        at = 0
        for first, count in segments:
            states = random[first : first + count]
            if sample == spoil and at + count == len(ids):
                states[:, 1] = how
            writer.write_rows(first, memoryview(states.view(torch.uint8).numpy().reshape(-1)))
            writer.write_token_ids(first, np.array(ids[at : at + count]))
            at += count
    writer.close()
    done = ShardDone(attempt=attempt, greedy={}, top1={}, refused={}, counters={"tokens": float(rows), "engine_s": 1.0})
    return Captured(shard, attempt, path, table, done, engine={"vllm": "0"}, final_norm=final_norm)


def commit_all(job: Job) -> None:
    for task in pipeline.open_shards(job):
        pipeline.commit_shard(job, captured(job, task.shard))


def open_numbers(job: Job) -> list[int]:
    return [task.shard for task in pipeline.open_shards(job)]


def test_commit_validate_publish(job: Job) -> None:
    assert len(job.plan.meta.shards) > 2
    commit_all(job)
    manifest = pipeline.publish(job, pipeline.validate(job))
    assert manifest.accounting.published == 10
    assert verify(job.root).problems == []
    assert pipeline.publish(job, pipeline.validate(job)) == manifest
    assert not list(job.spool.glob("*.tmp"))


def test_another_publishes_while_the_index_is_written(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one plan publish at once: it becomes one version, whichever came first."""
    commit_all(job)
    report = pipeline.validate(job)
    module = import_module("extract_core.pipeline.publish")  # the package's attribute of that name is the function
    plain, others = module.write_index, []

    def write_index(*args: Any) -> Any:
        if not others:
            others.append(None)
            others[0] = pipeline.publish(job, report)
        return plain(*args)

    monkeypatch.setattr(module, "write_index", write_index)
    assert pipeline.publish(job, report) == others[0] and list_versions(job.root) == [1]


@pytest.mark.parametrize("step", ["put_file", "create_exclusive", "put_bytes"])
def test_a_commit_goes_on_after_the_store_was_away(job: Job, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry must find what the first try left: a sealed file, or one that is stored already."""
    calls = 0
    real = getattr(Root, step)

    def away_once(self: Root, *arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise StoreUnavailableError("the store is away")
        return real(self, *arguments, **options)

    shard = captured(job, 0, spoil=first_of(job, 0))
    monkeypatch.setattr(Root, step, away_once)
    record = retries.with_retries(lambda: pipeline.commit_shard(job, shard), delays_s=(0.0,))
    assert calls >= 2
    assert record.attempt == shard.attempt
    assert [item.reason for item in record.excluded] == ["not_finite"]
    assert job.root.exists(record.object or "")
    assert not shard.path.exists()


def test_the_second_worker_discards_its_own_shard(job: Job) -> None:
    first, second = captured(job, 0), captured(job, 0, spoil=first_of(job, 0))
    standing = pipeline.commit_shard(job, first)
    assert pipeline.commit_shard(job, second) == standing
    assert job.root.list(layout.SHARDS) == [Path(standing.object or "").name]


def test_an_equal_shard_of_another_worker_is_kept(job: Job) -> None:
    standing = pipeline.commit_shard(job, captured(job, 0))
    assert pipeline.commit_shard(job, captured(job, 0)) == standing
    assert job.root.exists(standing.object or "")


def test_missing_shards_are_not_published(job: Job) -> None:
    pipeline.commit_shard(job, captured(job, 0))
    with pytest.raises(CheckFailedError, match="have no commit record"):
        pipeline.validate(job)


def test_below_the_threshold_nothing_is_published(job: Job) -> None:
    spoiled = first_of(job, 0)
    pipeline.commit_shard(job, captured(job, 0, spoil=spoiled))
    commit_all(job)
    with pytest.raises(IncompleteError, match=r"1 of 10 input rows .* not_finite 1") as caught:
        pipeline.validate(job)
    assert caught.value.exit_code == 3
    assert job.root.exists(layout.quarantine_path(job.plan.fingerprint, spoiled))


def test_a_shard_that_vanished_is_not_published(job: Job) -> None:
    commit_all(job)
    (record,) = read_commits(job.root, job.plan.fingerprint)[1].records
    job.root.delete(record.object or "")
    with pytest.raises(CorruptDataError, match=r"is missing.*lost while this run was at work: run the job again"):
        pipeline.validate(job)
    assert open_numbers(job) == [1]
    pipeline.commit_shard(job, captured(job, 1))
    assert pipeline.publish(job, pipeline.validate(job)).version == 1
    job.root.delete(record.object or "")
    assert job.published() is None, "a version that lost a shard is not 'nothing to do'"
    commit_all(job)
    assert job.published() is not None
    assert verify(job.root).problems == []


def test_the_norm_is_stored_before_the_first_record_and_named_by_all(job: Job) -> None:
    shard = captured(job, 0)
    record = pipeline.commit_shard(job, shard)
    ref = record.final_norm
    assert ref is not None and job.root.exists(ref.path or "")
    assert record.engine == {"vllm": "0", "final_norm": ref.model_dump(mode="json")}
    commit_all(job)
    manifest = pipeline.publish(job, pipeline.validate(job))
    assert manifest.final_norm == ref
    assert job.root.list(layout.NORMS) == [Path(ref.path or "").name]
    rows = torch.randn(3, kit.HIDDEN)
    theirs = torch.nn.functional.rms_norm(rows, (kit.HIDDEN,), torch.full((kit.HIDDEN,), 2.0), 1e-5)
    torch.testing.assert_close(HiddenStatesDataset(job.root.url).final_norm.apply(rows), theirs)


def test_a_norm_without_weights_is_stored_as_ones(job: Job) -> None:
    ref = pipeline.commit_shard(job, captured(job, 0, final_norm=FinalNorm("layer", 1e-5, 0.0, b""))).final_norm
    assert ref is not None
    stored = read_norm(job.root, ref, kit.HIDDEN)
    assert stored.weight is not None and stored.weight.tolist() == [1.0] * kit.HIDDEN and stored.bias is None


def test_norms_without_a_file(job: Job) -> None:
    unknown = captured(job, 0, final_norm=None)
    unknown.engine["final_norm"] = "no formula fits"
    record = pipeline.commit_shard(job, unknown)
    assert record.final_norm == FinalNormRef(kind="unknown", reason="no formula fits")
    record = pipeline.commit_shard(job, captured(job, 1, final_norm=FinalNorm("none", 0.0, 0.0, b"")))
    assert record.final_norm == FinalNormRef(kind="none")
    assert job.root.list(layout.NORMS) == []


def test_shards_with_different_norms_are_not_published(job: Job) -> None:
    pipeline.commit_shard(job, captured(job, 0, final_norm=norm(3.0)))
    commit_all(job)
    with pytest.raises(CheckFailedError, match=r"(?s)final_norm: shards 0 have norm rms.*shards 1, 2.*sha256"):
        pipeline.validate(job)
    assert not job.root.list(layout.VERSIONS)


def test_a_norm_that_vanished_comes_back(job: Job) -> None:
    commit_all(job)
    published = pipeline.publish(job, pipeline.validate(job))
    path = published.final_norm.path if published.final_norm else None
    job.root.delete(path or "")
    assert job.published() is None
    with pytest.raises(CorruptDataError, match=r"norms/.* is missing"):
        pipeline.validate(job)
    assert open_numbers(job) == [0], "one shard starts the engine, which has the norm"
    commit_all(job)
    assert pipeline.open_shards(job) == [] and job.published() == published
    assert verify(job.root).problems == []


def test_a_folder_with_only_a_norm_is_ours(job: Job) -> None:
    pipeline.commit_shard(job, captured(job, 0))
    for name in (layout.PLANS, layout.SHARDS):
        shutil.rmtree(job.root.local_path(name) or "")
    assert open_root(job.settings).list("") == [".spool", layout.NORMS]


def test_rows_that_only_a_broken_capture_gives_stop_the_run(job: Job) -> None:
    """They are no property of a sample: a dataset must not shrink quietly around them."""
    with pytest.raises(CaptureError, match=r"zero_row.*come from the capture"):
        pipeline.commit_shard(job, captured(job, 0, spoil=first_of(job, 0), how=0.0))
    assert open_numbers(job) == [shard.index for shard in job.plan.meta.shards]


def test_a_spool_file_that_vanished_is_not_committed(job: Job) -> None:
    shard = captured(job, 0)
    shard.record = _check_and_seal(job, shard, FinalNormRef(kind="none"))
    shard.path.unlink()
    with pytest.raises(StoreError):
        pipeline.commit_shard(job, shard)
    assert not read_commits(job.root, job.plan.fingerprint)


def test_the_fingerprint_does_not_depend_on_the_folder_of_the_model(job: Job, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "model", tmp_path / "elsewhere")
    again = prepare(
        job.settings.model_copy(
            update={"model": job.settings.model.model_copy(update={"path": str(tmp_path / "elsewhere")})}
        )
    )
    assert again.plan.fingerprint == job.plan.fingerprint
    commit_all(job)
    changed = job.settings.model_copy(update={"chat": job.settings.chat.model_copy(update={"max_length": 40})})
    with pytest.raises(RootConflictError, match=r"(?s)extracted shards of another job.*samples:.*allow_change"):
        prepare(changed)
    assert prepare(changed.model_copy(update={"allow_change": True})).plan.fingerprint != job.plan.fingerprint


class TestRunShards:
    """The loop that overlaps capture and commit."""

    WIDE = SpoolLimit(nbytes=10**9, shards=1, row_bytes=10)

    @dataclass(frozen=True)
    class Task:
        """A shard to capture."""

        shard: int
        rows: int = 10

    def tasks(self, count: int) -> list[Task]:
        return [self.Task(n) for n in range(count)]

    @staticmethod
    def done(captured: Captured) -> Future[None]:
        future: Future[None] = Future()
        if captured.shard in captured.excluded:  # the test's own mark
            future.set_exception(StoreUnavailableError(f"commit {captured.shard}"))
        else:
            future.set_result(None)
        return future

    @staticmethod
    def make(folder: Path, failing: set[int]):
        def capture(task: Any, following: Any) -> Captured:
            path = folder / f"{task.shard}.tmp"
            path.touch()
            return Captured(task.shard, "", path, None, None, list(failing))  # type: ignore[arg-type]

        return capture

    def test_the_first_failure_is_raised(self, tmp_path: Path) -> None:
        capture = self.make(tmp_path, {1, 2})

        def capture_but_not_3(task: Any, following: Any) -> Captured:
            if task.shard == 3:
                raise RuntimeError("capture 3")
            return capture(task, following)

        with pytest.raises(StoreUnavailableError, match="commit 1"):
            local.run_shards(self.tasks(5), capture_but_not_3, self.done, lambda task: None, self.WIDE)

    def test_a_failed_capture_does_not_lose_the_commit_under_way(self, tmp_path: Path) -> None:
        waited = []
        capture = self.make(tmp_path, set())

        def capture_but_not_1(task: Any, following: Any) -> Captured:
            if task.shard == 1:
                raise RuntimeError("capture 1")
            return capture(task, following)

        def commit(captured: Captured) -> Future[None]:
            waited.append(captured.shard)
            return self.done(captured)

        with pytest.raises(RuntimeError, match="capture 1"):
            local.run_shards(self.tasks(3), capture_but_not_1, commit, lambda task: None, self.WIDE)
        assert waited == [0]

    @pytest.mark.parametrize(
        ("limit", "most"),
        [
            (SpoolLimit(nbytes=10**9, shards=1, row_bytes=10), 3),  # one is stored, one captured, one follows
            (SpoolLimit(nbytes=10**9, shards=3, row_bytes=10), 5),
            (SpoolLimit(nbytes=300, shards=9, row_bytes=10), 3),
            (SpoolLimit(nbytes=50, shards=9, row_bytes=10), 1),  # a shard larger than the spool has it to itself
        ],
    )
    def test_a_slow_store_holds_the_engine_back(self, tmp_path: Path, limit: SpoolLimit, most: int) -> None:
        capture, spooled, seen = self.make(tmp_path, set()), set(), []
        ahead = []

        def capture_and_count(task: Any, following: Any) -> Captured:
            spooled.add(task.shard)
            seen.append(len(spooled))
            if (then := following()) is not None:
                assert then.shard == task.shard + 1
                ahead.append(then.shard)
                spooled.add(then.shard)
                seen.append(len(spooled))
            return capture(task, following)

        def slow(captured: Captured) -> None:
            time.sleep(0.02)
            spooled.discard(captured.shard)
            captured.committed = True

        with ThreadPoolExecutor(limit.shards) as pool:
            local.run_shards(
                self.tasks(12), capture_and_count, lambda captured: pool.submit(slow, captured), seen.append, limit
            )
        assert max(value for value in seen if isinstance(value, int)) == most
        assert (most == 1) == (not ahead) and len(ahead) == len(set(ahead))
        assert not spooled and sum(isinstance(value, self.Task) for value in seen) == 12
