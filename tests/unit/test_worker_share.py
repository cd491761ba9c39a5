"""A worker's part of a plan that another process has made."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from extract_core import local, pipeline
from extract_core.engine.follow import LogFollower
from extract_core.engine.logs import warning_line
from extract_core.errors import SettingsError
from extract_core.job import Job, planned, prepare
from extract_core.pipeline.share import Committed, is_committed, share_of, still_open
from extract_core.settings import JobSettings, load_job
from extract_core.store.commits import read_commits
from tests.unit.rows_kit import Rows, ten_chats


@pytest.fixture
def settings(tmp_path: Path) -> JobSettings:
    return ten_chats(tmp_path)


@pytest.fixture
def job(settings: JobSettings) -> Job:
    return prepare(settings)


def extract(job: Job, names: list[str]) -> None:
    """As a worker does with its share."""
    engine = Rows(job)
    local.extract(job, engine, todo=list(still_open(job, share_of(job, names))))  # type: ignore[arg-type]


def test_a_worker_opens_the_plan_without_data_or_tokenizer(job: Job, settings: JobSettings) -> None:
    Path(str(settings.data.path)).unlink()
    dumped = load_job(None, settings.model_dump(mode="json", exclude_unset=True))
    found = planned(dumped, job.plan.fingerprint)
    assert found.spec.deciding == job.spec.deciding
    assert found.layer_ids == job.layer_ids
    assert found.max_model_len == job.max_model_len
    assert found.engine_spec == job.engine_spec


def test_a_worker_that_would_compute_other_values_refuses(job: Job, settings: JobSettings) -> None:
    other = settings.model_copy(update={"layers": (1, 2)})
    with pytest.raises(SettingsError, match=r"differs in\n(.*\n)*Workers need the model files") as caught:
        planned(other, job.plan.fingerprint)
    assert "  layer_ids: planned [1, 2, 5], here [1, 2]\n" in str(caught.value)


def test_a_plan_that_is_not_there_is_named(settings: JobSettings) -> None:
    with pytest.raises(SettingsError, match="holds no plan 0123456789abcdef"):
        planned(settings, "0123456789abcdef")


def test_workers_share_a_plan_and_pass_over_what_is_committed(job: Job) -> None:
    names = [task.name for task in pipeline.open_shards(job)]
    assert len(names) >= 3
    watched = Committed(job, pipeline.open_shards(job))
    assert watched.look() == []
    tasks = share_of(job, names)
    extract(job, names[:1])
    assert watched.look() == names[:1]
    assert watched.look() == []
    assert [task.name for task in share_of(job, names)] == names[1:]
    assert [task.name for task in still_open(job, tasks)] == names[1:], "it was open when the share was made"
    assert is_committed(job, tasks[0])
    assert not is_committed(job, tasks[1])
    extract(job, names[::-1])
    assert sorted(watched.look()) == sorted(names[1:])
    commits = read_commits(job.root, job.plan.fingerprint)
    assert len(commits) == len(names)
    assert {len(shard.records) for shard in commits.values()} == {1}


def test_a_lost_shard_is_open_until_its_record_is_another_attempts(job: Job) -> None:
    names = [task.name for task in pipeline.open_shards(job)]
    extract(job, names)
    record = read_commits(job.root, job.plan.fingerprint)[0].records[0]
    assert record.object is not None
    job.root.delete(record.object)
    [task] = share_of(job, names)
    watched = Committed(job, [task])
    assert watched.look() == []
    assert not is_committed(job, task)
    extract(job, [task.name])
    assert share_of(job, names) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("WARNING 11-30 04:05:04 [scheduler.py:95] cache is small", (logging.WARNING, "cache is small")),
        ("(Worker_TP1 pid=7) ERROR 11-30 04:05:04 [x.py:1] died", (logging.ERROR, "died (Worker_TP1 pid=7)")),
        ("INFO 11-30 04:05:04 [x.py:1] fine", None),
        ("plain text", None),
        ("", None),
    ],
)
def test_warnings_of_an_engine_are_known(line: str, found: tuple[int, str] | None) -> None:
    assert warning_line(line) == found


def test_each_warning_is_passed_on_once_and_none_is_lost(tmp_path: Path) -> None:
    heard: list[tuple[int, str]] = []
    first, second = tmp_path / "engine-001.log", tmp_path / "engine-002.log"
    with LogFollower(tmp_path, lambda level, line: heard.append((level, line))):
        first.write_text("WARNING 11-30 04:05:04 [a.py:1] one\nWARNING 11-30 04:05:05 [a.py:1] one\nWARN")
        time.sleep(1.5)
        with first.open("a") as log:
            log.write("ING 11-30 04:05:06 [a.py:1] torn in two\n")
        second.write_text("ERROR 11-30 04:05:07 [a.py:1] the next engine\n")
    assert heard == [
        (logging.WARNING, "engine: one"),
        (logging.WARNING, "engine: torn in two"),
        (logging.ERROR, "engine: the next engine"),
    ]
