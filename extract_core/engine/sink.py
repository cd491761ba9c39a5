"""Rows on their way from a step to the shard files: a fixed pool of host buffers and the threads that empty it.

The pool is the only memory between engine and disk, whatever the size of a step: a step is cut to the size of the
pool's slots. When every slot is in use, ``take`` waits: that is the back-pressure, and the time is counted as stall.

Nothing here waits for the device but the writer threads: a step can hold rows of a shard that ends and of the next one,
and the engine's thread goes on while both are written.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from extract_core.engine.places import Flags, Span
from extract_core.errors import CaptureError, CoresampleError
from extract_core.store.writer import ShardWriter

_SLOTS = 8
"""Least number of slots: while some are written, others are filled."""
PROOFS = 2
"""Figures that a step carries for ``judge``."""


class OpenShard:
    """A shard whose rows are coming.

    Args:
        writer: of its file; may still be reserving its space.
        rows: number of rows.
    """

    def __init__(self, writer: Future[ShardWriter], rows: int):
        self.writer = writer
        self.taken: Flags = np.zeros(rows, dtype=bool)
        """Rows that the engine has given; they are written by the time that ``idle`` is set."""
        self.counters: dict[str, float] = {
            "stall_s": 0.0,
            "take_s": 0.0,
            "write_s": 0.0,
            "rows": 0,
            "rows_again": 0,
            "computed": 0,
            "steps": 0,
        }
        self._pending = 0
        self._lock = threading.Lock()
        self.idle = threading.Event()
        self.idle.set()

    def claim(self, spans: Sequence[Span]) -> list[Span]:
        """The parts of spans whose rows nobody has taken; they are taken now."""
        mine: list[Span] = []
        for span in spans:
            taken = self.taken[span.target : span.target + span.rows]
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

    def begin_write(self) -> None:
        """A piece of a step is on its way."""
        with self._lock:
            self._pending += 1
            self.idle.clear()

    def end_write(self, rows: int, seconds: float) -> None:
        """It is written, or given up."""
        with self._lock:
            self.counters["rows"] += rows
            self.counters["write_s"] += seconds
            self._pending -= 1
            if not self._pending:
                self.idle.set()


@dataclass(slots=True)
class _Slot:
    states: torch.Tensor  # [slot_rows, L, H]
    token_ids: torch.Tensor  # int32 [slot_rows]
    proof: torch.Tensor  # float32 [PROOFS]


@dataclass(slots=True)
class _Piece:
    """A filled slot, where its rows go, and the event after which they are there."""

    slot: _Slot
    places: list[tuple[OpenShard, list[Span]]]
    event: torch.cuda.Event | None
    judged: bool


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
        judge: called by a writer thread with the figures of each step that has some; raises where they are wrong.
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
        judge: Callable[[Sequence[float]], None] = lambda figures: None,
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
                    torch.empty(PROOFS, dtype=torch.float32, pin_memory=pinned),
                )
            )
        self._staging = staging
        self._staged_ids: torch.Tensor | None = None
        self._staged_proof: torch.Tensor | None = None
        self._side: torch.cuda.Stream | None = None
        if staging is not None:
            self._side = torch.cuda.Stream(staging.device)
            self._staged_ids = torch.empty(max_tokens, dtype=torch.int32, device=staging.device)
            self._staged_proof = torch.empty(PROOFS, dtype=torch.float32, device=staging.device)
        self._work: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        self._judge = judge
        self._failure: BaseException | None = None
        for index in range(threads):
            threading.Thread(target=self._run, name=f"row-writer-{index}", daemon=True).start()

    def take(
        self,
        states: list[torch.Tensor],
        token_ids: torch.Tensor,
        places: Sequence[tuple[OpenShard, list[Span]]],
        proof: torch.Tensor | None = None,
    ) -> None:
        """Copy a step's rows out of the engine's buffers, which the next step overwrites, and queue them.

        Rows that have their place filled already (of a prefix that another sample shares, or computed again after a
        preemption) are left where they are.

        Args:
            states: L tensors [>= total, H], on the compute stream.
            token_ids: int32 [total] that the forward read.
            places: for each shard in the step where its rows go, ascending by source.
            proof: float32 [PROOFS] for ``judge``, on the compute stream.

        Raises:
            CoresampleError: what a writer thread failed with, in any shard; nothing goes on after it.
        """
        self.raise_failure()
        started, stalled = time.perf_counter(), 0.0
        mine = []
        for shard, spans in places:
            shard.counters["steps"] += 1
            mine.append((shard, shard.claim(spans)))
        mine = [(shard, spans) for shard, spans in mine if spans]
        if not mine:
            return
        total = token_ids.shape[0]
        if self._side is not None:
            self._stage(states, token_ids, total, proof)
        for first in range(0, total, self.slot_rows):
            rows = min(self.slot_rows, total - first)
            inside = [(shard, cut) for shard, spans in mine if (cut := _cut(spans, first, rows))]
            if not inside:
                continue
            slot, waited = self._slot()
            stalled += waited
            for shard, _ in inside:
                shard.begin_write()
            event = self._fill(slot, states, token_ids, first, rows, proof)
            self._work.put(_Piece(slot, inside, event, proof is not None))
            proof = None  # it goes with the first piece
        counters = mine[0][0].counters  # of a step that two shards share, the first one's
        counters["stall_s"] += stalled
        counters["take_s"] += time.perf_counter() - started - stalled

    def _slot(self) -> tuple[_Slot, float]:
        try:
            return self._free.get_nowait(), 0.0
        except queue.Empty:
            waited = time.perf_counter()
            return self._free.get(), time.perf_counter() - waited

    def _stage(
        self, states: list[torch.Tensor], token_ids: torch.Tensor, total: int, proof: torch.Tensor | None
    ) -> None:
        assert self._staging is not None and self._staged_ids is not None and self._side is not None
        compute = torch.cuda.current_stream()
        compute.wait_stream(self._side)  # the copies of the step before read the same buffer
        # On the compute stream at once: the states may be static CUDA-graph buffers.
        for layer, rows in enumerate(states):
            self._staging[:total, layer].copy_(rows[:total])
        self._staged_ids[:total].copy_(token_ids)
        if proof is not None:
            assert self._staged_proof is not None
            self._staged_proof.copy_(proof)
        self._side.wait_stream(compute)

    def _fill(
        self,
        slot: _Slot,
        states: list[torch.Tensor],
        token_ids: torch.Tensor,
        first: int,
        rows: int,
        proof: torch.Tensor | None,
    ) -> torch.cuda.Event | None:
        if self._side is None:
            for layer, source in enumerate(states):
                slot.states[:rows, layer].copy_(source[first : first + rows])
            slot.token_ids[:rows].copy_(token_ids[first : first + rows])
            if proof is not None:
                slot.proof.copy_(proof)
            return None
        assert self._staging is not None and self._staged_ids is not None and self._staged_proof is not None
        with torch.cuda.stream(self._side):
            slot.states[:rows].copy_(self._staging[first : first + rows], non_blocking=True)
            slot.token_ids[:rows].copy_(self._staged_ids[first : first + rows], non_blocking=True)
            if proof is not None:
                slot.proof.copy_(self._staged_proof, non_blocking=True)
            return self._side.record_event()

    def _run(self) -> None:
        while True:
            piece = self._work.get()
            left = {id(shard): shard for shard, _ in piece.places}
            try:
                if self._failure is None:
                    if piece.event is not None:
                        piece.event.synchronize()
                    if piece.judged:
                        self._judge(piece.slot.proof.tolist())
                    for shard, spans in piece.places:
                        began = time.perf_counter()
                        rows = _write(shard.writer.result(), piece.slot, spans)
                        left.pop(id(shard)).end_write(rows, time.perf_counter() - began)
            except BaseException as error:  # noqa: BLE001 - recorded; the next take or the shard's end raises it
                self._failure = self._failure or error
            finally:
                self._free.put(piece.slot)
                for shard in left.values():
                    shard.end_write(0, 0.0)

    def raise_failure(self) -> None:
        """Raise what a writer thread failed with.

        Raises:
            CoresampleError: as it was; anything else as a CaptureError.
        """
        if isinstance(self._failure, CoresampleError):
            raise self._failure  # a full disk is a full disk, wherever it shows
        if self._failure is not None:
            raise CaptureError(f"writing rows failed: {self._failure!r}") from self._failure


def _write(writer: ShardWriter, slot: _Slot, spans: list[Span]) -> int:
    states = memoryview(slot.states.view(torch.uint8).numpy().reshape(-1))
    ids = slot.token_ids.numpy()
    width = writer.row_bytes
    for span in spans:
        writer.write_rows(span.target, states[span.source * width : (span.source + span.rows) * width])
        writer.write_token_ids(span.target, ids[span.source : span.source + span.rows])
    return sum(span.rows for span in spans)


def _cut(spans: list[Span], first: int, rows: int) -> list[Span]:
    """The parts of ``spans`` with sources in ``first .. first + rows``, counted from ``first``."""
    parts = []
    for span in spans:
        start, end = max(span.source, first), min(span.source + span.rows, first + rows)
        if start < end:
            parts.append(Span(start - first, span.target + start - span.source, end - start))
    return parts
