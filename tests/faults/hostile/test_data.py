"""Chats and models of strangers: bombs, damaged Arrow files, links out of a dataset, pickles."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest

from extract_core.chat.inputs import input_files
from extract_core.chat.types import DropReason, RowProblem
from extract_core.errors import InputDataError, ModelError
from extract_core.planning.model import inspect_model
from extract_core.settings import DataSettings, ModelSettings
from tests.faults.hostile.limits import confined
from tests.faults.hostile.parsers import CONFIG, _weights

ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def _reasons(path: Path) -> list[str]:
    return [
        row.reason.value if isinstance(row, RowProblem) else "read"
        for file in input_files(DataSettings(path=str(path)))
        for _, row in file.rows()
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_of_a_gigabyte_costs_its_row_only(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("chats.jsonl.gz" if packed else "chats.jsonl")
    good = json.dumps(ROW).encode() + b"\n"
    with gzip.open(path, "wb", 1) if packed else path.open("wb") as file:
        file.write(good + b'{"messages": "')
        for _ in range(1024):
            file.write(b"a" * 2**20)
        file.write(b'"}\n' + good)
    answer, found, peak = confined(lambda: _reasons(path), seconds=100)
    path.unlink()
    assert (answer, found) == ("returned", ["read", DropReason.TOO_MANY_CHARACTERS.value, "read"]), found
    assert peak < 1.5, f"{peak:.1f} GiB"


def test_lines_are_those_of_a_file(tmp_path: Path) -> None:
    """Every way a line may end, around the size of what is read at once."""
    path = tmp_path / "chats.jsonl"
    good = json.dumps(ROW).encode()
    for pad in (2**20 - len(good) - 1, 2**20 - len(good), 2**20 - len(good) + 1, 0):
        path.write_bytes(b" " * pad + good + b"\n\n" + good + b"\r\n" + good)
        assert _reasons(path) == ["read"] * 3


def test_a_saved_dataset_cannot_name_files_outside(tmp_path: Path) -> None:
    datasets.Dataset.from_list([ROW] * 3).save_to_disk(tmp_path / "other")
    datasets.Dataset.from_list([ROW] * 3).save_to_disk(tmp_path / "set")
    state = json.loads((tmp_path / "set/state.json").read_text())
    assert _reasons(tmp_path / "set") == ["read"] * 3
    name = next((tmp_path / "other").glob("*.arrow")).name
    for where in (f"../other/{name}", str(tmp_path / "other" / name)):
        (tmp_path / "set/state.json").write_text(json.dumps({**state, "_data_files": [{"filename": where}]}))
        with pytest.raises(InputDataError, match="outside of its folder"):
            _reasons(tmp_path / "set")


def test_a_damaged_arrow_file_is_an_error_not_a_crash(tmp_path: Path) -> None:
    datasets.Dataset.from_list([ROW] * 50).save_to_disk(tmp_path / "set")
    path = next((tmp_path / "set").glob("*.arrow"))
    whole = path.read_bytes()
    rng = np.random.default_rng(5)
    for _ in range(60):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 8):
            data[at] = int(rng.integers(256))
        path.write_bytes(data)
        answer, text, peak = confined(lambda: _reasons(tmp_path / "set"), seconds=30)
        assert answer in ("returned", "InputDataError"), (answer, text)
        assert peak < 2


def test_a_pickled_extension_type_is_not_loaded(tmp_path: Path) -> None:
    """Old pyarrow unpickled the type in a file's metadata."""
    import io

    import pyarrow.parquet as pq

    mark = tmp_path / "ran"
    pickled = f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()
    field = pa.field(
        "messages",
        pa.string(),
        metadata={"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickled},
    )
    sink = io.BytesIO()
    pq.write_table(pa.table([["[]"]], schema=pa.schema([field])), sink)
    (tmp_path / "a.parquet").write_bytes(sink.getvalue())
    _reasons(tmp_path / "a.parquet")
    assert not mark.exists()


def _model(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def test_pickled_weights_are_refused_and_never_read(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    pickled = f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()
    for name in ("pytorch_model__bin", "model__pt"):
        folder = _model(tmp_path / name, **{name: pickled})
        with pytest.raises(ModelError, match="pickles"):
            inspect_model(ModelSettings(path=str(folder)))
    assert not mark.exists()


def test_code_that_a_config_names_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    folder = _model(tmp_path / "m", model__safetensors=_weights())
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\n")
    for more in ({}, {"model_type": "unheard_of"}):
        config = {**CONFIG, **more, "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}}
        (folder / "config.json").write_text(json.dumps(config))
        try:
            inspect_model(ModelSettings(path=str(folder)))
        except ModelError:
            assert more
        assert not mark.exists()


@pytest.mark.parametrize("header", [10**12, 2**63, 101 * 2**20])
def test_weights_with_a_huge_header_are_refused(tmp_path: Path, header: int) -> None:
    folder = _model(tmp_path / "m")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header.to_bytes(8, "little") + b"{")
        file.truncate(2 * 10**12)
    answer, text, peak = confined(lambda: inspect_model(ModelSettings(path=str(folder))), seconds=60)
    assert answer == "ModelError" and "header" in text, text
    assert peak < 2


def test_a_parquet_file_that_unfolds_to_gigabytes(tmp_path: Path) -> None:
    """A kilobyte says one long text for every row; another has one row of millions of messages."""
    import pyarrow.parquet as pq

    long = json.dumps([{"role": "user", "content": "x" * 20 * 2**20}])
    table = pa.table({"messages": pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), [long])})
    pq.write_table(table, tmp_path / "long.parquet", compression="zstd")
    answer, found, peak = confined(lambda: _reasons(tmp_path / "long.parquet"), seconds=100)
    assert answer == "returned" and set(found) == {"read"}
    assert peak < 2.5, f"{peak:.1f} GiB"
    count = 6_000_000
    texts = [pa.array([text]).take(pa.array(np.zeros(count, np.int64))) for text in ("user", "x")]
    lists = pa.ListArray.from_arrays(
        pa.array([0, count], pa.int32()), pa.StructArray.from_arrays(texts, ["role", "content"])
    )
    pq.write_table(pa.table({"messages": lists}), tmp_path / "many.parquet", compression="zstd")
    del texts, lists
    answer, found, peak = confined(lambda: _reasons(tmp_path / "many.parquet"), seconds=100)
    assert (answer, found) == ("returned", [DropReason.TOO_MANY_CHARACTERS.value]), found
    assert peak < 2.5, f"{peak:.1f} GiB"
