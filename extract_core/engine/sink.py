"""Rows on their way from a step to the shard file: a fixed pool of host buffers and the threads that empty it.

The pool is the only memory between engine and disk. When every buffer is in use, ``take`` waits: that is the
back-pressure, and the time is counted as stall.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from extract_core.errors import CaptureError, CoresampleError
from extract_core.store.shard import ShardWriter


@dataclass(frozen=True, slots=True)
class Span:
    """``rows`` consecutive rows: from ``source`` in the step's batch to ``target`` in the shard."""

    source: int
    target: int
    rows: int


@dataclass(slots=True)
class _Buffer:
    states: torch.Tensor  # [max_tokens, L, H]
    token_ids: torch.Tensor  # int32 [max_tokens]


class RowSink:
    """Copies the rows of each step into pooled buffers and writes them to their places.

    Args:
        max_tokens: most tokens of one step.
        layers: L.
        hidden_size: H.
        dtype: dtype of the stored rows; the engine's are converted.
        device: where the states are computed; on CUDA the pool is pinned and copies run on a side stream.
        buffer_bytes: bound of the pool; at least two buffers are made.
        threads: writer threads.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        buffer_bytes: int,
        threads: int,
    ):
        self._cuda = device.type == "cuda"
        step_bytes = max_tokens * layers * hidden_size * dtype.itemsize
        self.buffers = max(2, buffer_bytes // max(1, step_bytes))
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        for _ in range(self.buffers):
            self._free.put(
                _Buffer(
                    torch.empty((max_tokens, layers, hidden_size), dtype=dtype, pin_memory=self._cuda),
                    torch.empty(max_tokens, dtype=torch.int32, pin_memory=self._cuda),
                )
            )
        self._side = torch.cuda.Stream(device) if self._cuda else None
        self._work: queue.Queue[tuple[_Buffer, list[Span], Any] | None] = queue.Queue()
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
        self.counters = {"stall_s": 0.0, "take_s": 0.0, "write_s": 0.0, "rows": 0, "rows_again": 0, "steps": 0}

    def take(self, aux: list[torch.Tensor], token_ids: torch.Tensor, spans: list[Span]) -> None:
        """Copy a step's rows out of the engine's buffers, which the next step overwrites, and queue them.

        Args:
            aux: L tensors [>= total, H], on the compute stream.
            token_ids: int32 [total] that the forward read.
            spans: where the rows go.
        """
        self._raise_failure()
        started = time.perf_counter()
        try:
            buffer = self._free.get_nowait()
        except queue.Empty:
            buffer = self._free.get()
        taken = time.perf_counter()
        total = token_ids.shape[0]
        event = None
        if self._side is None:
            for layer, states in enumerate(aux):
                buffer.states[:total, layer].copy_(states[:total])
            buffer.token_ids[:total].copy_(token_ids)
        else:
            # The stack runs on the compute stream at once: aux tensors may be static CUDA-graph buffers.
            stacked = torch.stack([states[:total] for states in aux], dim=1).to(buffer.states.dtype)
            ids = token_ids.clone()
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                buffer.states[:total].copy_(stacked, non_blocking=True)
                buffer.token_ids[:total].copy_(ids, non_blocking=True)
                stacked.record_stream(self._side)
                ids.record_stream(self._side)
                event = self._side.record_event()
        self._work.put((buffer, spans, event))
        self.counters["stall_s"] += taken - started
        self.counters["take_s"] += time.perf_counter() - taken
        self.counters["steps"] += 1

    def close(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Wait until everything queued is written; returns which rows of the shard were (bool [rows]).

        Raises:
            CaptureError: a writer thread failed; carries its traceback.
        """
        self._work.join()
        self._raise_failure()
        self._shard = None
        return self._covered

    def _run(self) -> None:
        while True:
            item = self._work.get()
            try:
                if item is None:
                    return
                if self._failure is None:
                    self._write(*item)
            except BaseException as error:  # noqa: BLE001 - recorded; the next take or close raises it
                self._failure = error
            finally:
                if item is not None:
                    self._free.put(item[0])
                self._work.task_done()

    def _write(self, buffer: _Buffer, spans: list[Span], event: Any) -> None:
        if event is not None:
            event.synchronize()
        started = time.perf_counter()
        shard = self._shard
        if shard is None:
            raise CaptureError("rows arrived after their shard was closed")
        states = memoryview(buffer.states.view(torch.uint8).numpy().reshape(-1))
        ids = buffer.token_ids.numpy()
        width = shard.row_bytes
        rows = again = 0
        for span in spans:
            shard.write_rows(span.target, states[span.source * width : (span.source + span.rows) * width])
            shard.write_token_ids(span.target, ids[span.source : span.source + span.rows])
            rows += span.rows
        with self._lock:
            for span in spans:
                place = self._covered[span.target : span.target + span.rows]
                again += int(place.sum())
                place[:] = True
            self.counters["rows"] += rows
            self.counters["rows_again"] += again
            self.counters["write_s"] += time.perf_counter() - started

    def _raise_failure(self) -> None:
        if isinstance(self._failure, CoresampleError):
            raise self._failure  # a full disk is a full disk, wherever it shows
        if self._failure is not None:
            raise CaptureError(f"writing rows failed: {self._failure!r}") from self._failure
