"""The committed JSON Schemas are those of the code."""

from __future__ import annotations

import json

import jsonschema
import pytest

from extract_core.store.records import CommitRecord, Manifest
from scripts import schemas


def test_the_newest_are_in_step_and_none_is_missing() -> None:
    for name, text in schemas.newest().items():
        assert (schemas.FOLDER / name).read_text("utf-8") == text, "run scripts/schemas.py and commit what it writes"
    for record, kind in ((Manifest, "manifest"), (CommitRecord, "commit-record")):
        names = {f"{kind}-{n}.json" for n in range(1, record.newest + 1)}
        assert names == {path.name for path in schemas.FOLDER.glob(f"{kind}-*.json")}


@pytest.mark.parametrize("path", sorted(schemas.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_each_is_a_schema_of_its_own_version(path) -> None:
    tree = json.loads(path.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(tree)
    assert tree["properties"]["schema_version"]["const"] == int(path.stem.rpartition("-")[2])
    assert tree["additionalProperties"] is False and "checksum" in tree["required"]
