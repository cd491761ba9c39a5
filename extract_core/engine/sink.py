"""Rows on their way from a step to the shard file: a fixed pool of host buffers and the threads that empty it.

The pool is the only memory between engine and disk, whatever the size of a step: a step is cut to the size of the
pool's slots. When every slot is in use, ``take`` waits: that is the back-pressure, and the time is counted as stall.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from extract_core.engine.places import Span
from extract_core.errors import CaptureError, CoresampleError
from extract_core.store.writer import ShardWriter

_SLOTS = 8
"""Least number of slots: while some are written, others are filled."""


@dataclass(slots=True)
class _Slot:
    states: torch.Tensor  # [slot_rows, L, H]
    token_ids: torch.Tensor  # int32 [slot_rows]


class RowSink:
    """Copies the rows of each step into pooled buffers and writes them to their places.

    Args:
        max_tokens: most tokens of one step.
        layers: L.
        hidden_size: H.
        dtype: dtype of the stored rows; the engine's are converted.
        staging: on CUDA a device buffer [max_tokens, L, H] of ``dtype``, from which a side stream copies into the pool,
            which is then pinned; None on the CPU.
        pool_bytes: bound of the pool's rows; it holds at least one row a slot.
        threads: writer threads.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        staging: torch.Tensor | None,
        pool_bytes: int,
        threads: int,
    ):
        row_bytes = layers * hidden_size * dtype.itemsize
        self.slot_rows = max(1, min(max_tokens, pool_bytes // _SLOTS // row_bytes))
        self.slots = max(_SLOTS, pool_bytes // (self.slot_rows * row_bytes))
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        pinned = staging is not None
        for _ in range(self.slots):
            self._free.put(
                _Slot(
                    torch.empty((self.slot_rows, layers, hidden_size), dtype=dtype, pin_memory=pinned),
                    torch.empty(self.slot_rows, dtype=torch.int32, pin_memory=pinned),
                )
            )
        self._staging = staging
        self._staged_ids: torch.Tensor | None = None
        self._side: torch.cuda.Stream | None = None
        if staging is not None:
            self._side = torch.cuda.Stream(staging.device)
            self._staged_ids = torch.empty(max_tokens, dtype=torch.int32, device=staging.device)
        self._work: queue.Queue[tuple[_Slot, list[Span], Any]] = queue.Queue()
        self._shard: ShardWriter | None = None
        self._covered = np.zeros(0, dtype=bool)
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self.counters: dict[str, float] = {}
        for index in range(threads):
            threading.Thread(target=self._run, name=f"row-writer-{index}", daemon=True).start()

    def open(self, shard: ShardWriter, rows: int) -> None:
        """Start a shard; every row must be written exactly where ``Span.target`` says."""
        self._shard, self._failure = shard, None
        self._covered = np.zeros(rows, dtype=bool)
        self.counters = {
            "stall_s": 0.0,
            "take_s": 0.0,
            "write_s": 0.0,
            "rows": 0,
            "rows_again": 0,
            "computed": 0,
            "steps": 0,
        }

    def take(self, states: list[torch.Tensor], token_ids: torch.Tensor, spans: list[Span]) -> None:
        """Copy a step's rows out of the engine's buffers, which the next step overwrites, and queue them.

        Rows that have their place filled already (of a prefix that another sample shares, or computed again after a
        preemption) are left where they are.

        Args:
            states: L tensors [>= total, H], on the compute stream.
            token_ids: int32 [total] that the forward read.
            spans: where the rows go, ascending by source.
        """
        self._raise_failure()
        started, stalled = time.perf_counter(), self.counters["stall_s"]
        self.counters["steps"] += 1
        spans = self._claim(spans)
        if not spans:
            return
        total = token_ids.shape[0]
        if self._side is not None:
            self._stage(states, token_ids, total)
        for first in range(0, total, self.slot_rows):
            rows = min(self.slot_rows, total - first)
            inside = _cut(spans, first, rows)
            if not inside:
                continue
            slot = self._slot()
            self._work.put((slot, inside, self._fill(slot, states, token_ids, first, rows)))
        self.counters["take_s"] += time.perf_counter() - started - (self.counters["stall_s"] - stalled)

    def _claim(self, spans: list[Span]) -> list[Span]:
        """The parts of spans whose rows nobody has taken; they are taken now."""
        mine: list[Span] = []
        for span in spans:
            taken = self._covered[span.target : span.target + span.rows]
            found = int(np.count_nonzero(taken))
            self.counters["computed"] += span.rows
            self.counters["rows_again"] += found
            if found:
                edges = np.flatnonzero(np.diff(np.concatenate(([True], taken, [True]))))
                mine += [Span(span.source + a, span.target + a, b - a) for a, b in edges.reshape(-1, 2).tolist()]
            else:
                mine.append(span)
            taken[:] = True
        return mine

    def _slot(self) -> _Slot:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            waited = time.perf_counter()
            slot = self._free.get()
            self.counters["stall_s"] += time.perf_counter() - waited
            return slot

    def _stage(self, states: list[torch.Tensor], token_ids: torch.Tensor, total: int) -> None:
        assert self._staging is not None and self._staged_ids is not None and self._side is not None
        compute = torch.cuda.current_stream()
        compute.wait_stream(self._side)  # the copies of the step before read the same buffer
        # On the compute stream at once: the states may be static CUDA-graph buffers.
        for layer, rows in enumerate(states):
            self._staging[:total, layer].copy_(rows[:total])
        self._staged_ids[:total].copy_(token_ids)
        self._side.wait_stream(compute)

    def _fill(
        self, slot: _Slot, states: list[torch.Tensor], token_ids: torch.Tensor, first: int, rows: int
    ) -> torch.cuda.Event | None:
        if self._side is None:
            for layer, source in enumerate(states):
                slot.states[:rows, layer].copy_(source[first : first + rows])
            slot.token_ids[:rows].copy_(token_ids[first : first + rows])
            return None
        assert self._staging is not None and self._staged_ids is not None
        with torch.cuda.stream(self._side):
            slot.states[:rows].copy_(self._staging[first : first + rows], non_blocking=True)
            slot.token_ids[:rows].copy_(self._staged_ids[first : first + rows], non_blocking=True)
            return self._side.record_event()

    def covered(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Wait until everything queued is written; returns which rows of the shard were (bool [rows]).

        Raises:
            CaptureError: a writer thread failed; carries its traceback.
        """
        self._work.join()
        self._raise_failure()
        return self._covered

    def close(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """End the shard; the same as ``covered``."""
        covered = self.covered()
        self._shard = None
        return covered

    def _run(self) -> None:
        while True:
            slot, spans, event = self._work.get()
            try:
                if self._failure is None:
                    self._write(slot, spans, event)
            except BaseException as error:  # noqa: BLE001 - recorded; the next take or close raises it
                self._failure = error
            finally:
                self._free.put(slot)
                self._work.task_done()

    def _write(self, slot: _Slot, spans: list[Span], event: Any) -> None:
        if event is not None:
            event.synchronize()
        started = time.perf_counter()
        shard = self._shard
        if shard is None:
            raise CaptureError("rows arrived after their shard was closed")
        states = memoryview(slot.states.view(torch.uint8).numpy().reshape(-1))
        ids = slot.token_ids.numpy()
        width = shard.row_bytes
        rows = 0
        for span in spans:
            shard.write_rows(span.target, states[span.source * width : (span.source + span.rows) * width])
            shard.write_token_ids(span.target, ids[span.source : span.source + span.rows])
            rows += span.rows
        with self._lock:
            self.counters["rows"] += rows
            self.counters["write_s"] += time.perf_counter() - started

    def _raise_failure(self) -> None:
        if isinstance(self._failure, CoresampleError):
            raise self._failure  # a full disk is a full disk, wherever it shows
        if self._failure is not None:
            raise CaptureError(f"writing rows failed: {self._failure!r}") from self._failure


def _cut(spans: list[Span], first: int, rows: int) -> list[Span]:
    """The parts of ``spans`` with sources in ``first .. first + rows``, counted from ``first``."""
    parts = []
    for span in spans:
        start, end = max(span.source, first), min(span.source + span.rows, first + rows)
        if start < end:
            parts.append(Span(start - first, span.target + start - span.source, end - start))
    return parts
