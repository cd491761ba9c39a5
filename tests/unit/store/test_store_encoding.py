"""Encoded shards, shards copied to another file system, and the direct writer."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from extract_core.errors import CorruptDataError
from extract_core.store import encoding as enc
from extract_core.store.direct import BUFFER_BYTES, DirectWriter
from extract_core.store.encoding import BF16_SPLIT_ZSTD, NONE, FrameEncoder, decode_frame
from extract_core.store.root import Root
from extract_core.store.seal import seal_shard, seal_target
from extract_core.store.shard import HEADER_BYTES, Segment, ShardReader
from extract_core.store.writer import ShardWriter


def frame_of(encoder: FrameEncoder, rows: np.ndarray) -> bytearray:
    frame = bytearray()
    for piece in encoder.blocks(rows):
        frame += piece
    return frame


def unsealed(path: Path, rows: int = 300, layers: int = 3, hidden: int = 40, dtype: str = "bfloat16"):
    generator = torch.Generator().manual_seed(rows)
    states = torch.randn(rows, layers, hidden, generator=generator).to(getattr(torch, dtype))
    tokens = np.arange(rows, dtype=np.int32) * 3
    writer = ShardWriter(path, rows=rows, layer_ids=range(layers), hidden_size=hidden, dtype=dtype)
    writer.write_rows(0, memoryview(states.reshape(-1).view(torch.uint8).numpy()))
    writer.write_token_ids(0, tokens)
    writer.close()
    return states, tokens


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 4),
    st.integers(1, 30),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["bits", "same", "normal"]),
)
def test_every_bit_pattern_comes_back(rows, layers, hidden, seed, kind):
    random = np.random.default_rng(seed)
    if kind == "bits":  # NaN payloads, infinities, denormals, minus zero
        values = random.integers(0, 2**16, (rows, layers, hidden), dtype=np.uint16)
    elif kind == "same":
        values = np.full((rows, layers, hidden), random.integers(0, 2**16), np.uint16)
    else:
        values = torch.randn(rows, layers, hidden).bfloat16().view(torch.uint16).numpy()
    frame = frame_of(FrameEncoder(layers, hidden), values)
    assert np.array_equal(decode_frame(frame, rows, layers, hidden, "here"), values)


def test_many_blocks_and_several_calls_make_the_same_frame(monkeypatch):
    monkeypatch.setattr(enc, "BLOCK_VALUES", 64)
    values = np.random.default_rng(0).integers(0, 2**16, (37, 2, 16), dtype=np.uint16)
    encoder = FrameEncoder(2, 16)
    assert encoder.block_rows == 4
    whole = frame_of(encoder, values)
    assert frame_of(encoder, values[:8]) + frame_of(encoder, values[8:]) == whole
    assert np.array_equal(decode_frame(whole, 37, 2, 16, "here"), values)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: f[:-1], "ends in the block"),
        (lambda f: f + b"x", "1 bytes follow"),
        (lambda f: f[:10], "cannot hold 50 rows"),
        (lambda f: b"\xff\xff\xff\xff" + f[4:], "ends in the block"),
        (lambda f: f[:4] + b"junk" + f[8:], "here, block at byte 0"),
    ],
)
def test_a_damaged_frame_is_refused(harm, message):
    values = torch.randn(50, 2, 16).bfloat16().view(torch.uint16).numpy()
    frame = bytes(frame_of(FrameEncoder(2, 16), values))
    with pytest.raises(CorruptDataError, match=message):
        decode_frame(harm(frame), 50, 2, 16, "here")


@pytest.mark.parametrize("claimed", [2**40, 2**20, 7])
def test_a_frame_that_claims_another_size_takes_no_memory(claimed):
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(min(claimed, 2**20)))
    if claimed == 2**40:
        bomb = bytes.fromhex("28b52ffd") + b"\xe0" + claimed.to_bytes(8, "little") + bomb[-4:]
    frame = len(bomb).to_bytes(4, "little") + bomb + bytes(160)
    with pytest.raises(CorruptDataError, match="not of 160 bytes"):
        decode_frame(frame, 10, 1, 16, "here")


@pytest.mark.parametrize("keep", [None, [Segment(0, 100), Segment(100, 200)], [Segment(250, 50), Segment(7, 3)]])
@pytest.mark.parametrize("encoding", [NONE, BF16_SPLIT_ZSTD])
def test_a_shard_sealed_elsewhere_reads_as_one_sealed_in_place(tmp_path, keep, encoding):
    states, tokens = unsealed(tmp_path / "a")
    unsealed(tmp_path / "b")
    before = (tmp_path / "a").read_bytes()
    sealed = seal_shard(tmp_path / "a", keep=keep, metadata={"k": "v"}, encoding=encoding, target=tmp_path / "made")
    plain = seal_shard(tmp_path / "b", keep=keep, metadata={"k": "v"})
    assert (tmp_path / "a").read_bytes() == before
    data = sealed.path.read_bytes()
    assert (sealed.sha256, sealed.nbytes) == (hashlib.sha256(data).hexdigest(), len(data))
    if encoding == NONE:
        assert data == plain.path.read_bytes() and sealed.segments == plain.segments
    reader, other = ShardReader(sealed.path), ShardReader(plain.path)
    for kept, segment in zip(keep or [Segment(0, 300)], sealed.segments, strict=True):
        stored = reader.segment_bytes(segment.byte_offset, segment.byte_length)
        assert xxhash.xxh3_64_hexdigest(stored) == segment.xxh3
        wanted = states[kept.first_row : kept.first_row + kept.rows]
        assert torch.equal(reader.header.format.decode(stored, kept.rows, "here"), wanted)
        assert torch.equal(reader.rows(segment.first_row, segment.rows), wanted)
        assert (
            reader.token_ids(segment.first_row, segment.rows).tolist() == tokens[kept.first_row :][: kept.rows].tolist()
        )
    assert torch.equal(reader.rows(0, sealed.rows), other.rows(0, sealed.rows))
    for first, count in ((0, 1), (3, 5), (sealed.rows - 1, 1), (5, 0)):
        assert torch.equal(reader.rows(first, count), other.rows(first, count))


def test_an_encoded_shard_is_a_plain_safetensors_file_that_says_how_to_read_it(tmp_path):
    states, _ = unsealed(tmp_path / "a")
    keep = [Segment(0, 120), Segment(120, 180)]
    sealed = seal_shard(tmp_path / "a", keep=keep, metadata={}, encoding=BF16_SPLIT_ZSTD, target=tmp_path / "made")
    with safetensors.safe_open(sealed.path, "pt") as file:
        metadata = file.metadata()
        table, frames = file.get_tensor("frame_table"), file.get_tensor("frames")
        assert file.get_tensor("token_ids").shape == (300,)
    assert (metadata["encoding"], metadata["shape"], metadata["dtype"]) == (BF16_SPLIT_ZSTD, "[300, 3, 40]", "bfloat16")
    first, rows, offset, length, checksum = (int(value) for value in table[1])
    assert (first, rows, offset, length) == (120, 180, int(table[0, 3]), frames.numel() - offset)
    frame = frames[offset:].numpy()
    assert f"{checksum:016x}" == xxhash.xxh3_64_hexdigest(frame) == sealed.segments[1].xxh3
    found = decode_frame(bytearray(frame), rows, 3, 40, "here")
    assert np.array_equal(found, states[120:].view(torch.uint16).numpy())


def test_a_failed_sealing_leaves_no_target(tmp_path):
    unsealed(tmp_path / "a")
    for encoding in (NONE, BF16_SPLIT_ZSTD):
        with pytest.raises(ValueError, match="header"):
            seal_shard(
                tmp_path / "a",
                keep=None,
                metadata={"k": "x" * HEADER_BYTES},
                encoding=encoding,
                target=tmp_path / "made",
            )
    assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(ValueError, match="needs a target"):
        seal_shard(tmp_path / "a", keep=None, metadata={}, encoding=BF16_SPLIT_ZSTD)


@pytest.mark.parametrize("flip", ["frames", "frame_table", "token_ids"])
def test_damage_to_an_encoded_shard_is_found(tmp_path, flip):
    unsealed(tmp_path / "a")
    sealed = seal_shard(tmp_path / "a", keep=None, metadata={}, encoding=BF16_SPLIT_ZSTD, target=tmp_path / "made")
    header = ShardReader(sealed.path).header
    at = {"frames": header.data_offset + 9, "frame_table": header.table_offset, "token_ids": header.tokens_offset}[flip]
    data = bytearray(sealed.path.read_bytes())
    data[at] ^= 0x40
    sealed.path.write_bytes(data)
    if flip == "frame_table":
        with pytest.raises(CorruptDataError, match="frame table"):
            ShardReader(sealed.path)
    elif flip == "frames":
        with pytest.raises(CorruptDataError, match="segment 0"):
            ShardReader(sealed.path).rows(0, 300)
    assert hashlib.sha256(data).hexdigest() != sealed.sha256


def test_where_a_shard_is_sealed(tmp_path):
    spool = tmp_path / "00001-x.tmp"
    spool.touch()
    local, remote = Root.open(str(tmp_path / "root")), Root.open("memory://bucket/data")
    assert seal_target(local, spool, NONE) is None and seal_target(remote, spool, NONE) is None
    for root in (local, remote):
        assert seal_target(root, spool, BF16_SPLIT_ZSTD) == tmp_path / "00001-x-sealed.tmp"
    elsewhere = Path("/dev/shm") / f"coresample-test-{os.getpid()}.tmp"
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    elsewhere.touch()
    try:
        target = seal_target(local, elsewhere, NONE)
        assert target is not None and target.parent == tmp_path / "root" / "shards" and target.name.startswith(".tmp-")
    finally:
        elsewhere.unlink()


@pytest.mark.parametrize("folder", ["disk", "memory"])
@pytest.mark.parametrize("size", [0, 1, 4096, BUFFER_BYTES, BUFFER_BYTES + 1, 3 * BUFFER_BYTES + 12345])
def test_the_direct_writer_writes_what_it_is_given(tmp_path, folder, size):
    base = tmp_path if folder == "disk" else Path("/dev/shm")
    path = base / f"coresample-direct-{os.getpid()}-{size}"
    data = np.random.default_rng(size).bytes(size)
    writer = DirectWriter(path)
    try:
        at = 0
        for step in (1, 777, 10**6, 10**7, 10**8):
            writer.write(data[at : at + step])
            at += step
        writer.finish()
        assert writer.nbytes == size and path.read_bytes() == data
    finally:
        path.unlink()


def test_the_direct_writer_tells_of_a_full_disk(tmp_path):
    writer = DirectWriter(tmp_path / "file")
    os.close(writer._fd)
    writer._fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space"):
        writer.write(bytes(20 * BUFFER_BYTES))
        writer.finish()
    writer.abort()
    assert not (tmp_path / "file").exists()
