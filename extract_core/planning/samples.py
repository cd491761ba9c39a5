"""Samples of a plan that is being made: token ids and masks on the local disk, the small columns in memory."""

from __future__ import annotations

import contextlib
import mmap
import os
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa

from extract_core.chat import Sample
from extract_core.planning.plan import PLAN_SCHEMA
from extract_core.planning.prefixes import Ints

_BUFFER = 2**20
_KINDS: tuple[np.dtype[Any], ...] = (np.dtype("<i4"), np.dtype("u1"))


class SampleSpool:
    """Distinct samples by number, in the order in which they come.

    Args:
        folder: where two files go that hold token ids and masks.
    """

    def __init__(self, folder: Path):
        self._files: list[BinaryIO] = [
            (folder / name).open("w+b", buffering=_BUFFER) for name in ("tokens.i32", "masks.u8")
        ]
        self._map: mmap.mmap | None = None
        self._sizes = array("q")
        self._ids: list[str] = []
        self._known: dict[str, int] = {}  # files, splits and mask methods: few different texts
        self._texts = (array("i"), array("i"), array("i"))
        self._rows, self._turns, self._truncated = array("q"), array("q"), array("b")

    def add(self, sample: Sample) -> int:
        """Keep a sample; returns its number."""
        for file, values, kind in zip(self._files, (sample.token_ids, sample.loss_mask), _KINDS, strict=True):
            exact = values.dtype == kind and values.flags.c_contiguous
            file.write((values if exact else np.ascontiguousarray(values, dtype=kind)).data)
        self._sizes.append(len(sample.token_ids))
        source, known = sample.source, self._known
        files, splits, methods = self._texts
        files.append(known.setdefault(source.file, len(known)))
        splits.append(known.setdefault(sample.split, len(known)))
        methods.append(known.setdefault(sample.mask_method, len(known)))
        self._rows.append(source.row)
        self._turns.append(-1 if source.turn is None else source.turn)
        self._truncated.append(sample.truncated)
        self._ids.append(sample.sample_id)
        return len(self._ids) - 1

    def close(self) -> None:
        """Nothing is added any more; what was added can be read."""
        self.lengths: Ints = np.frombuffer(self._sizes, dtype=np.int64)
        self.offsets: Ints = np.concatenate(([0], np.cumsum(self.lengths)))
        for file in self._files:
            file.flush()
        self.token_ids: np.ndarray[Any, Any] = np.empty(0, _KINDS[0])
        if self.offsets[-1]:
            self._map = mmap.mmap(self._files[0].fileno(), 0, prot=mmap.PROT_READ)
            self.token_ids = np.frombuffer(self._map, _KINDS[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # a full disk; ``close`` or ``add`` has said so
                file.close()

    def release(self) -> None:
        """Let the system have the pages of ``token_ids`` that were read; they come back when they are needed."""
        if self._map is not None:
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def truncated(self) -> int:
        """Samples that were cut off."""
        return sum(self._truncated)

    @property
    def methods(self) -> dict[str, int]:
        """How many samples have which mask method."""
        names = list(self._known)
        return {names[code]: count for code, count in Counter(self._texts[2]).items()}

    def sequences(self, numbers: Ints) -> list[np.ndarray[Any, Any]]:
        """Token ids of some samples."""
        spans = zip(self.offsets[numbers].tolist(), self.offsets[numbers + 1].tolist(), strict=True)
        return [self.token_ids[start:stop] for start, stop in spans]

    def table(self, numbers: Ints, shard: int, segments: pa.ListArray) -> pa.Table:
        """Some samples as a table of ``PLAN_SCHEMA``, in this order."""
        lengths = self.lengths[numbers]
        offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        tokens, masks = (self._joined(file, kind, numbers) for file, kind in zip(self._files, _KINDS, strict=True))
        names = pa.array(list(self._known), pa.string())
        files, splits, methods = (
            names.take(pa.array(np.frombuffer(codes, dtype=np.intc)[numbers])) for codes in self._texts
        )
        turns = np.frombuffer(self._turns, dtype=np.int64)[numbers]
        columns = {
            "sample_id": pa.array([self._ids[n] for n in numbers.tolist()], pa.string()),
            "shard": pa.array(np.full(len(numbers), shard, dtype=np.int32)),
            "segments": segments,
            "n_tokens": pa.array(lengths.astype(np.int32)),
            "token_ids": pa.ListArray.from_arrays(offsets, pa.array(tokens)),
            "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(masks)),
            "source_file": files,
            "source_row": pa.array(np.frombuffer(self._rows, dtype=np.int64)[numbers]),
            "source_turn": pa.array(turns.astype(np.int32), mask=turns < 0),
            "split": splits,
            "mask_method": methods,
            "truncated": pa.array(np.frombuffer(self._truncated, dtype=np.int8)[numbers].astype(bool)),
        }
        return pa.Table.from_arrays([columns[name] for name in PLAN_SCHEMA.names], schema=PLAN_SCHEMA)

    def _joined(self, file: BinaryIO, kind: np.dtype[Any], numbers: Ints) -> np.ndarray[Any, Any]:
        """The values of some samples end to end; read, not mapped, so that no page of them counts as this process's."""
        begins = np.concatenate(([0], np.flatnonzero(np.diff(numbers) != 1) + 1, [len(numbers)]))
        first, last = numbers[begins[:-1]], numbers[begins[1:] - 1]
        result = np.empty(int(self.lengths[numbers].sum()), dtype=kind)
        view, at = result.data.cast("B"), 0
        for start, stop in zip(self.offsets[first].tolist(), self.offsets[last + 1].tolist(), strict=True):
            size = (stop - start) * kind.itemsize
            _read_into(file.fileno(), view[at : at + size], start * kind.itemsize)
            at += size
        return result


def _read_into(descriptor: int, view: memoryview, offset: int) -> None:
    while len(view):
        done = os.preadv(descriptor, [view], offset)
        if not done:
            raise OSError("a file of samples is shorter than what was written to it; the disk may be full")
        view, offset = view[done:], offset + done
