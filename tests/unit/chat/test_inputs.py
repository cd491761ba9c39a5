"""Finding and reading inputs: formats, places, row numbers, digests, and inputs that cannot be used as a whole."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from extract_core.chat import Dropped, DropReason, Sample, input_files
from extract_core.errors import InputDataError
from extract_core.settings import DataSettings
from tests.unit.chat.kit import GOOD, chat_tokenizer, read, write_jsonl

OTHER = {"conversations": [{"from": "human", "value": "how"}, {"from": "gpt", "value": "fine"}]}


def _raises(path, text: str, **options) -> InputDataError:
    with pytest.raises(InputDataError) as caught:
        read(path, **options)
    assert text in str(caught.value)
    return caught.value


def test_jsonl_counts_blank_lines_and_takes_bom_crlf_and_a_missing_last_newline(tmp_path) -> None:
    path = tmp_path / "chats.jsonl"
    line = json.dumps(GOOD, ensure_ascii=False).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n{bad\r\n" + line)
    items = read(path)
    assert [item.source.row for item in items] == [1, 4, 5]
    assert isinstance(items[1], Dropped)
    assert items[0].sample_id == items[2].sample_id


def test_compressed_jsonl(tmp_path) -> None:
    line = json.dumps(GOOD).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line))
    (tmp_path / "b.jsonl.bz2").write_bytes(bz2.compress(line))
    assert len(read(tmp_path)) == 2
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(os.urandom(5000).hex().encode() * 9)[:3000])
    error = _raises(cut, "damaged or cut off")
    assert error.row == 1
    (tmp_path / "not.jsonl.gz").write_bytes(line)
    _raises(tmp_path / "not.jsonl.gz", "cannot be read")


def test_json_array_is_streamed(tmp_path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([GOOD, 5, OTHER]))
    first, dropped, last = read(path)
    assert isinstance(first, Sample)
    assert isinstance(last, Sample)
    assert (dropped.reason, dropped.source.row) == (DropReason.NOT_AN_OBJECT, 2)


def test_json_array_that_is_cut_off_keeps_its_whole_rows(tmp_path) -> None:
    path = tmp_path / "chats.json"
    path.write_bytes(json.dumps([GOOD, OTHER, GOOD]).encode()[:-20])
    items = read(path)
    assert [type(item) for item in items] == [Sample, Sample, Dropped]
    assert f"{path}, row 3: the file ends inside this record" in items[-1].message


def test_parquet_with_structs_and_nulls(tmp_path) -> None:
    call = {"function": {"name": "f", "arguments": "{}"}, "id": "a", "type": "function"}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "hello", "tool_calls": None},
                {"role": "assistant", "content": "fine"},
            ]
        },
        {"messages": [{"role": "user", "content": None, "tool_calls": None}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"messages": None},
    ]
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    items = read(path)
    assert [item.source.row for item in items] == [1, 2, 3, 4]
    assert isinstance(items[0], Sample)
    assert [i.reason.value for i in items[1:]] == ["empty_content", "lost_by_template", "missing_field"]
    assert items[0].sample_id == read(write_jsonl(tmp_path / "a.jsonl", rows[0]))[0].sample_id


def test_parquet_with_text_that_is_not_utf8_drops_that_row(tmp_path) -> None:
    good = json.dumps(GOOD["messages"]).encode()
    column = pa.Array.from_buffers(pa.string(), 3, pa.array([good, b"\xff\xfe", good], pa.binary()).buffers())
    pq.write_table(pa.table({"messages": column}), tmp_path / "c.parquet")
    items = read(tmp_path / "c.parquet")
    assert [type(item) for item in items] == [Sample, Dropped, Sample]
    assert items[1].reason is DropReason.INVALID_UTF8


def test_parquet_that_cannot_be_used(tmp_path) -> None:
    path = tmp_path / "c.parquet"
    path.write_bytes(b"this is not parquet")
    _raises(path, f"{path}, row 1: is not a readable Parquet file")
    pq.write_table(pa.table({"text": ["a"], "id": [1]}), path)
    error = _raises(path, "expected one of the columns input_ids, messages, conversations; the file has text, id")
    assert error.field == "messages"
    pq.write_table(pa.table({"messages": pa.array([], pa.list_(pa.string()))}), path)
    _raises(path, f"{path}: the input has no rows")


def test_parquet_damaged_in_the_middle(tmp_path) -> None:
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"messages": [os.urandom(500).hex() for _ in range(100)]}), path, compression="zstd")
    raw = bytearray(path.read_bytes())
    raw[100:3000] = os.urandom(2900)
    path.write_bytes(raw)
    assert str(path) in str(_raises(path, "read"))


def test_hugging_face_dataset_and_its_splits(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_list([GOOD, GOOD])
    datasets.DatasetDict({"train": part, "test": part.select([0])}).save_to_disk(str(tmp_path / "both"))
    part.select([1]).save_to_disk(str(tmp_path / "one"))
    assert [item.split for item in read(tmp_path / "both")] == ["train", "train"]
    (item,) = read(tmp_path / "both", split="test")
    assert (item.split, item.source.row, item.source.file) == ("test", 1, str(tmp_path / "both"))
    assert item.sample_id == read(tmp_path / "one")[0].sample_id
    _raises(tmp_path / "both", "the dataset has no split 'dev'; it has train, test", split="dev")
    train, test = (input_files(DataSettings(path=str(tmp_path / "both"), split=s))[0] for s in ("train", "test"))
    assert train.sha256() != test.sha256()
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "text"))
    _raises(tmp_path / "text", "the dataset has text")
    _raises(tmp_path / "both", "set it to 'hf' or 'auto'", format="jsonl")


def test_any_fsspec_url(tmp_path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for name in ("a.jsonl", "b.jsonl", "_hidden.jsonl", "notes.txt"):
        fs.pipe(f"/chats/{name}", json.dumps(GOOD).encode())
    assert [item.source.file for item in read("memory://chats")] == [
        "memory:///chats/a.jsonl",
        "memory:///chats/b.jsonl",
    ]
    assert len(read("memory://chats/*.jsonl")) == 3
    assert len(read("memory://chats/a.jsonl")) == 1
    _raises("memory://chats/none.jsonl", "no such object or folder")
    _raises("memory://chats/none*.jsonl", "no object matches this pattern")
    _raises("nosuch://bucket/a.jsonl", "cannot be reached")


def test_folders_globs_and_lists_are_sorted_and_not_read_twice(tmp_path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.ndjson", ".hidden.jsonl", "_tmp.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, GOOD)
    found = [file.path for file in input_files(DataSettings(path=str(tmp_path)))]
    assert found == [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "deep/c.ndjson")]
    assert len(input_files(DataSettings(path=str(tmp_path / "*.jsonl")))) == 3
    both = DataSettings(path=[str(tmp_path / "b.jsonl"), str(tmp_path)])
    assert [file.path for file in input_files(both)] == [found[1], found[0], found[2]]


def test_digest_is_of_the_bytes(tmp_path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", GOOD, OTHER)
    (file,) = input_files(DataSettings(path=str(path)))
    assert file.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_inputs_that_cannot_be_used(tmp_path) -> None:
    missing = tmp_path / "none.jsonl"
    error = _raises(missing, f"{missing}, field 'data.path': no such file or folder; correct data.path")
    assert error.exit_code == 2
    _raises(tmp_path / "*.jsonl", "no file matches this pattern")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    _raises(empty, f"{empty}: the file is empty (0 bytes)")
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n\n")
    _raises(blank, f"{blank}: the input has no rows; expected at least one conversation")
    folder = tmp_path / "folder"
    folder.mkdir()
    _raises(folder, "the folder holds no .jsonl or")
    (folder / "a.txt").write_text("x")
    _raises(folder / "a.txt", "the format cannot be told from the name")
    assert isinstance(read(folder / "a.txt", format="jsonl")[0], Dropped)
    _raises(folder / "a.txt", "Dataset.save_to_disk", format="hf")
    write_jsonl(folder / "a.jsonl", GOOD)
    (folder / "b.parquet").write_bytes(b"x")
    _raises(folder, "both JSON and Parquet files")
    _raises([], "at least one path")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_file_without_permission(tmp_path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", GOOD)
    path.chmod(0)
    _raises(path, f"{path}: cannot be read")


def test_limit_and_progress_count_rows(tmp_path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", GOOD, b"{", OTHER, GOOD)
    seen: list[int] = []
    assert len(read(path, limit=3, on_progress=seen.append)) == 3
    assert seen == [1, 2, 3]
    both = [path, write_jsonl(tmp_path / "b.jsonl", GOOD)]
    assert len(read(both, limit=4)) == 4


def test_turn_mode_gives_one_candidate_per_assistant_turn(tmp_path) -> None:
    talk = [{"from": "human" if i % 2 == 0 else "gpt", "value": f"hello {i}"} for i in range(6)]
    path = write_jsonl(
        tmp_path / "a.jsonl", {"conversations": talk}, {"conversations": talk[:1]}, b"{", {"input_ids": [9]}
    )
    items = read(path, samples="turn")
    assert [(item.source.row, item.source.turn) for item in items] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (2, None),
        (3, None),
        (4, None),
    ]
    tokenizer = chat_tokenizer()
    for k, item in enumerate(items[:3]):
        text = tokenizer.hf.decode(item.token_ids)
        assert text.count("assistant") == k + 1
        assert tokenizer.hf.decode(item.token_ids[item.loss_mask == 1]) == f"hello {2 * k + 1}<|im_end|>"
    assert "assistant turn 1" in str(items[1].source)


@pytest.mark.parametrize(
    ("given", "role"),
    [
        ("human", "user"),
        ("User", "user"),
        ("gpt", "assistant"),
        ("chatgpt", "assistant"),
        ("bing", "assistant"),
        ("bard", "assistant"),
        ("system", "system"),
        ("observation", "tool"),
        ("function_response", "tool"),
    ],
)
def test_roles_of_sharegpt(tmp_path, given, role) -> None:
    turns = [{"from": given, "value": "x"}, {"from": "gpt", "value": "y"}]
    (item,) = read(write_jsonl(tmp_path / "a.jsonl", {"conversations": turns}))
    assert chat_tokenizer().hf.decode(item.token_ids).startswith(f"<|im_start|>{role}\n")


def test_shapes_that_mean_the_same_give_the_same_sample(tmp_path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
    ]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path = write_jsonl(
        tmp_path / "a.jsonl",
        {"messages": messages},
        {"messages": json.dumps(messages)},
        {"messages": [messages[0], {"role": "user", "content": parts}, messages[2]]},
        {"conversations": [{"from": "human", "value": "a\nb"}, {"from": "gpt", "value": "c"}], "system": "s"},
        {"conversations": messages},
        {"messages": messages, "conversations": None, "input_ids": None, "tools": None, "chat_template_kwargs": {}},
    )
    assert len({item.sample_id for item in read(path)}) == 1
