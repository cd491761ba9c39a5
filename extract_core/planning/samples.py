"""Samples of a plan that is being made: token ids and masks on the local disk, the small columns in memory."""

from __future__ import annotations

import contextlib
import mmap
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from extract_core.chat import Sample
from extract_core.planning.plan import PLAN_SCHEMA, segments_array
from extract_core.planning.prefixes import Ints, Run

_BUFFER = 2**20
_KINDS: tuple[np.dtype[Any], ...] = (np.dtype("<i4"), np.dtype("u1"))


class SampleSpool:
    """Distinct samples by number, in the order in which they come.

    Args:
        folder: where two files go that hold token ids and masks.
    """

    def __init__(self, folder: Path):
        self._paths = (folder / "tokens.i32", folder / "masks.u8")
        self._files = [path.open("wb", buffering=_BUFFER) for path in self._paths]
        self._maps: list[mmap.mmap] = []
        self._ends = array("q", [0])
        self._ids: list[str] = []
        self._texts: tuple[list[str], ...] = ([], [], [])  # file, split, mask method: few different ones
        self._rows, self._turns, self._truncated = array("q"), array("q"), array("b")
        self._known: dict[str, str] = {}

    def add(self, sample: Sample) -> int:
        """Keep a sample; returns its number."""
        for file, values, kind in zip(self._files, (sample.token_ids, sample.loss_mask), _KINDS, strict=True):
            exact = values.dtype == kind and values.flags.c_contiguous
            file.write((values if exact else np.ascontiguousarray(values, dtype=kind)).data)
        self._ends.append(self._ends[-1] + len(sample.token_ids))
        self._ids.append(sample.sample_id)
        source = sample.source
        for column, text in zip(self._texts, (source.file, sample.split, sample.mask_method), strict=True):
            column.append(self._known.setdefault(text, text))
        self._rows.append(source.row)
        self._turns.append(-1 if source.turn is None else source.turn)
        self._truncated.append(sample.truncated)
        return len(self._ids) - 1

    def close(self) -> None:
        """Nothing is added any more; what was added can be read."""
        for file in self._files:
            file.close()
        arrays = []
        for path, kind in zip(self._paths, _KINDS, strict=True):
            if not path.stat().st_size:
                arrays.append(np.empty(0, kind))
                continue
            with path.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            arrays.append(np.frombuffer(self._maps[-1], kind))
        self.token_ids, self._masks = arrays
        self.offsets: Ints = np.frombuffer(self._ends, dtype=np.int64)
        self.lengths: Ints = np.diff(self.offsets)

    def release(self) -> None:
        """Let the system have the pages of token ids and masks that were read; they come back when they are needed."""
        for pages in self._maps:
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_DONTNEED)

    def sequences(self, numbers: Ints) -> list[np.ndarray[Any, Any]]:
        """Token ids of some samples."""
        return _slices(self.token_ids, self.offsets, numbers)

    def table(self, numbers: Ints, shard: int, segments: Sequence[Sequence[Run]]) -> pa.Table:
        """Some samples as a table of ``PLAN_SCHEMA``, in this order."""
        offsets = np.concatenate(([0], np.cumsum(self.lengths[numbers]))).astype(np.int32)
        at = numbers.tolist()
        files, splits, methods = ([column[n] for n in at] for column in self._texts)
        turns = np.frombuffer(self._turns, dtype=np.int64)[numbers]
        columns = {
            "sample_id": [self._ids[n] for n in at],
            "shard": np.full(len(at), shard, dtype=np.int32),
            "segments": segments_array(segments),
            "n_tokens": self.lengths[numbers].astype(np.int32),
            "token_ids": pa.ListArray.from_arrays(offsets, _joined(self.token_ids, self.offsets, numbers)),
            "loss_mask": pa.ListArray.from_arrays(offsets, _joined(self._masks, self.offsets, numbers)),
            "source_file": files,
            "source_row": np.frombuffer(self._rows, dtype=np.int64)[numbers],
            "source_turn": pa.array(turns.astype(np.int32), mask=turns < 0),
            "split": splits,
            "mask_method": methods,
            "truncated": np.frombuffer(self._truncated, dtype=np.int8)[numbers].astype(bool),
        }
        return pa.table([columns[name] for name in PLAN_SCHEMA.names], PLAN_SCHEMA)


def _slices(values: np.ndarray[Any, Any], offsets: Ints, numbers: Ints) -> list[np.ndarray[Any, Any]]:
    spans = zip(offsets[numbers].tolist(), offsets[numbers + 1].tolist(), strict=True)
    return [values[start:stop] for start, stop in spans]


def _joined(values: np.ndarray[Any, Any], offsets: Ints, numbers: Ints) -> np.ndarray[Any, Any]:
    """The values of some samples end to end, in an array of their own."""
    if (np.diff(numbers) == 1).all():
        return values[offsets[numbers[0]] : offsets[numbers[-1] + 1]].copy()
    return np.concatenate(_slices(values, offsets, numbers))
