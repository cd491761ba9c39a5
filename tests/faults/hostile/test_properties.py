"""Properties of the store and the planner, for whatever shapes and orders hypothesis finds."""

# ruff: noqa: E501 -- data in tables

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from extract_core.planning.making import MOST_TOKENS
from extract_core.planning.prefixes import into_shards, one_after_another
from extract_core.store.encoding import BF16_SPLIT_ZSTD, NONE, encodes
from extract_core.store.records import Accounting, canonical_json
from extract_core.store.root import Root
from extract_core.store.seal import seal_shard
from extract_core.store.shard import Segment, ShardReader
from extract_core.store.versions import latest_version, list_versions, read_manifest
from extract_core.store.writer import ShardWriter
from tests.unit.store import kit

BITS = {
    "bfloat16": (torch.bfloat16, np.uint16),
    "float16": (torch.float16, np.uint16),
    "float32": (torch.float32, np.uint32),
}
SPECIAL = {
    2: (0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8000, 0x7F81),
    4: (0x7F800000, 0x7FC00001, 0xFFFFFFFF, 1, 0x80000000),
}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_written_in_any_order_is_read_exactly(data: st.DataObject) -> None:
    """Any shape, dtype, write order, exclusion and encoding; NaN payloads, infinities and denormals keep their bits."""
    dtype = data.draw(st.sampled_from(sorted(BITS)))
    encoding = data.draw(st.sampled_from([e for e in (NONE, BF16_SPLIT_ZSTD) if encodes(e, dtype)]))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    layers, hidden = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 67))
    rows = sum(lengths)
    torch_dtype, bits_type = BITS[dtype]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    width = np.dtype(bits_type).itemsize
    bits = rng.integers(0, 2 ** (8 * width), (rows, layers, hidden), dtype=bits_type)
    special = np.array(SPECIAL[width], dtype=bits_type)
    where = rng.random(bits.shape) < data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    bits[where] = rng.choice(special, int(where.sum()))
    tokens = rng.integers(0, 2**31, rows).astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
    kept = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))  # any order, any left out
    pieces = data.draw(st.permutations(range(len(lengths))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        writer = ShardWriter(path, rows=rows, layer_ids=range(layers), hidden_size=hidden, dtype=dtype)
        for i in pieces:
            a, b = starts[i], starts[i + 1]
            cut = data.draw(st.integers(a, b))
            for low, high in ((cut, b), (a, cut)):
                if low < high:
                    writer.write_rows(low, memoryview(np.ascontiguousarray(bits[low:high])))
                    writer.write_token_ids(low, tokens[low:high])
        assert writer.missing() == []
        writer.close()
        keep = [Segment(starts[i], lengths[i]) for i in kept]
        target = {"encoding": encoding, "target": Path(folder) / "t"} if encoding != NONE else {}
        sealed = seal_shard(path, keep=keep, metadata={"a": "b"}, **target)
        raw = sealed.path.read_bytes()
        assert (hashlib.sha256(raw).hexdigest(), len(raw)) == (sealed.sha256, sealed.nbytes)
        assert sealed.rows == sum(lengths[i] for i in kept)
        reader = ShardReader(sealed.path)
        for i, segment in zip(kept, sealed.segments, strict=True):
            a, b = starts[i], starts[i + 1]
            found = reader.rows(segment.first_row, segment.rows)
            as_int = torch.int16 if width == 2 else torch.int32
            assert found.dtype == torch_dtype
            assert np.array_equal(found.contiguous().view(as_int).numpy().view(bits_type), bits[a:b])
            assert np.array_equal(reader.token_ids(segment.first_row, segment.rows).numpy(), tokens[a:b])
            stored = raw[segment.byte_offset : segment.byte_offset + segment.byte_length]
            assert xxhash.xxh3_64_hexdigest(stored) == segment.xxh3


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=200), st.integers(1, 500))
def test_a_layout_holds_every_sample_once_and_keeps_to_its_size(lengths: list[int], target: int) -> None:
    """Without shared prefixes; tests/unit/test_prefixes.py has those with."""
    most_samples = 20
    shards = into_shards(
        lengths, [0] * len(lengths), most_rows=target, most_samples=most_samples, most_tokens=MOST_TOKENS
    )
    assert [n for start, stop in shards for n in range(start, stop)] == list(range(len(lengths)))
    for number, (start, stop) in enumerate(shards):
        held = lengths[start:stop]
        assert sum(held) <= target or len(held) == 1  # a sample is never split
        assert len(held) <= most_samples
        if number + 1 < len(shards):
            assert sum(held) + lengths[stop] > target or len(held) == most_samples, "filled in the order of the input"
        made = one_after_another(np.array(held))
        assert [rows for ((_, rows),) in made.segments] == held and made.rows == sum(held)
        assert [first for ((first, _),) in made.segments] == [sum(held[:n]) for n in range(len(held))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_canonical_json_is_canonical(tree: object) -> None:
    import json

    data = canonical_json(tree)
    assert canonical_json(json.loads(data)) == data
    assert data.endswith(b"\n") and data.count(b"\n") == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3))
def test_accounting_closes_or_is_refused(published: int, duplicates: int, dropped: dict[str, int]) -> None:
    total = published + duplicates + sum(dropped.values())
    made = Accounting(input=total, published=published, duplicates=duplicates, dropped=dropped)
    assert Accounting.model_validate_json(made.model_dump_json()) == made
    for wrong in (total + 1, total - 1):
        try:
            Accounting(input=wrong, published=published, duplicates=duplicates, dropped=dropped)
        except ValueError:
            continue
        raise AssertionError(f"{wrong} input rows are taken for {total}")


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=8))
def test_versions_count_up_whoever_publishes_and_however_often(history: list[tuple[int, bool]]) -> None:
    """Attempts publish, sometimes twice (a run killed right after, taken up again): one version each, none lost."""
    from extract_core.store.versions import publish

    with tempfile.TemporaryDirectory() as folder:
        root = Root.open(f"{folder}/root")
        first, _ = kit.make_dataset(root, Path(folder) / "spool", shards=1, samples=1)
        seen = {first.attempt: 1}
        for who, twice in history:
            attempt = f"{who:032x}"
            for _ in range(2 if twice else 1):
                made = publish(
                    root, lambda n, a=attempt: first.model_copy(update={"version": n, "attempt": a}), attempt
                )
                assert made.version == seen.setdefault(attempt, len(seen) + 1)
        assert list_versions(root) == list(range(1, len(seen) + 1)) and latest_version(root) == len(seen)
        assert {read_manifest(root, n).attempt: n for n in list_versions(root)} == seen
