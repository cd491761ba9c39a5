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


LINE = json.dumps(GOOD).encode()
ROW_ONLY = [
    (b'{"messages": "\xff"}', "invalid_utf8"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_utf8"),
    (b'{"n": ' + b"9" * 5000 + b"}", "not_json"),
    (b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}", "not_json"),
    (b'{"text": NaN}', "missing_field"),
    (b'{"text": 1e999}', "missing_field"),
    (b"5", "not_an_object"),
    (b'"],[\\"{"', "not_an_object"),
]


@pytest.mark.parametrize(("row", "reason"), ROW_ONLY)
def test_bad_row_costs_only_itself_in_an_array_and_in_jsonl_alike(tmp_path, row, reason) -> None:
    (tmp_path / "a.json").write_bytes(b" [\n" + b" ,\r\n".join([LINE, row, LINE]) + b"\n]\n")
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([LINE, row, LINE]))
    for name in ("a.json", "a.jsonl"):
        items = read(tmp_path / name)
        assert [type(item) for item in items] == [Sample, Dropped, Sample]
        assert [item.source.row for item in items] == [1, 2, 3]
        assert items[1].reason.value == reason


@pytest.mark.parametrize("row", [b'{"n": NaN}', b'{"n": 1e999}'])
def test_numbers_that_json_does_not_have_are_taken_in_an_array_as_in_jsonl(tmp_path, row) -> None:
    row = row[:-1] + b"," + LINE[1:]
    (tmp_path / "a.json").write_bytes(b"[" + row + b"," + LINE + b"]")
    assert [type(item) for item in read(tmp_path / "a.json")] == [Sample, Sample]


BROKEN = [
    (b"[" + LINE + b"," + LINE[:-9], 2, "the file ends inside the array"),
    (b"[" + LINE + b",", 2, "the file ends inside the array"),
    (b"[" + LINE + b", {bad}, " + LINE + b"]", 2, "not valid JSON at column 2"),
    (b"[" + LINE + b', {"a": "x}, ' + LINE + b', {"b": x"}, ' + LINE + b"]", 2, "not valid JSON"),
    (b"[" + LINE + b', {"a": [1}, {"b": 2}], ' + LINE + b"]", 2, "not valid JSON"),
    (b"[" + LINE + b" " + LINE + b"]", 1, "Extra data"),
    (b"[" + LINE + b",," + LINE + b"]", 2, "expected a value, got ','"),
    (b"[" + LINE + b",]", 2, "expected a value, got ']'"),
    (b"[" + LINE + b"}", 2, "expected ',' or ']', got '}'"),
    (b"[" + LINE + b"]\n[" + LINE + b"]", 2, "something follows the end of the array"),
    (b"[" + LINE + b"," + b"[" * 100_000 + b"]" * 100_000 + b"]", 2, "nested too deeply"),
]


@pytest.mark.parametrize(("content", "row", "text"), BROKEN)
def test_array_whose_rows_cannot_be_told_apart_stops_the_job(tmp_path, content, row, text) -> None:
    """Never a dropped row and an early end: rows that nobody counted would be missing from the accounts."""
    path = tmp_path / "chats.json"
    path.write_bytes(content)
    error = _raises(path, text)
    assert (error.file, error.row) == (str(path), row)
    assert "write it as JSONL, one object per line, where a bad row costs only itself" in str(error)


def test_array_larger_than_what_is_read_at_once(tmp_path) -> None:
    long = {"messages": [{"role": "user", "content": '\\"]}[{,' * 400_000}, GOOD["messages"][1]]}
    rows = [GOOD, {"messages": []}, *[OTHER] * 30_000]
    path = tmp_path / "chats.json.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps([*rows, long, GOOD]).encode(), 1))
    (file,) = input_files(DataSettings(path=str(path)))
    read_back = list(file.rows())
    assert [number for number, _ in read_back] == list(range(1, 30_005))
    assert [row for _, row in read_back] == [*rows, long, GOOD]


def test_empty_array_has_no_rows(tmp_path) -> None:
    (tmp_path / "a.json").write_text(" [ \n ] ")
    _raises(tmp_path / "a.json", "the input has no rows")


OTHER_KINDS = [
    ("a.json", json.dumps(GOOD, indent=2).encode(), "JSON written over several lines"),
    ("a.jsonl", json.dumps(GOOD, indent=2).encode() + b"\n" + json.dumps(OTHER, indent=2).encode(), "several lines"),
    ("a.json", json.dumps({"data": [GOOD] * 2000}, indent=1).encode(), "JSON written over several lines"),
    ("a.jsonl", json.dumps([GOOD, OTHER]).encode(), "one JSON array, expected one object per line; name it .json"),
    ("a.jsonl", json.dumps([GOOD] * 2000).encode(), "one JSON array"),
    ("a.jsonl", json.dumps([GOOD, OTHER], indent=2).encode(), "one JSON array"),
    ("a.jsonl", (json.dumps(GOOD) + "\n").encode("utf-16"), "UTF-16 or UTF-32 text, expected UTF-8"),
    ("a.json", json.dumps([GOOD]).encode("utf-16-be"), "UTF-16 or UTF-32 text, expected UTF-8"),
    ("a.jsonl", LINE + b"\r" + LINE + b"\r", "a lone carriage return, expected a line feed"),
]


@pytest.mark.parametrize(("name", "content", "text"), OTHER_KINDS)
def test_file_of_another_kind_is_recognised(tmp_path, name, content, text) -> None:
    (tmp_path / name).write_bytes(content)
    assert _raises(tmp_path, text).file == str(tmp_path / name)


def test_bad_rows_alone_are_no_other_kind_of_file(tmp_path) -> None:
    assert len(read(write_jsonl(tmp_path / "a.jsonl", b"{bad", b"[1", b"{", {"messages": 1}))) == 4
    assert len(read(write_jsonl(tmp_path / "b.jsonl", b"[1]", b"[2]"))) == 2


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


@pytest.mark.parametrize("path", ["", " ", [""], "file://"])
def test_empty_path_is_not_the_current_directory(tmp_path, monkeypatch, path) -> None:
    write_jsonl(tmp_path / "a.jsonl", GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputDataError, match=r"data\.path is empty"):
        input_files(DataSettings(path=path))


def test_what_is_no_file_is_called_what_it_is(tmp_path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", GOOD)
    odd = folder / "b.jsonl"
    odd.symlink_to("gone.jsonl")
    for place in (odd, folder, folder / "*.jsonl"):
        error = _raises(place, "is a link to gone.jsonl, which does not exist")
        assert error.file == str(odd)
    odd.unlink()
    odd.symlink_to(odd)
    for place in (odd, folder):
        assert _raises(place, "is a loop of symbolic links").file == str(odd)
    odd.unlink()
    os.mkfifo(odd)
    for place in (odd, folder, folder / "*.jsonl"):
        assert _raises(place, "expected a file, it is a named pipe").file == str(odd)
    odd.unlink()
    _raises("/dev/null", "it is a device")
    _raises("file://~nosuchuser_/a.jsonl", "cannot be read")
    (folder / "notes.txt").symlink_to("gone.txt")
    assert len(read(folder)) == 1


def test_name_that_is_not_utf8(tmp_path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff.jsonl"
    with open(name, "wb") as file:
        file.write(LINE)
    _raises(tmp_path, r"\udcff.jsonl, field 'data.path': the name is not valid UTF-8")


def test_links_to_folders_are_followed_once(tmp_path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "far" / "a.jsonl", GOOD)
    (tmp_path / "data" / "part").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(tmp_path / "data")
    assert [file.path for file in input_files(DataSettings(path=str(tmp_path / "data")))] == [
        str(tmp_path / "data" / "part" / "a.jsonl")
    ]


def test_the_jobs_own_root_is_no_input(tmp_path, monkeypatch) -> None:
    plans = tmp_path / "data" / "out" / "plans" / "0123"
    plans.mkdir(parents=True)
    chats = write_jsonl(tmp_path / "data" / "a.jsonl", GOOD)
    own = write_jsonl(plans / "dropped.jsonl", GOOD)
    monkeypatch.chdir(tmp_path)

    def found(path: object, root: str) -> list[str]:
        return [file.path for file in input_files(DataSettings(path=str(path)), exclude=root)]

    for root in (str(tmp_path / "data" / "out"), "data/out", f"file://{tmp_path}/data/out/"):
        assert found(tmp_path / "data", root) == [str(chats)]
        assert found(tmp_path / "data" / "**" / "*.jsonl", root) == [str(chats)]
        with pytest.raises(InputDataError, match="lies inside the root of the dataset that this job writes"):
            found(own, root)
    with pytest.raises(InputDataError, match="keep the chats in another folder"):
        found(tmp_path / "data", str(tmp_path / "data"))
    assert found(tmp_path / "data", "s3://data/out") == [str(chats), str(own)]
    assert found(tmp_path / "data", str(tmp_path / "data" / "ou")) == [str(chats), str(own)]


def test_the_jobs_own_root_behind_a_url_is_no_input() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for name in ("a.jsonl", "out/plans/0123/dropped.jsonl", "out2/b.jsonl"):
        fs.pipe(f"/own/{name}", LINE)
    for path in ("memory://own", "memory://own/**/*.jsonl"):
        found = input_files(DataSettings(path=path), exclude="memory://own/out/")
        assert [file.path for file in found] == ["memory:///own/a.jsonl", "memory:///own/out2/b.jsonl"]
    with pytest.raises(InputDataError, match="lies inside the root"):
        input_files(DataSettings(path="memory://own/out/plans"), exclude="memory://own/out")


def test_hugging_face_dataset_without_rows(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    empty, part = datasets.Dataset.from_dict({"messages": []}), datasets.Dataset.from_list([GOOD])
    empty.save_to_disk(str(tmp_path / "empty"))
    datasets.DatasetDict({"train": part, "test": empty}).save_to_disk(str(tmp_path / "both"))
    _raises(tmp_path / "empty", "the input has no rows")
    _raises(tmp_path / "both", "the input has no rows", split="test")
    assert len(read(tmp_path / "both")) == 1


def test_only_the_files_given_are_read(tmp_path) -> None:
    from extract_core.chat import read_samples
    from extract_core.settings import ChatSettings

    write_jsonl(tmp_path / "a.jsonl", GOOD)
    data = DataSettings(path=str(tmp_path))
    files = input_files(data)
    write_jsonl(tmp_path / "b.jsonl", OTHER)
    items = read_samples(data, ChatSettings(), chat_tokenizer(), max_length=99, vocab_size=500, files=files)
    assert [item.source.file for item in items] == [str(tmp_path / "a.jsonl")]


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
