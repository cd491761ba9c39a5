"""docs/format.md says how to read a dataset without Coresample: its code runs, and it names every field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extract_core.store.index import INDEX_SCHEMA
from scripts import schemas

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests" / "golden"
TEXT = (REPOSITORY / "docs" / "format.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def expected(folder: Path) -> np.ndarray:
    return np.load(folder / "rows.npy")[: json.loads((folder / "rows.json").read_text("utf-8"))["positions"]]


def executed(block: str, **names: Any) -> dict[str, Any]:
    exec(compile(block, "docs/format.md", "exec"), names)
    return names


@pytest.mark.parametrize("name", ["schema-1", "schema-2", "schema-3"])
def test_plain_rows(name: str) -> None:
    reading, _ = BLOCKS
    assert "extract_core" not in reading and '"ROOT"' in reading
    found = executed(reading.replace('"ROOT"', repr(str(GOLDEN / name / "dataset"))))
    wanted = expected(GOLDEN / name)
    assert np.array_equal(found["rows"][: len(wanted)].float().numpy(), wanted)


def test_encoded_rows() -> None:
    reading, decoding = BLOCKS
    assert "extract_core" not in decoding
    folder = GOLDEN / "schema-3-bf16-split-zstd"
    index = reading[: reading.index("parts = []")].replace('"ROOT"', repr(str(folder / "dataset")))
    segment = executed(index)["sample"]["segments"][0]
    path = folder / "dataset" / "shards" / f"{segment['shard']}.safetensors"
    rows = executed(decoding, path=path, segment=segment)["rows"]
    wanted = expected(folder)
    assert len(rows) == segment["rows"] and np.array_equal(rows[: len(wanted)].float().numpy(), wanted)


def test_every_field_is_named() -> None:
    trees = [json.loads(text) for text in schemas.newest().values()]
    parts = [part for tree in trees for part in (tree, *tree["$defs"].values())]
    fields = {name for part in parts for name in part["properties"]} | set(INDEX_SCHEMA.names)
    assert not sorted(name for name in fields if f"`{name}`" not in TEXT)
