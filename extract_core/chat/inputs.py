"""Find the input files of a job and read their rows, streamed, one at a time.

Every row comes as ``(number, row)``, where ``row`` is a mapping or the ``RowProblem`` that kept it from being read.
What makes the whole input unusable is an ``InputDataError``.
"""

from __future__ import annotations

import errno
import glob as globbing
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from extract_core.chat.conversation import COLUMNS, SHAPES
from extract_core.chat.jsontext import BrokenArrayError, TooDeepError, array_elements, parse_json, well_formed
from extract_core.chat.types import DropReason, RowProblem, printable
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
_MOST_BATCH_BYTES = 1 << 29
_CHUNK = 1 << 20
_HEAD = 1 << 16
_LONGEST_LINE = 1 << 26
"""What a row of JSON becomes takes up to thirty times its bytes; a compressed file may unfold to any length."""
_BOM = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_ONE_PER_LINE = "write one object per line into a .jsonl file (jq -c does that: `jq -c {0} FILE > FILE.jsonl`)"
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
)
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
        return _hf_rows(self) if self.format == "hf" else _json_rows(self)

    def refuse_other_kind(self) -> None:
        """Called for a file of which no row could be used: tell a wrong kind of file from many bad rows.

        Raises:
            InputDataError: the file is no JSONL in UTF-8 but something known; says how to convert it.
        """
        if self.format == "jsonl" and (what := _other_kind(self)) is not None:
            raise InputDataError(f"no row of it can be read: {what}", file=self.path)


def input_files(data: DataSettings, *, exclude: str | None = None) -> list[InputFile]:
    """Expand ``data.path`` (files, folders, globs, URLs, saved datasets) into files, sorted inside each entry.

    Args:
        data: where the chats are.
        exclude: a folder or URL, the job's own root: what folders and patterns find there is left out.

    Raises:
        InputDataError: nothing is there, nothing matches, a file is empty, is no file, lies in ``exclude``, or its
            format cannot be told.
    """
    found: dict[str, InputFile] = {}
    entries = [data.path] if isinstance(data.path, str) else data.path
    if not entries:
        raise InputDataError("expected at least one path, got an empty list", field="data.path")
    for entry in entries:
        if not entry.rpartition("://")[2].strip():
            raise InputDataError("data.path is empty; name a file, a folder, a pattern or a URL", field="data.path")
        for path, kind in _expand(entry, data, exclude):
            _refuse_unencodable(path)
            found.setdefault(path, InputFile(path, kind, data.split, data.storage_options))
    return list(found.values())


def _refuse_unencodable(path: str) -> None:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise InputDataError(
            "the name is not valid UTF-8, in which plans are written; rename it",
            file=printable(path, len(path)),
            field="data.path",
        ) from None


def _expand(entry: str, data: DataSettings, exclude: str | None) -> list[tuple[str, Format]]:
    if "://" in entry and not entry.startswith("file://"):
        return _expand_url(entry, data, exclude)
    try:
        return _expand_local(entry, data, _local_root(exclude))
    except (OSError, ValueError, RuntimeError) as error:  # Path raises the last two for names that no system takes
        where = getattr(error, "filename", None) or entry
        reason = getattr(error, "strerror", None) or _first_line(error)
        raise InputDataError(f"cannot be read: {reason}", file=str(where), field="data.path") from error


def _local_root(exclude: str | None) -> Path | None:
    if exclude is None or ("://" in exclude and not exclude.startswith("file://")):
        return None
    return _real(Path(exclude.removeprefix("file://")).expanduser())


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))  # unlike Path.resolve it takes a loop of links, which is refused later


def _expand_local(entry: str, data: DataSettings, root: Path | None) -> list[tuple[str, Format]]:
    path = Path(entry.removeprefix("file://")).expanduser()
    if root is not None and _real(path).is_relative_to(root):
        raise _inside_root(entry)
    if path.is_dir():
        if any((path / name).is_file() for name in _HF_MARKERS):
            return [(str(path), _forced(data, "hf", str(path)))]
        return _folder(entry, [str(item) for item in _walk(path, root)], data, _local_size)
    if not os.path.lexists(path) and globbing.has_magic(str(path)):
        matches = sorted(name for name in globbing.glob(str(path), recursive=True) if not Path(name).is_dir())  # noqa: PTH207
        if root is not None:
            matches = [name for name in matches if not _real(name).is_relative_to(root)]
        if not matches:
            raise InputDataError("no file matches this pattern; correct data.path", file=entry, field="data.path")
        return [(name, _checked(name, data, _local_size)) for name in matches]
    return [(str(path), _checked(str(path), data, _local_size))]


def _inside_root(entry: str) -> InputDataError:
    return InputDataError(
        "lies inside the root of the dataset that this job writes; keep the chats in another folder",
        file=entry,
        field="data.path",
    )


def _walk(folder: Path, root: Path | None) -> list[Path]:
    """Everything below a folder that is not hidden; links to folders are followed, each folder is read once."""
    found: list[Path] = []
    seen: set[Path] = set()

    def refuse(error: OSError) -> None:
        raise error

    for name, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        here = _real(name)
        if here in seen or here == root:
            folders.clear()
            continue
        seen.add(here)
        folders[:] = sorted(child for child in folders if _visible(Path(child)))
        found += [Path(name) / child for child in files if _visible(Path(child))]
    return sorted(found)


def _local_size(name: str) -> int:
    """Bytes of a regular file.

    Raises:
        InputDataError: it is something else; says what.
    """
    path = Path(name)
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            what = f"is a link to {path.readlink()}, which does not exist; restore the file or remove the link"
        else:
            what = "no such file or folder; correct data.path (a file, a folder, a pattern or a URL)"
        raise InputDataError(what, file=name, field="data.path") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InputDataError("is a loop of symbolic links; correct the links", file=name, field="data.path") from None
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    kind = next((text for check, text in _KINDS if check(status.st_mode)), "something else")
    raise InputDataError(
        f"expected a file, it is {kind}; the input is read more than once: store it in a file",
        file=name,
        field="data.path",
    )


def _expand_url(entry: str, data: DataSettings, exclude: str | None) -> list[tuple[str, Format]]:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(entry, **data.storage_options)
        own = _remote_root(fs, exclude)

        def size(url: str) -> int | None:
            return fs.size(fs._strip_protocol(url))

        def foreign(names: Iterator[str]) -> list[str]:
            return sorted(name for name in names if own is None or not f"{name}/".startswith(f"{own}/"))

        if own is not None and f"{path.rstrip('/')}/".startswith(f"{own}/"):
            raise _inside_root(entry)
        if globbing.has_magic(path) and not fs.exists(path):
            names = foreign(name for name in fs.glob(path) if not fs.isdir(name))
            if not names:
                raise InputDataError("no object matches this pattern; correct data.path", file=entry, field="data.path")
            return [(url, _checked(url, data, size)) for url in map(fs.unstrip_protocol, names)]
        if fs.isfile(path):
            return [(entry, _checked(entry, data, lambda _: fs.size(path)))]
        if fs.isdir(path):
            folder = path.rstrip("/")
            if any(fs.isfile(f"{folder}/{name}") for name in _HF_MARKERS):
                return [(entry, _forced(data, "hf", entry))]
            names = foreign(name for name in fs.find(path) if _visible(Path(name.removeprefix(folder).lstrip("/"))))
            return _folder(entry, [fs.unstrip_protocol(name) for name in names], data, size)
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


def _remote_root(fs: Any, exclude: str | None) -> str | None:
    """The path of the job's root on this file system, None if it is on another one."""
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    if exclude is None or exclude.partition("://")[0] not in protocols:
        return None
    return str(fs._strip_protocol(exclude)).rstrip("/")


def _visible(relative: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in relative.parts)


def _folder(
    entry: str, files: Sequence[str], data: DataSettings, size: Callable[[str], int | None]
) -> list[tuple[str, Format]]:
    known = [name for name in files if data.format != "auto" or _by_name(name) is not None]
    kinds = {_by_name(name) for name in known}
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
    return [(name, _checked(name, data, size)) for name in known]


def _plain_name(name: str) -> str:
    lower = name.lower()
    for suffix in _COMPRESSED:
        lower = lower.removesuffix(suffix)
    return lower


def _by_name(name: str) -> Format | None:
    return next((kind for suffix, kind in _SUFFIXES.items() if _plain_name(name).endswith(suffix)), None)


def _forced(data: DataSettings, natural: Format, name: str) -> Format:
    if data.format not in ("auto", natural):
        raise InputDataError(
            f"is a saved Hugging Face dataset, but data.format is {data.format!r}; set it to 'hf' or 'auto'",
            file=name,
            field="data.format",
        )
    return natural


def _checked(name: str, data: DataSettings, size: Callable[[str], int | None]) -> Format:
    length = size(name)
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
    if length == 0:
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


def _json_rows(file: InputFile) -> Iterator[Row]:
    rows = _array_rows if _is_array(file) else _line_rows
    with _opened(file.path, file.storage_options, "infer") as stream:
        yield from rows(file, stream)


def _is_array(file: InputFile) -> bool:
    return _plain_name(file.path).endswith(".json") and _head(file).removeprefix(_BOM).lstrip()[:1] == b"["


def _head(file: InputFile) -> bytes:
    with _opened(file.path, file.storage_options, "infer") as stream:
        return _next(iter(lambda: stream.read(_HEAD), b""), file, 1) or b""


def _line_rows(file: InputFile, stream: Any) -> Iterator[Row]:
    number = 0
    lines = _lines(stream)
    while (line := _next(lines, file, number + 1)) is not None:
        number += 1
        if isinstance(line, RowProblem):
            yield number, line
            continue
        if number == 1:
            line = line.removeprefix(_BOM)
        line = line.strip()
        if line:
            yield number, _parse_row(line)


def _lines(stream: Any) -> Iterator[bytes | RowProblem]:
    """Lines without their line feed; of one that is too long nothing is kept."""
    held: list[bytes] = []
    size = 0

    def taken(piece: bytes) -> bytes | RowProblem:
        if size + len(piece) > _LONGEST_LINE:
            return RowProblem(
                DropReason.TOO_MANY_CHARACTERS,
                f"the line has {size + len(piece):,} bytes, at most {_LONGEST_LINE:,} are read; split the row",
            )
        return b"".join([*held, piece])

    while chunk := stream.read(_CHUNK):
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            yield taken(chunk[start:end])
            held, size, start = [], 0, end + 1
        size += len(chunk) - start
        held = [*held, chunk[start:]] if size <= _LONGEST_LINE else []
    if size:
        yield taken(b"")


def _parse_row(raw: bytes) -> Mapping[str, Any] | RowProblem:
    try:
        value = parse_json(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowProblem(
            DropReason.INVALID_UTF8, f"byte 0x{raw[error.start]:02x} at {error.start} of the row is not valid UTF-8"
        )
    except json.JSONDecodeError as error:
        return RowProblem(DropReason.NOT_JSON, f"not valid JSON at column {error.colno}: {error.msg}")
    except TooDeepError as error:
        return RowProblem(DropReason.NOT_JSON, f"the JSON is {error}")
    except ValueError as error:
        return RowProblem(DropReason.NOT_JSON, f"not valid JSON: {error}")
    return _object(value)


def _object(value: Any) -> Mapping[str, Any] | RowProblem:
    if isinstance(value, Mapping):
        return value
    return RowProblem(DropReason.NOT_AN_OBJECT, f"expected a JSON object, got {type(value).__name__}")


def _array_rows(file: InputFile, stream: Any) -> Iterator[Row]:
    """Rows of a file that is one JSON array, as if each stood on a line of its own.

    Raises:
        InputDataError: a row is no JSON value, so that it cannot be told where the next one begins: rows may be
            dropped, but never without being counted.
    """
    if stream.read(len(_BOM)) != _BOM:
        stream.seek(0)
    number = 0
    elements = array_elements(stream)
    while (raw := _next(elements, file, number + 1)) is not None:
        number += 1
        row = _parse_row(raw)
        if isinstance(row, RowProblem) and not well_formed(raw):
            raise _broken_array(file, number, row.detail)
        yield number, row


def _broken_array(file: InputFile, row: int, what: str) -> InputDataError:
    return InputDataError(
        f"the JSON array cannot be read to its end: {what}; from this row on no row can be told from the next. "
        "Correct the file, or write it as JSONL, one object per line, where a bad row costs only itself",
        file=file.path,
        row=row,
    )


def _next(items: Iterator[Any], file: InputFile, row: int) -> Any:
    """The next line, element or batch of a file, None at its end."""
    try:
        return next(items, None)
    except BrokenArrayError as error:
        raise _broken_array(file, row, str(error)) from error
    except Exception as error:
        raise InputDataError(
            f"cannot be read further: {_first_line(error)}; the file is damaged or cut off", file=file.path, row=row
        ) from error


def _other_kind(file: InputFile) -> str | None:
    """What a file is that is no JSONL in UTF-8, and how to make it one; None where its beginning does not tell."""
    head = _head(file).lstrip()
    if head.startswith(_UTF16_MARKS) or b"\0" in head[:4]:
        return "it is UTF-16 or UTF-32 text, expected UTF-8; convert it (`iconv -f UTF-16 -t UTF-8 FILE`)"
    text = head.removeprefix(_BOM).decode("utf-8", errors="replace").strip()
    if _is_array(file) or text[:1] not in ("[", "{"):
        return None
    if "\n" not in text and "\r" in text:
        return "its lines end in a lone carriage return, expected a line feed; convert it (`tr '\\r' '\\n' < FILE`)"
    first_line = text.find("\n") if "\n" in text else len(text)
    try:
        several = json.JSONDecoder().raw_decode(text)[1] > first_line
    except json.JSONDecodeError as error:
        several = error.lineno > 2
    except (ValueError, RecursionError):
        return None
    if text[0] == "[" and (several or "\n" not in text):
        return f"it holds one JSON array, expected one object per line; name it .json, or {_ONE_PER_LINE.format('.[]')}"
    if several:
        return f"it holds JSON written over several lines; {_ONE_PER_LINE.format('.')}"
    return None


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
                    f"{_listed(parquet.schema_arrow.names)}",
                    file=file.path,
                    field="messages",
                )
            for batch in parquet.iter_batches(batch_size=_batch_size(parquet), columns=columns):
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
        except (pa.ArrowException, MemoryError) as error:
            raise InputDataError(
                f"is not a readable Parquet file: {_first_line(error)}", file=file.path, row=number + 1
            ) from error


def _batch_size(parquet: Any) -> int:
    """Rows to decode at once: a page says a value once for any number of rows, so each may be as large as its chunk."""
    chunks = (
        parquet.metadata.row_group(group).column(column).total_uncompressed_size
        for group in range(parquet.metadata.num_row_groups)
        for column in range(parquet.metadata.num_columns)
    )
    return max(1, min(_PARQUET_BATCH, _MOST_BATCH_BYTES // max(1, max(chunks, default=1))))


def _listed(names: Sequence[str]) -> str:
    return printable(", ".join(names[:12]), 500) or "none"


def _batch_rows(batch: Any) -> Iterator[Mapping[str, Any] | RowProblem]:
    if batch.nbytes > _LONGEST_LINE:  # become Python objects one by one, or not at all
        for i in range(batch.num_rows):
            row = batch.slice(i, 1)
            if row.nbytes > _LONGEST_LINE:
                yield RowProblem(
                    DropReason.TOO_MANY_CHARACTERS,
                    f"the row has {row.nbytes:,} bytes, at most {_LONGEST_LINE:,} are read; split it",
                )
            else:
                yield from _batch_rows(row)
        return
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
    import pyarrow as pa

    dataset = _hf_dataset(file)
    if dataset is None:
        return
    columns = [name for name in dataset.column_names if name in COLUMNS]
    if not set(columns) & set(SHAPES):
        raise InputDataError(
            f"expected one of the columns {', '.join(SHAPES)}; the dataset has {_listed(dataset.column_names)}",
            file=file.path,
            field="messages",
        )
    number = 0
    tables = dataset.select_columns(columns).with_format("arrow").iter(batch_size=_PARQUET_BATCH)
    while (table := _next(tables, file, number + 1)) is not None:
        try:
            table.validate(full=True)  # Arrow files are mapped as they are: offsets in them may lead anywhere
        except pa.ArrowException as error:
            raise InputDataError(f"is damaged: {_first_line(error)}", file=file.path, row=number + 1) from error
        for row in _batch_rows(table):
            number += 1
            yield number, row


def _hf_dataset(file: InputFile) -> Any:
    """The chosen split of a saved dataset; None where it was saved without rows, which ``datasets`` cannot load."""
    try:
        import datasets
    except ImportError:
        raise InputDataError(
            "a saved Hugging Face dataset needs the datasets package; install it or export the data to Parquet",
            file=file.path,
        ) from None
    fs, root = _hf_root(file)
    try:
        parts = json.loads(fs.cat_file(f"{root}/state.json")).get("_data_files", True)
        if not parts:
            return None
        for part in parts if isinstance(parts, list) else ():
            if part["filename"] != Path(part["filename"]).name:
                raise ValueError(
                    f"its state.json names {printable(part['filename'], 200)!r}, a file outside of its folder"
                )
        where = fs.unstrip_protocol(root) if "://" in file.path else root
        return datasets.load_from_disk(where, storage_options=dict(file.storage_options) or None)
    except Exception as error:
        raise InputDataError(
            f"cannot be opened as a saved Hugging Face dataset: {_first_line(error)}", file=file.path
        ) from error


def _hf_parts(file: InputFile) -> list[str]:
    """The files of a saved dataset that decide its rows: those of the chosen split only."""
    fs, root = _hf_root(file)
    try:
        names = sorted(name for name in fs.find(root) if name.endswith((".arrow", "state.json")))
        return [fs.unstrip_protocol(name) for name in names]
    except Exception as error:
        raise InputDataError(f"cannot be read: {_first_line(error)}", file=file.path) from error


def _hf_root(file: InputFile) -> tuple[Any, str]:
    """File system and folder of the chosen split."""
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(file.path, **file.storage_options)
        root = path.rstrip("/")
        if not fs.isfile(f"{root}/dataset_dict.json"):
            return fs, root
        splits = json.loads(fs.cat_file(f"{root}/dataset_dict.json"))["splits"]
    except Exception as error:
        raise InputDataError(
            f"cannot be opened as a saved Hugging Face dataset: {_first_line(error)}", file=file.path
        ) from error
    if file.split not in splits:
        raise InputDataError(
            f"the dataset has no split {file.split!r}; it has {_listed(list(map(str, splits)))}",
            file=file.path,
            field="data.split",
        )
    return fs, f"{root}/{file.split}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
