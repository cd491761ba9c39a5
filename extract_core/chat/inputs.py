"""Find the input files of a job and read their rows, streamed, one at a time.

Every row comes as ``(number, row)``, where ``row`` is a mapping or the ``RowProblem`` that kept it from being read.
What makes the whole input unusable is an ``InputDataError``.
"""

from __future__ import annotations

import glob as globbing
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from extract_core.chat.conversation import COLUMNS, SHAPES
from extract_core.chat.types import DropReason, RowProblem
from extract_core.errors import InputDataError
from extract_core.settings import DataSettings

Format = Literal["jsonl", "parquet", "hf"]
Row = tuple[int, "Mapping[str, Any] | RowProblem"]

_SUFFIXES: Mapping[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_HF_MARKERS = ("state.json", "dataset_dict.json")
_PARQUET_BATCH = 256
_CHUNK = 1 << 20
_UNREADABLE = (OSError, EOFError, ValueError, ImportError)


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file (or one saved Hugging Face dataset) of the input.

    Attributes:
        path: local path or fsspec URL, as the job names it.
        format: ``jsonl``, ``parquet`` or ``hf``.
        split: the split to take from a Hugging Face DatasetDict.
        storage_options: fsspec options; no part of the digest.
    """

    path: str
    format: Format
    split: str = "train"
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def sha256(self) -> str:
        """Digest of the stored bytes, streamed: of the file, or of a dataset's files in the order of their names.

        Raises:
            InputDataError: a file cannot be read.
        """
        digest = hashlib.sha256()
        parts = _hf_parts(self) if self.format == "hf" else [self.path]
        for part in parts:
            if self.format == "hf":
                digest.update(part.rsplit("/", 1)[-1].encode() + b"\0")
            with _opened(part, self.storage_options) as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
        return digest.hexdigest()

    def rows(self) -> Iterator[Row]:
        """Stream the rows with their 1-based numbers.

        Raises:
            InputDataError: the file as a whole cannot be read.
        """
        if self.format == "parquet":
            return _parquet_rows(self)
        return _hf_rows(self) if self.format == "hf" else _jsonl_rows(self)


def input_files(data: DataSettings) -> list[InputFile]:
    """Expand ``data.path`` (files, folders, globs, URLs, saved datasets) into files, sorted inside each entry.

    Raises:
        InputDataError: nothing is there, nothing matches, a file is empty or its format cannot be told.
    """
    found: dict[str, InputFile] = {}
    entries = [data.path] if isinstance(data.path, str) else data.path
    if not entries:
        raise InputDataError("expected at least one path, got an empty list", field="data.path")
    for entry in entries:
        for path, kind in _expand(entry, data):
            found.setdefault(path, InputFile(path, kind, data.split, data.storage_options))
    return list(found.values())


def _expand(entry: str, data: DataSettings) -> list[tuple[str, Format]]:
    if "://" in entry and not entry.startswith("file://"):
        return _expand_url(entry, data)
    path = Path(entry.removeprefix("file://")).expanduser()
    try:
        if path.is_dir():
            if any((path / name).is_file() for name in _HF_MARKERS):
                return [(str(path), _forced(data, "hf", str(path)))]
            files = sorted(item for item in path.rglob("*") if item.is_file() and _visible(item.relative_to(path)))
            return _folder(entry, [(str(item), item.stat().st_size) for item in files], data)
        if path.is_file():
            return [(str(path), _checked(str(path), path.stat().st_size, data))]
        if globbing.has_magic(str(path)):
            matches = sorted(name for name in globbing.glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207
            if not matches:
                raise InputDataError("no file matches this pattern; correct data.path", file=entry, field="data.path")
            return [(name, _checked(name, Path(name).stat().st_size, data)) for name in matches]
    except OSError as error:
        raise InputDataError(f"cannot be read: {error.strerror or error}", file=entry, field="data.path") from error
    raise InputDataError(
        "no such file or folder; correct data.path (a file, a folder, a pattern or a URL)",
        file=entry,
        field="data.path",
    )


def _expand_url(entry: str, data: DataSettings) -> list[tuple[str, Format]]:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(entry, **data.storage_options)
        if globbing.has_magic(path) and not fs.exists(path):
            names = sorted(name for name in fs.glob(path) if not fs.isdir(name))
            if not names:
                raise InputDataError("no object matches this pattern; correct data.path", file=entry, field="data.path")
            return [(fs.unstrip_protocol(name), _checked(name, fs.size(name), data)) for name in names]
        if fs.isfile(path):
            return [(entry, _checked(entry, fs.size(path), data))]
        if fs.isdir(path):
            root = path.rstrip("/")
            if any(fs.isfile(f"{root}/{name}") for name in _HF_MARKERS):
                return [(entry, _forced(data, "hf", entry))]
            names = sorted(name for name in fs.find(path) if _visible(Path(name.removeprefix(root).lstrip("/"))))
            return _folder(entry, [(fs.unstrip_protocol(name), fs.size(name)) for name in names], data)
    except InputDataError:
        raise
    except Exception as error:
        raise InputDataError(
            f"cannot be reached: {_first_line(error)}; check the URL, data.storage_options and the credentials in the "
            "environment",
            file=entry,
            field="data.path",
        ) from error
    raise InputDataError("no such object or folder; correct data.path", file=entry, field="data.path")


def _visible(relative: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in relative.parts)


def _folder(entry: str, files: Sequence[tuple[str, int | None]], data: DataSettings) -> list[tuple[str, Format]]:
    known = [(name, size) for name, size in files if data.format != "auto" or _by_name(name) is not None]
    kinds = {_by_name(name) for name, _ in known}
    if not known:
        raise InputDataError(
            f"the folder holds no {' or '.join(_SUFFIXES)} file ({len(files)} files in all); correct data.path",
            file=entry,
            field="data.path",
        )
    if data.format == "auto" and len(kinds) > 1:
        raise InputDataError(
            "the folder holds both JSON and Parquet files; name the files or a pattern in data.path",
            file=entry,
            field="data.path",
        )
    return [(name, _checked(name, size, data)) for name, size in known]


def _by_name(name: str) -> Format | None:
    lower = name.lower()
    for suffix in _COMPRESSED:
        lower = lower.removesuffix(suffix)
    return next((kind for suffix, kind in _SUFFIXES.items() if lower.endswith(suffix)), None)


def _forced(data: DataSettings, natural: Format, name: str) -> Format:
    if data.format not in ("auto", natural):
        raise InputDataError(
            f"is a saved Hugging Face dataset, but data.format is {data.format!r}; set it to 'hf' or 'auto'",
            file=name,
            field="data.format",
        )
    return natural


def _checked(name: str, size: int | None, data: DataSettings) -> Format:
    if data.format == "hf":
        raise InputDataError(
            "data.format is 'hf', which needs a folder written by Dataset.save_to_disk", file=name, field="data.format"
        )
    kind = _by_name(name) if data.format == "auto" else data.format
    if kind is None:
        raise InputDataError(
            f"the format cannot be told from the name (known: {', '.join(_SUFFIXES)}); set data.format",
            file=name,
            field="data.format",
        )
    if size == 0:
        raise InputDataError("the file is empty (0 bytes); remove it from data.path or write it again", file=name)
    return kind


@contextmanager
def _opened(path: str, options: Mapping[str, Any], compression: str | None = None) -> Iterator[Any]:
    import fsspec

    try:
        with fsspec.open(path, "rb", compression=compression, **options) as stream:
            yield stream
    except (InputDataError, GeneratorExit):
        raise
    except _UNREADABLE as error:
        raise InputDataError(f"cannot be read: {_first_line(error)}", file=path) from error


def _jsonl_rows(file: InputFile) -> Iterator[Row]:
    with _opened(file.path, file.storage_options, "infer") as stream:
        first = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first == b"[" and ".json" in Path(file.path).suffixes:
        yield from _array_rows(file)
        return
    number = 0
    with _opened(file.path, file.storage_options, "infer") as stream:
        lines = iter(stream)
        while True:
            try:
                line = next(lines, None)
            except Exception as error:
                raise InputDataError(
                    f"cannot be read further: {_first_line(error)}; the file is damaged or cut off",
                    file=file.path,
                    row=number + 1,
                ) from error
            if line is None:
                return
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            line = line.strip()
            if line:
                yield number, _parse_line(line)


def _parse_line(line: bytes) -> Mapping[str, Any] | RowProblem:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return RowProblem(
            DropReason.INVALID_UTF8, f"byte 0x{line[error.start]:02x} at {error.start} of the line is not valid UTF-8"
        )
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return RowProblem(DropReason.NOT_JSON, f"not valid JSON at column {error.colno}: {error.msg}")
    except RecursionError:
        return RowProblem(DropReason.NOT_JSON, "the JSON is nested too deeply")
    except ValueError as error:
        return RowProblem(DropReason.NOT_JSON, f"not valid JSON: {error}")
    return _object(value)


def _object(value: Any) -> Mapping[str, Any] | RowProblem:
    if isinstance(value, Mapping):
        return value
    return RowProblem(DropReason.NOT_AN_OBJECT, f"expected a JSON object, got {type(value).__name__}")


def _array_rows(file: InputFile) -> Iterator[Row]:
    """Rows of a file that is one JSON array; a cut-off file ends with one problem, its whole rows are kept."""
    try:
        import ijson
    except ImportError:
        raise InputDataError(
            "the file holds one JSON array, which needs the ijson package; install it or write one object per line",
            file=file.path,
        ) from None
    number = 0
    with _opened(file.path, file.storage_options, "infer") as stream:
        if stream.read(3) != b"\xef\xbb\xbf":
            stream.seek(0)
        items = ijson.items(stream, "item", use_float=True)
        while True:
            number += 1
            try:
                value = next(items)
            except StopIteration:
                return
            except (ijson.JSONError, UnicodeDecodeError) as error:
                reason = "the file ends" if isinstance(error, ijson.IncompleteJSONError) else "the JSON breaks off"
                problem = RowProblem(
                    DropReason.NOT_JSON,
                    f"{reason} inside this record, nothing after it can be read: {_first_line(error)}",
                )
                yield number, problem
                return
            yield number, _object(value)


def _parquet_rows(file: InputFile) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    with _opened(file.path, file.storage_options) as stream:
        try:
            parquet = pq.ParquetFile(stream)
            columns = [name for name in parquet.schema_arrow.names if name in COLUMNS]
            if not set(columns) & set(SHAPES):
                raise InputDataError(
                    f"expected one of the columns {', '.join(SHAPES)}; the file has "
                    f"{', '.join(parquet.schema_arrow.names[:12]) or 'none'}",
                    file=file.path,
                    field="messages",
                )
            for batch in parquet.iter_batches(batch_size=_PARQUET_BATCH, columns=columns):
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
        except pa.ArrowException as error:
            raise InputDataError(
                f"is not a readable Parquet file: {_first_line(error)}", file=file.path, row=number + 1
            ) from error


def _batch_rows(batch: Any) -> Iterator[Mapping[str, Any] | RowProblem]:
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except (UnicodeDecodeError, KeyError, ValueError):
        for i in range(batch.num_rows):
            try:
                yield _without_nulls(batch.slice(i, 1).to_pylist(maps_as_pydicts="strict")[0])
            except UnicodeDecodeError as error:
                yield RowProblem(DropReason.INVALID_UTF8, f"a text column is not valid UTF-8: {error.reason}")
            except (KeyError, ValueError) as error:
                yield RowProblem(DropReason.INVALID_VALUE, f"the row cannot be decoded: {_first_line(error)}")
        return
    for row in rows:
        yield _without_nulls(row)


def _without_nulls(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Columnar files give every struct all fields of the column; those that are null were not there."""
    return {key: _prune(value, key) for key, value in row.items() if value is not None}


def _prune(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {
            key: _prune(item, str(key))
            for key, item in value.items()
            if item is not None or key in ("content", "value")
        }
    if isinstance(value, list) and name not in ("input_ids", "loss_mask"):
        return [_prune(item) for item in value]
    return value


def _hf_rows(file: InputFile) -> Iterator[Row]:
    dataset = _hf_dataset(file)
    columns = [name for name in dataset.column_names if name in COLUMNS]
    if not set(columns) & set(SHAPES):
        raise InputDataError(
            f"expected one of the columns {', '.join(SHAPES)}; the dataset has "
            f"{', '.join(dataset.column_names[:12]) or 'none'}",
            file=file.path,
            field="messages",
        )
    number = 0
    for table in dataset.select_columns(columns).with_format("arrow").iter(batch_size=_PARQUET_BATCH):
        for row in _batch_rows(table):
            number += 1
            yield number, row


def _hf_dataset(file: InputFile) -> Any:
    try:
        import datasets
    except ImportError:
        raise InputDataError(
            "a saved Hugging Face dataset needs the datasets package; install it or export the data to Parquet",
            file=file.path,
        ) from None
    try:
        loaded = datasets.load_from_disk(file.path, storage_options=dict(file.storage_options) or None)
    except Exception as error:
        raise InputDataError(
            f"cannot be opened as a saved Hugging Face dataset: {_first_line(error)}", file=file.path
        ) from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if file.split not in loaded:
        raise InputDataError(
            f"the dataset has no split {file.split!r}; it has {', '.join(map(str, loaded)) or 'none'}",
            file=file.path,
            field="data.split",
        )
    return loaded[file.split]


def _hf_parts(file: InputFile) -> list[str]:
    """The files of a saved dataset that decide its rows: those of the chosen split only."""
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(file.path, **file.storage_options)
        root = path.rstrip("/")
        if fs.isfile(f"{root}/dataset_dict.json"):
            root = f"{root}/{file.split}"
        names = sorted(name for name in fs.find(root) if name.endswith((".arrow", "state.json")))
        return [fs.unstrip_protocol(name) for name in names]
    except Exception as error:
        raise InputDataError(f"cannot be read: {_first_line(error)}", file=file.path) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
