"""A job of the present Coresample goes on where an earlier one published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from extract_core import local, pipeline
from extract_core.job import Job
from extract_core.reader import HiddenStatesDataset
from extract_core.settings import load_job
from extract_core.spool import RunFolder
from extract_core.store.records import Manifest
from extract_core.store.root import Root
from extract_core.store.verify import verify
from extract_core.store.versions import list_versions
from scripts import golden

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GOLDEN = Path(__file__).parents[1] / "golden"
DATASETS = sorted(GOLDEN.glob("schema-*"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden.make_model(tmp_path_factory.mktemp("golden") / "model")


@pytest.fixture(scope="module")
def one_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The jobs differ in what is stored already, not in their engine: they lend each other the first one's."""
    make, folder = pipeline.make_supervisor, RunFolder(tmp_path_factory.mktemp("engine"))
    made: dict[str, Any] = {}

    def lend(job: Job, _: RunFolder) -> Any:
        engine = made.get(str(job.engine_spec)) or made.setdefault(str(job.engine_spec), make(job, folder))
        engine.preflight = {}  # each job has a self-test of its own
        return nullcontext(engine)

    with mock.patch.object(pipeline, "make_supervisor", lend):
        yield
    for engine in made.values():
        engine.close()
    folder.close()


@pytest.mark.parametrize("folder", DATASETS, ids=[folder.name for folder in DATASETS])
def test_the_next_version_of_an_old_root(folder: Path, model: Path, tmp_path: Path, one_engine: None) -> None:
    root = Path(shutil.copytree(folder / "dataset", tmp_path / "dataset"))
    settings = json.loads((folder / "job.json").read_text("utf-8"))
    settings["root"], settings["model"]["path"] = str(root), str(model)
    settings["data"]["path"] = str(golden.write_chats(tmp_path / "chats.jsonl", golden.CHATS + 2))
    settings["preflight"] = {"reference": "never"}
    (tmp_path / "job.json").write_text(json.dumps(settings), encoding="utf-8")
    result = local.run(load_job(tmp_path / "job.json"))
    assert result.new and result.manifest.version == 2 and result.manifest.schema_version == Manifest.newest
    assert result.manifest.accounting.published == golden.CHATS + 2

    store = Root.open(str(root))
    assert list_versions(store) == [1, 2]
    for version in (1, 2):
        assert verify(store, version).problems == []
    first, second = (
        {item["sample_id"]: item["hidden_states"] for item in HiddenStatesDataset(root, version=version)}
        for version in (1, 2)
    )
    assert len(first) == golden.CHATS and first.keys() < second.keys()
    for sample, rows in first.items():  # another machine may round in another way
        np.testing.assert_allclose(second[sample].float(), rows.float(), rtol=0.05, atol=0.05)
