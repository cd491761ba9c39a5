import hashlib
import os
import resource
import subprocess
import sys
import textwrap
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from extract_core.errors import CorruptDataError, StoreError
from extract_core.store.seal import seal_shard
from extract_core.store.shard import HEADER_BYTES, Segment, ShardReader, read_header
from extract_core.store.writer import ShardWriter
from tests.unit.store.kit import raw
from tests.unit.store.test_store_root import in_tiny_tmpfs

DTYPES = ["bfloat16", "float16", "float32"]


def write(path, states, tokens, layer_ids=None, order=None):
    rows, layers, hidden = states.shape
    name = str(states.dtype).removeprefix("torch.")
    writer = ShardWriter(
        path, rows=rows, layer_ids=layer_ids or list(range(1, layers + 1)), hidden_size=hidden, dtype=name
    )
    for start, stop in order or [(0, rows)]:
        writer.write_rows(start, raw(states[start:stop]))
        writer.write_token_ids(start, tokens[start:stop])
    writer.close()
    return path


def example(rows=7, layers=3, hidden=8, dtype="bfloat16", seed=0):
    states = torch.randn(rows, layers, hidden, generator=torch.Generator().manual_seed(seed))
    return states.to(getattr(torch, dtype)), np.arange(rows, dtype=np.int32) + 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 5])  # 5: an odd number of 16-bit values needs padding before the token ids
def test_plain_safetensors_opens_it(tmp_path, dtype, hidden):
    states, tokens = example(hidden=hidden, dtype=dtype)
    sealed = seal_shard(write(tmp_path / "s", states, tokens), keep=None, metadata={"model": "größer", "job": "1"})
    with safe_open(sealed.path, "pt") as file:
        assert torch.equal(file.get_tensor("hidden_states"), states)
        assert file.get_tensor("token_ids").tolist() == tokens.tolist()
        assert file.get_slice("hidden_states")[2:4].shape == (2, 3, hidden)
        metadata = file.metadata()
    assert metadata["model"] == "größer"
    assert metadata["layer_ids"] == "[1, 2, 3]"
    data = sealed.path.read_bytes()
    assert sealed.nbytes == len(data)
    assert sealed.sha256 == hashlib.sha256(data).hexdigest()
    (segment,) = sealed.segments
    part = data[segment.byte_offset : segment.byte_offset + segment.byte_length]
    assert part == bytes(raw(states))
    assert segment.xxh3 == xxhash.xxh3_64_hexdigest(part)
    assert segment.byte_offset == HEADER_BYTES


def test_reader_shares_pages_and_never_writes(tmp_path):
    states, tokens = example()
    sealed = seal_shard(write(tmp_path / "s", states, tokens), keep=None, metadata={"a": "b"})
    before = sealed.path.read_bytes()
    reader = ShardReader(sealed.path)
    assert torch.equal(reader.rows(2, 3), states[2:5])
    assert reader.token_ids(2, 3).tolist() == [102, 103, 104]
    assert reader.metadata["a"] == "b"
    assert reader.rows(0, 7).data_ptr() == reader.rows(0, 2).data_ptr()
    reader.rows(0, 7).zero_()
    assert sealed.path.read_bytes() == before
    with pytest.raises(CorruptDataError, match=r"has 7 rows; rows 6..8"):
        reader.rows(6, 2)


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_writes_gives_the_same_file(tmp_path, data):
    rows, layers, hidden = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    states, tokens = example(rows, layers, hidden, data.draw(st.sampled_from(DTYPES)))
    cuts = sorted(data.draw(st.sets(st.integers(0, rows))) | {0, rows})
    pieces = list(pairwise(cuts))
    order = data.draw(st.permutations(pieces)) + data.draw(st.lists(st.sampled_from(pieces), max_size=3))
    for name in ("plain", "mixed"):
        (tmp_path / name).unlink(missing_ok=True)
    plain = seal_shard(write(tmp_path / "plain", states, tokens), keep=None, metadata={})
    mixed = seal_shard(write(tmp_path / "mixed", states, tokens, order=order), keep=None, metadata={})
    assert plain.sha256 == mixed.sha256


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_compaction_keeps_exactly_the_kept_rows(tmp_path, data):
    rows, hidden = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    states, tokens = example(rows, 2, hidden, data.draw(st.sampled_from(DTYPES)))
    cuts = sorted(data.draw(st.sets(st.integers(0, rows))) | {0, rows})
    every = [Segment(a, b - a) for a, b in pairwise(cuts)]
    keep = data.draw(st.lists(st.sampled_from(every), unique=True, min_size=1))
    for name in ("all", "kept"):
        (tmp_path / name).unlink(missing_ok=True)
    sealed = seal_shard(write(tmp_path / "all", states, tokens), keep=keep, metadata={})
    file = sealed.path.read_bytes()
    reader = ShardReader(sealed.path)
    for old, new in zip(keep, sealed.segments, strict=True):
        assert torch.equal(reader.rows(new.first_row, new.rows), states[old.first_row : old.first_row + old.rows])
        assert reader.token_ids(new.first_row, new.rows).tolist() == list(
            range(100 + old.first_row, 100 + old.first_row + old.rows)
        )
        part = file[new.byte_offset : new.byte_offset + new.byte_length]
        assert new.xxh3 == xxhash.xxh3_64_hexdigest(part)
    assert sealed.rows == sum(segment.rows for segment in keep)
    # the same file as one that never held the other rows
    index = [i for s in sorted(keep, key=lambda s: s.first_row) for i in range(s.first_row, s.first_row + s.rows)]
    direct = seal_shard(write(tmp_path / "kept", states[index], tokens[index]), keep=None, metadata={})
    assert direct.sha256 == sealed.sha256


def test_many_threads(tmp_path):
    states, tokens = example(rows=200, hidden=64)
    one = seal_shard(write(tmp_path / "one", states, tokens), keep=None, metadata={})
    writer = ShardWriter(tmp_path / "many", rows=200, layer_ids=[1, 2, 3], hidden_size=64, dtype="bfloat16")

    def work(first):
        for row in range(first, 200, 4):
            writer.write_rows(row, raw(states[row : row + 1]))
            writer.write_token_ids(row, tokens[row : row + 1].astype(np.int64))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.missing() == []
    writer.close()
    assert seal_shard(tmp_path / "many", keep=None, metadata={}).sha256 == one.sha256


def test_writer_refuses_what_does_not_fit(tmp_path):
    writer = ShardWriter(tmp_path / "s", rows=4, layer_ids=[1, 2], hidden_size=3, dtype="float32")
    assert writer.row_bytes == 24
    row = memoryview(bytes(24))
    for call, message in (
        (lambda: writer.write_rows(4, row), "outside"),
        (lambda: writer.write_rows(-1, row), "outside"),
        (lambda: writer.write_rows(3, memoryview(bytes(48))), "outside"),
        (lambda: writer.write_rows(0, memoryview(bytes(23))), "not whole rows"),
        (lambda: writer.write_token_ids(3, np.arange(2)), "outside"),
        (lambda: writer.write_token_ids(0, np.array([-1])), "from 0"),
        (lambda: writer.write_token_ids(0, np.array([2**31])), "from 0"),
        (lambda: writer.write_token_ids(0, np.array([0.5])), "integers"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    writer.write_rows(1, row)
    assert writer.missing() == [Segment(0, 1), Segment(2, 2)]
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="closed"):
        writer.write_rows(0, row)
    writer.abort()
    assert not (tmp_path / "s").exists()
    for bad in (
        {"rows": 0},
        {"layer_ids": []},
        {"layer_ids": [2, 1]},
        {"layer_ids": [1, 1]},
        {"dtype": "int8"},
        {"hidden_size": 0},
    ):
        with pytest.raises(ValueError, match=r"shard needs|layer ids|dtype"):
            ShardWriter(tmp_path / "s", **{"rows": 1, "layer_ids": [1], "hidden_size": 1, "dtype": "float32"} | bad)
    assert os.listdir(tmp_path) == []


def test_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "s").write_bytes(b"precious")
    with pytest.raises(StoreError, match="create shard"):
        ShardWriter(tmp_path / "s", rows=1, layer_ids=[1], hidden_size=1, dtype="float32")
    assert (tmp_path / "s").read_bytes() == b"precious"


def test_unsealed_shard_is_not_readable(tmp_path):
    states, tokens = example()
    path = write(tmp_path / "s", states, tokens)
    with pytest.raises(SafetensorError):
        safe_open(path, "pt")
    with pytest.raises(CorruptDataError, match="no finished shard"):
        ShardReader(path)


def test_seal_refuses(tmp_path):
    states, tokens = example()
    path = write(tmp_path / "s", states, tokens)
    for keep in ([], [Segment(0, 8)], [Segment(0, 3), Segment(2, 2)], [Segment(0, 0)], [Segment(-1, 2)]):
        with pytest.raises(ValueError, match=r"no rows are kept|overlaps"):
            seal_shard(path, keep=keep, metadata={})
    with pytest.raises(ValueError, match="reserved"):
        seal_shard(path, keep=None, metadata={"a": "x" * HEADER_BYTES})
    with pytest.raises(ValueError, match="layer_ids"):
        seal_shard(path, keep=None, metadata={"layer_ids": "[9]"})
    seal_shard(path, keep=None, metadata={})  # none of these refusals harmed it
    with pytest.raises(CorruptDataError, match="sealed already"):
        seal_shard(path, keep=None, metadata={})
    os.truncate(write(tmp_path / "t", states, tokens), HEADER_BYTES + 5)
    with pytest.raises(CorruptDataError, match="bytes"):
        seal_shard(tmp_path / "t", keep=None, metadata={})
    (tmp_path / "u").write_bytes(b"\0" * 9000)
    with pytest.raises(CorruptDataError, match="no unsealed shard"):
        seal_shard(tmp_path / "u", keep=None, metadata={})


def test_killed_compaction_cannot_be_sealed_again(tmp_path):
    states, tokens = example(rows=3000, hidden=512)
    path = write(tmp_path / "s", states, tokens)
    code = """
        import os, signal, sys
        from pathlib import Path
        from extract_core.store import seal, shard
        plain, calls = seal.pwrite_all, []
        def dying(fd, offset, view):
            calls.append(offset)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            plain(fd, offset, view)
        seal.pwrite_all = dying
        seal.seal_shard(Path(sys.argv[1]), keep=[shard.Segment(1, 2000)], metadata={})
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    with pytest.raises(CorruptDataError, match="interrupted"):
        seal_shard(path, keep=None, metadata={})


def test_every_flipped_header_byte_is_noticed_or_harmless(tmp_path):
    """A reader either refuses the header or sees the same tensors; the digest covers the rest (see test_verify)."""
    states, tokens = example()
    sealed = seal_shard(write(tmp_path / "s", states, tokens), keep=None, metadata={"a": "b"})
    good = bytearray(sealed.path.read_bytes())
    used = len(bytes(good[8:HEADER_BYTES]).rstrip())

    def parse(data):
        return read_header(lambda start, stop: bytes(data[start:stop]), len(data), "s")

    reference = parse(good)
    noticed = 0
    for at in range(8 + used):
        bad = bytearray(good)
        bad[at] ^= 1
        try:
            header = parse(bad)
        except CorruptDataError:
            noticed += 1
        else:
            assert (header.rows, header.hidden_size, header.nbytes) == (
                reference.rows,
                reference.hidden_size,
                reference.nbytes,
            )
    assert noticed > used / 2


@pytest.mark.parametrize("cut", [0, 7, 100, HEADER_BYTES, HEADER_BYTES + 10, -1])
def test_truncated_shard(tmp_path, cut):
    states, tokens = example()
    sealed = seal_shard(write(tmp_path / "s", states, tokens), keep=None, metadata={})
    os.truncate(sealed.path, cut if cut >= 0 else sealed.nbytes + cut)
    with pytest.raises(CorruptDataError):
        ShardReader(sealed.path)


def test_full_disk_shows_before_any_row(tmp_path):
    done = in_tiny_tmpfs(
        """
        import os, sys
        from pathlib import Path
        from extract_core.errors import NoSpaceError
        from extract_core.store.writer import ShardWriter
        try:
            ShardWriter(Path(sys.argv[1]) / "s", rows=10000, layer_ids=[1], hidden_size=64, dtype="float32")
        except NoSpaceError as error:
            print(error)
        print(os.listdir(sys.argv[1]))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot reserve 2665536 bytes for shard" in done.stdout
    assert "free space" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_memory_does_not_grow_with_the_shard(tmp_path):
    """Sealing reads the file in pieces: with compaction, 96 MiB of rows need little memory."""
    code = """
        import resource, sys
        from pathlib import Path
        from extract_core.store.seal import seal_shard
        from extract_core.store.shard import Segment
        from extract_core.store.writer import ShardWriter
        writer = ShardWriter(Path(sys.argv[1]), rows=24 * 1024, layer_ids=[1], hidden_size=1024, dtype="float32")
        writer.close()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seal_shard(Path(sys.argv[1]), keep=[Segment(1, 24 * 1024 - 1)], metadata={})
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "s")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 32 * 1024  # KiB
    assert resource.getpagesize() <= HEADER_BYTES
