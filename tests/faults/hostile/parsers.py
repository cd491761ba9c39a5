"""Every parser of ours, with real files to begin from. The real work is done by the product's own functions."""

# ruff: noqa: E501 -- data in tables

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import socket
import struct
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from extract_core.chat.conversation import parse_row
from extract_core.chat.inputs import input_files
from extract_core.chat.types import RowProblem
from extract_core.engine import logs, protocol
from extract_core.errors import (
    CoresampleError,
    CorruptDataError,
    EngineError,
    InputDataError,
    LayerIdError,
    ModelError,
    SettingsError,
    StoreError,
)
from extract_core.planning.layers import resolve_layer_ids
from extract_core.planning.model import canonical_digest, inspect_model
from extract_core.planning.plan import PLAN_SCHEMA, load_plan
from extract_core.reader import HiddenStatesDataset
from extract_core.settings import DataSettings, ModelSettings, load_job
from extract_core.store import layout
from extract_core.store.commits import read_commits
from extract_core.store.encoding import BF16_SPLIT_ZSTD, FrameEncoder, decode_frame
from extract_core.store.index import INDEX_SCHEMA
from extract_core.store.norms import decode_norm, encode_norm
from extract_core.store.records import CommitRecord, Manifest, canonical_json
from extract_core.store.root import Root
from extract_core.store.seal import seal_shard
from extract_core.store.shard import Segment, ShardReader
from extract_core.store.tags import Tag, list_tags, open_ref, read_tag, write_tag
from extract_core.store.verify import verify
from extract_core.store.versions import parse_ref
from extract_core.store.writer import ShardWriter
from tests.faults.hostile import mutate
from tests.faults.hostile.fuzz import Parser
from tests.unit.store import kit

FINGERPRINT = kit.FINGERPRINT


# -- records ---------------------------------------------------------------------------------------------------------


def _dataset(folder: Path) -> Root:
    root = Root.open(str(folder / "root"))
    if not (folder / "root" / "versions").exists():
        kit.make_dataset(root, folder / "spool", shards=1, samples=3)
        write_tag(root, "good", 1)
    return root


def _checked(tree: Any) -> bytes:
    tree.pop("checksum", None)
    digest = hashlib.sha256(canonical_json(tree)).hexdigest()
    return canonical_json({**tree, "checksum": f"sha256:{digest}"})


def _commit_seeds(folder: Path) -> list[bytes]:
    return [_dataset(folder).read_bytes(layout.commit_path(FINGERPRINT, 0))]


def _commit(folder: Path, data: bytes) -> None:
    record = CommitRecord.load(data, "x")
    assert CommitRecord.load(record.dump(), "x") == record
    root = Root.open(str(folder / "root"))
    root.put_bytes(layout.commit_path("cd" * 32, 0), data.replace(b"ab" * 32, b"cd" * 32))
    with contextlib.suppress(CorruptDataError):
        read_commits(root, "cd" * 32)
    for path in record.objects:
        assert path.startswith(("shards/", "norms/")) and ".." not in path, path


def _manifest_seeds(folder: Path) -> list[bytes]:
    return [_dataset(folder).read_bytes(layout.manifest_path(1))]


def _manifest(folder: Path, data: bytes) -> None:
    manifest = Manifest.load(data, "x")
    assert Manifest.load(manifest.dump(), "x") == manifest
    for path in (*manifest.objects, manifest.index.path):
        assert path.startswith(("shards/", "norms/", "indexes/")) and ".." not in path, path
    number = manifest.version
    if number > 1:
        return
    root = Root.open(str(folder / "root"))
    kept = root.read_bytes(layout.manifest_path(1))
    root.put_bytes(layout.manifest_path(1), data)
    try:
        _read_all(root)
    finally:
        root.put_bytes(layout.manifest_path(1), kept)


def _read_all(root: Root) -> None:
    """Verify never raises for damage; the reader raises what it documents."""
    report = verify(root)
    try:
        for item in _items(HiddenStatesDataset(root.url)):
            assert len(item["input_ids"]) == len(item["loss_mask"]) == len(item["hidden_states"]), "lengths differ"
    except (StoreError, SettingsError):
        assert report.problems, "the reader fails, verify finds nothing"


def _items(dataset: HiddenStatesDataset) -> Any:
    for position in range(len(dataset)):
        yield dataset[position]
    norm = dataset.manifest.final_norm
    if norm is not None and norm.kind != "unknown":  # a version may honestly not have one
        _ = dataset.final_norm.apply(torch.zeros(1, dataset.manifest.hidden_size))


def _tag_seeds(folder: Path) -> list[bytes]:
    return [_dataset(folder).read_bytes(layout.tag_path("good"))]


def _tag(folder: Path, data: bytes) -> None:
    root = Root.open(str(folder / "root"))
    root.put_bytes(layout.tag_path("good"), data)
    list_tags(root, damaged={})
    tag = read_tag(root, "good")
    assert tag is not None and Tag.load(tag.dump(), "x") == tag


# -- shards, norms, index --------------------------------------------------------------------------------------------


@cache
def _states() -> torch.Tensor:
    bits = torch.randint(-(2**15), 2**15, (40, 3, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int16)
    return bits.view(torch.bfloat16)


def _shard(folder: Path, encoding: str) -> bytes:
    path = folder / "unsealed"
    path.unlink(missing_ok=True)
    writer = ShardWriter(path, rows=40, layer_ids=(2, 4, 6), hidden_size=16, dtype="bfloat16")
    writer.write_rows(0, kit.raw(_states()))
    writer.write_token_ids(0, np.arange(40, dtype=np.int32))
    writer.close()
    keep = [Segment(0, 10), Segment(10, 25), Segment(35, 5)]
    options = {} if encoding == "none" else {"encoding": encoding, "target": folder / "sealed"}
    sealed = seal_shard(path, keep=keep, metadata={"fingerprint": FINGERPRINT}, **options)
    return sealed.path.read_bytes()


def _shard_seeds(encoding: str) -> Any:
    return lambda folder: [_shard(folder, encoding)]


def _read_shard(folder: Path, data: bytes) -> None:
    path = folder / "shard"
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    reader = ShardReader(path)
    header = reader.header
    assert header.rows >= 0
    rows = min(header.rows, 100)
    assert reader.rows(0, rows).shape == (rows, len(header.layer_ids), header.hidden_size)
    assert reader.token_ids(0, rows).shape == (rows,)


def _mutate_shard(rng: random.Random, seeds: list[bytes]) -> bytes:
    """The header as JSON, or the bytes; the space reserved for it is kept where it fits."""
    data = rng.choice(seeds)
    if rng.random() < 0.4:
        return mutate.any_bytes(rng, seeds)
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    meta = entries["__metadata__"]
    if rng.random() < 0.3:
        name = rng.choice([name for name in ("layer_ids", "shape") if name in meta])
        meta[name] = json.dumps(mutate.tree(rng, json.loads(meta[name])))
    else:
        entries = mutate.tree(rng, entries)
    text = json.dumps(entries).encode()
    text = text.ljust(length) if len(text) <= length else text
    body = data[8 + length :]
    if rng.random() < 0.3:
        body = mutate.any_bytes(rng, [body])
    return len(text).to_bytes(8, "little") + text + body


def _frame_seeds(folder: Path) -> list[bytes]:
    bits = _states().view(torch.int16).numpy().view(np.uint16)
    return [b"".join(bytes(piece) for piece in FrameEncoder(3, 16).blocks(bits))]


def _frame(folder: Path, data: bytes) -> None:
    rows, layers, hidden = [(40, 3, 16), (2**40, 3, 16), (39, 3, 16), (1, 1, 1), (0, 3, 16)][
        data[-1] % 5 if data and data[-1] < 250 else 0
    ]
    assert decode_frame(data, rows, layers, hidden, "x").shape == (rows, layers, hidden)


def _norm_seeds(folder: Path) -> list[bytes]:
    return [encode_norm(kit.make_norm(), {"model": "tiny"})]


def _norm(folder: Path, data: bytes) -> None:
    norm = decode_norm(data, "x")
    if norm.hidden_size <= 4096:
        norm.apply(torch.zeros(2, norm.hidden_size))
    encode_norm(norm, {})


def _index_seeds(folder: Path) -> list[bytes]:
    root = _dataset(folder)
    manifest = Manifest.load(root.read_bytes(layout.manifest_path(1)), "x")
    return [root.read_bytes(manifest.index.path)]


def _mutate_index(rng: random.Random, seeds: list[bytes]) -> bytes:
    if rng.random() < 0.3:
        return mutate.any_bytes(rng, seeds)
    rows = pq.read_table(io.BytesIO(seeds[0])).to_pylist()
    try:
        table = pa.Table.from_pylist(mutate.tree(rng, rows), schema=INDEX_SCHEMA)
        sink = io.BytesIO()
        pq.write_table(table, sink)
        return sink.getvalue()
    except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
        return mutate.any_bytes(rng, seeds)


def _index(folder: Path, data: bytes) -> None:
    """A manifest that agrees with the index, as an attacker would publish it."""
    root = Root.open(str(folder / "root"))
    tree = json.loads(root.read_bytes(layout.manifest_path(1)))
    digest = hashlib.sha256(data).hexdigest()
    try:
        rows = pq.read_metadata(io.BytesIO(data)).num_rows
    except (pa.ArrowException, OSError, ValueError):
        rows = 3
    tree["index"] = {"path": layout.index_path(digest), "sha256": digest, "nbytes": max(1, len(data)), "rows": rows}
    tree["accounting"] |= {"input": rows, "published": rows, "dropped": {}}
    tree["totals"]["samples"] = rows
    tree["version"] = 2
    root.put_bytes(layout.index_path(digest), data)
    root.put_bytes(layout.manifest_path(2), _checked(tree))
    try:
        _read_all(root)
    finally:
        root.delete(layout.manifest_path(2))
        root.delete(layout.index_path(digest))


# -- plans -----------------------------------------------------------------------------------------------------------


def _plan_seeds(folder: Path) -> list[bytes]:
    rows = [
        {
            "sample_id": f"{n:032x}", "shard": n // 2, "segments": [{"first_row": 4 * (n % 2), "rows": 4}],
            "n_tokens": 4, "token_ids": [1, 2, 3, 4],
            "loss_mask": [0, 0, 1, 1], "source_file": "a.jsonl", "source_row": n + 1, "source_turn": None,
            "split": "train", "mask_method": "prefix", "truncated": False,
        }
        for n in range(4)
    ]  # fmt: skip
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, PLAN_SCHEMA) as writer:
        for shard in (0, 1):
            writer.write_table(pa.Table.from_pylist(rows[2 * shard : 2 * shard + 2], PLAN_SCHEMA))
    data = sink.getvalue()
    (folder / "layout").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    tree = {
        "schema_version": 4, "fingerprint": FINGERPRINT, "spec": {"model": {}}, "plan_sha256": digest, "row_bytes": 96,
        "shards": [{"index": 0, "rows": 8, "samples": 2}, {"index": 1, "rows": 8, "samples": 2}], "input": 4,
        "samples": 4, "tokens": 16, "rows": 16, "computed": 16, "supervised_tokens": 8, "truncated": 0, "duplicates": 0, "dropped": {},
        "malformed": 0, "mask_methods": {"prefix": 4}, "length_histogram": {"4": 4}, "longest": 4,
    }  # fmt: skip
    return [json.dumps(tree).encode(), data]


def _mutate_plan(rng: random.Random, seeds: list[bytes]) -> bytes:
    tree, table = json.loads(seeds[0]), seeds[1]
    if rng.random() < 0.5:
        tree = mutate.tree(rng, tree)
    else:
        table = mutate.any_bytes(rng, [table])
        tree["plan_sha256"] = hashlib.sha256(table).hexdigest()
    try:
        text = json.dumps({**tree, "checksum": canonical_digest(tree)}) if rng.random() < 0.5 else json.dumps(tree)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(seeds[0].decode())
    head = text.encode()
    return struct.pack("<I", len(head)) + head + table


def _plan(folder: Path, data: bytes) -> None:
    if data[:1] == b"{" or data[:4] == b"PAR1":
        return  # a seed, which is only half of an input
    (length,) = struct.unpack("<I", data[:4])
    head, table = data[4 : 4 + length], data[4 + length :]
    root = Root.open(str(folder / "plans"))
    root.put_bytes(layout.plan_meta_path(FINGERPRINT), head)
    root.put_bytes(layout.plan_path(FINGERPRINT, hashlib.sha256(table).hexdigest()), table)
    plan = load_plan(root, FINGERPRINT)
    assert plan is not None
    plan.sample_ids()
    for shard in plan.shards():
        shard.to_pylist()


# -- text ------------------------------------------------------------------------------------------------------------


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _ref_seeds(folder: Path) -> list[bytes]:
    root = _dataset(folder)
    return [f"{root.url}@1".encode(), f"{root.url}@good".encode(), b"s3://bucket/x@3", b"data@latest", b"~/x", b"a@b@c"]


def _ref(folder: Path, data: bytes) -> None:
    text = _text(data)
    parse_ref(text)
    if "://" not in text:
        open_ref(text)


def _names_seeds(folder: Path) -> list[bytes]:
    return [
        b"00001.json",
        b"000001.json",
        b"good.json",
        b"ab" * 32 + b".safetensors",
        b"plan-" + b"a" * 16 + b".parquet",
    ]


def _names(folder: Path, data: bytes) -> None:
    name = _text(data)
    if (place := layout.commit_shard(name)) is not None:
        assert layout.commit_path(FINGERPRINT, *place).endswith(f"/{name}"), name
    if (version := layout.manifest_version(name)) is not None:
        assert layout.manifest_path(version) == f"versions/{name}", name
    if (tag := layout.tag_name(name)) is not None:
        assert layout.tag_path(tag) == f"tags/{name}", name
    layout.object_digest(name), layout.is_plan_layout(name), layout.is_fingerprint(name)
    path = layout.quarantine_path(FINGERPRINT, name)
    assert path.count("/") == 3 and ".." not in path.split("/") and "\n" not in path, path
    assert len(path.rpartition("/")[2].encode()) <= 255, path
    for make in (layout.shard_path, layout.norm_path, layout.index_path, layout.tag_path, layout.plan_meta_path):
        try:
            made = make(name)
        except ValueError:
            continue
        assert ".." not in made.split("/") and "\n" not in made and made.isprintable(), made


YAML = b"""root: data
model: {path: /m, dtype: float32}
data:
  path: [a.jsonl, b.jsonl]
layers: [1, 2, last, "every:4"]
chat: &c {max_length: 512, template_kwargs: {a: b}}
store: {shard_bytes: 2MiB, storage_options: {client_kwargs: {a: "x"}}}
"""
YAML_TOKENS = (
    b"!!python/object/apply:os.system [ls]", b"!!python/name:os.system", b"!!binary aGk=", b"*c", b"&c", b"<<: *c",
    b"? [a]", b"!!set {a}", b"!!timestamp 2020-01-01", b".inf", b".nan", b"1e999", b"0x" + b"f" * 500, b"- - - -",
    b"%YAML 9.9\n---\n", b"---\n---\n", b"\t", b"{a: {a: {a: {a", b"|\n x", b"\xc2\x85", b"\xe2\x80\xa8", b"190:20:30",
)  # fmt: skip


def _mutate_yaml(rng: random.Random, seeds: list[bytes]) -> bytes:
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((0, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.choice((0, 1, 5))] = rng.choice(YAML_TOKENS)
    return mutate.any_bytes(rng, [bytes(data)]) if rng.random() < 0.5 else bytes(data)


def _yaml(folder: Path, data: bytes) -> None:
    (folder / "job.yaml").write_bytes(data)
    load_job(folder / "job.yaml")


def _layers(folder: Path, data: bytes) -> None:
    text = _text(data)
    items: list[Any] = [int(part) if part.isdecimal() and len(part) < 4000 else part for part in text.split(",")]
    ids = resolve_layer_ids(items, len(data) % 40 + 1)
    assert list(ids) == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= len(data) % 40 + 1


# -- chats -----------------------------------------------------------------------------------------------------------

ROWS = [
    {"messages": [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Yes", "tool_calls": [
        {"function": {"name": "f", "arguments": {"a": 1}}}]}], "tools": [{"a": 1}]},
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "system": "s"},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "chat_template_kwargs": {"a": [1]}},
]  # fmt: skip


def _jsonl_seeds(folder: Path) -> list[bytes]:
    return [b"".join(json.dumps(row).encode() + b"\n" for row in ROWS), json.dumps(ROWS[0]).encode()]


def _mutate_rows(rng: random.Random, seeds: list[bytes]) -> bytes:
    if rng.random() < 0.4:
        return mutate.any_bytes(rng, seeds)
    return b"".join(json.dumps(mutate.tree(rng, row)).encode() + b"\n" for row in ROWS)


def _rows(name: str) -> Any:
    def parse(folder: Path, data: bytes) -> None:
        (folder / name).write_bytes(data)
        for file in input_files(DataSettings(path=str(folder / name))):
            for _, row in file.rows():
                if not isinstance(row, RowProblem):
                    try:
                        parse_row(row, vocab_size=1000, max_characters=10_000)
                    except RowProblem as problem:
                        assert problem.detail
            file.refuse_other_kind()

    return parse


def _array_seeds(folder: Path) -> list[bytes]:
    return [json.dumps(ROWS).encode(), json.dumps(ROWS, indent=1).encode(), b"[]", b" [ 1 , {} ] "]


def _parquet_seeds(folder: Path) -> list[bytes]:
    made = []
    for rows in (
        [{"messages": [{"role": "user", "content": "Hi"}]}] * 5,
        [{"input_ids": [1, 2], "loss_mask": [1, 0]}] * 5,
    ):
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), sink)
        made.append(sink.getvalue())
    return made


# -- the engine ------------------------------------------------------------------------------------------------------


def _event_seeds(folder: Path) -> list[bytes]:
    events: list[Any] = [
        protocol.Starting("loading"),
        protocol.Ready({"vllm": "1", "final_norm": {"kind": "rms"}}, protocol.FinalNorm("rms", 1e-5, 0.0, b"\0" * 64)),
        protocol.Progress("x", ["a"], ["a"], 3, 1),
        protocol.ShardDone("f" * 32, {"a": 1}, {"a": 1}, {"b": "why"}, {"steps": 1.0}),
        protocol.Failed("EngineError", "message", "traceback"),
    ]
    return [struct.pack("!i", len(body)) + body for body in map(msgspec.msgpack.encode, events)]


def _event(folder: Path, data: bytes) -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours.detach())
    try:
        theirs.sendall(data[:100_000])
        theirs.close()
        for _ in range(5):
            protocol.receive_event(connection)
    finally:
        if not connection.closed:
            connection.close()


def _log_seeds(folder: Path) -> list[bytes]:
    try:
        raise ValueError("inner")
    except ValueError:
        import traceback

        text = traceback.format_exc()
    worker = "".join(f"(Worker_TP1 pid=7) ERROR 11-30 04:05:04 [a.py:95] {line}\n" for line in text.splitlines())
    dump = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n  File "a.py", line 1\n'
    return [text.encode(), worker.encode(), dump.encode(), (text + worker + dump).encode()]


def _log(folder: Path, data: bytes) -> None:
    path = folder / "engine.log"
    path.write_bytes(data)
    text = logs.read_tail(path)
    block = logs.root_block(text, known=text[: len(text) // 2])
    if block is not None:
        assert block.cause and block.text
    logs.last_error(text), logs.stack_dump(text), logs.is_consequence(text)
    assert len(logs.tail(text)) < 400_000


# -- the model -------------------------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 400,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "dtype": "float32", "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
    "quantization_config": None,
}  # fmt: skip


def _weights() -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(24)


def _model(config: bytes | None, weights: bytes | None, folder: Path) -> None:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_bytes(config if config is not None else json.dumps(CONFIG).encode())
    (model / "model.safetensors").write_bytes(weights if weights is not None else _weights())
    info = inspect_model(ModelSettings(path=str(model)))
    assert info.n_layers >= 1 and info.hidden_size >= 1 and info.vocab_size >= 1 and info.parameters >= 0


def _model_seeds(folder: Path, seed: bytes) -> list[bytes]:
    _model(None, None, folder)  # imports what reads models, which takes longer than an input may
    return [seed]


def _dump_plain(tree: Any) -> bytes:
    return json.dumps(tree).encode()


PARSERS: dict[str, Parser] = {
    "commit record": Parser(_commit_seeds, _commit, (CorruptDataError,), mutate.json_bytes(_checked)),
    "manifest": Parser(_manifest_seeds, _manifest, (CorruptDataError,), mutate.json_bytes(_checked), 0.5),
    "tag": Parser(_tag_seeds, _tag, (CorruptDataError,), mutate.json_bytes(_checked)),
    "shard": Parser(_shard_seeds("none"), _read_shard, (CorruptDataError,), _mutate_shard),
    "encoded shard": Parser(_shard_seeds(BF16_SPLIT_ZSTD), _read_shard, (CorruptDataError,), _mutate_shard),
    "frame": Parser(_frame_seeds, _frame, (CorruptDataError,)),
    "final norm": Parser(_norm_seeds, _norm, (CorruptDataError,), mutate.any_bytes),
    "index": Parser(_index_seeds, _index, (CorruptDataError,), _mutate_index, 0.2),
    "plan": Parser(_plan_seeds, _plan, (CorruptDataError,), _mutate_plan, 0.5),
    "reference": Parser(_ref_seeds, _ref, (SettingsError, StoreError, CoresampleError)),
    "object names": Parser(_names_seeds, _names, ()),
    "job file": Parser(lambda _: [YAML], _yaml, (SettingsError,), _mutate_yaml, 0.5),
    "layers": Parser(lambda _: [b"1,2,last", b"eagle3", b"all", b"every:3,0"], _layers, (LayerIdError,)),
    "jsonl": Parser(_jsonl_seeds, _rows("a.jsonl"), (InputDataError,), _mutate_rows),
    "json array": Parser(_array_seeds, _rows("a.json"), (InputDataError,)),
    "parquet chats": Parser(_parquet_seeds, _rows("a.parquet"), (InputDataError,), share=0.5),
    "engine message": Parser(_event_seeds, _event, (EngineError, EOFError)),
    "engine log": Parser(_log_seeds, _log, ()),
    "model config": Parser(
        lambda folder: _model_seeds(folder, _dump_plain(CONFIG)),
        lambda folder, data: _model(data, None, folder),
        (ModelError,),
        mutate.json_bytes(_dump_plain),
        0.2,
    ),
    "model weights": Parser(
        lambda folder: _model_seeds(folder, _weights()), lambda folder, data: _model(None, data, folder), (ModelError,), mutate.any_bytes, 0.2
    ),
}  # fmt: skip
