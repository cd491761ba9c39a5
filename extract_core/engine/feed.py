"""A shard under way in the engine: its requests, made ahead by a thread of their own, and what has come of them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from extract_core.engine import compat
from extract_core.engine.protocol import AGAIN, JobSample, ShardJob


class ShardRun:
    """Samples of one job on their way through the engine.

    Args:
        core: the engine.
        job: the shard.
        refused: samples that the engine must not be given, with the reason.
        reads_cache: whether requests take prefixes from the cache.
    """

    def __init__(self, core: Any, job: ShardJob, refused: dict[str, str], *, reads_cache: bool):
        self.job, self.refused, self.reads_cache = job, refused, reads_cache
        self.accepted = [s for s in job.samples if s.sample_id not in refused]
        alone = set(job.solo)
        self.ids = {f"{job.attempt}-{n}": s for n, s in enumerate(self.accepted)}
        self.solo = {rid for rid, s in self.ids.items() if s.sample_id in alone}
        self.left = len(self.ids)
        """Requests that the scheduler has not been given."""
        self.in_flight = 0
        self.greedy: dict[str, int] = {}
        self.entered: list[str] = []
        self.finished: list[str] = []
        self.done_rows = 0
        self.again: list[tuple[str, JobSample]] | None = None if reads_cache else []
        """Samples that run a second time, without the cache; None while that is not known."""
        self.fed_at: float | None = None
        self.ended_at: float | None = None
        self.result: dict[str, Any] = {}
        """Counters and missing requests, when the file is closed."""
        self.engine_s = 0.0
        """From the end of the shard before, or this one's first request, to its last."""
        self._core = core
        self._done: set[tuple[int, int]] = set()
        self._ready: queue.SimpleQueue[tuple[str, Any] | BaseException] = queue.SimpleQueue()
        order = [*self.solo, *(rid for rid in self.ids if rid not in self.solo)]
        threading.Thread(target=self._make, args=(order,), name="request-maker", daemon=True).start()

    def _make(self, order: Sequence[str]) -> None:
        # Hashing the blocks of a prompt takes milliseconds, in which the engine's thread has better things to do.
        try:
            for rid in order:
                self._ready.put((rid, self._request(rid, self.ids[rid], reads_cache=self.reads_cache)))
        except BaseException as error:  # noqa: BLE001 - raised in the engine's thread
            self._ready.put(error)

    def _request(self, rid: str, sample: JobSample, *, reads_cache: bool) -> Any:
        ids = np.frombuffer(sample.token_ids, dtype="<i4").tolist()
        # A salt of its own instead of an empty cache: a shard stands alone, whatever else is in the engine.
        return compat.make_request(self._core, rid, ids, reads_cache=reads_cache, salt=self.job.attempt)

    @property
    def next_is_solo(self) -> bool:
        """Whether the next request is to run alone."""
        return self.left > len(self.ids) - len(self.solo) and not self.again

    @property
    def computed(self) -> bool:
        """Whether every request has come back, and none is to run again."""
        return not self.left and not self.in_flight and self.again is not None

    def take(self, *, wait: bool) -> tuple[str, JobSample, Any] | None:
        """The next request; None if it is not made yet and nobody waits for it."""
        try:
            made = self._ready.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(made, BaseException):
            raise made
        rid, request = made
        sample = self.ids[rid.removesuffix(AGAIN)]
        self.left -= 1
        self.in_flight += 1
        self.entered.append(sample.sample_id)
        self.fed_at = self.fed_at or time.perf_counter()
        return rid, sample, request

    def came_back(self, rid: str, sample: JobSample, token: int) -> None:
        """A request has ended with this token."""
        self.in_flight -= 1
        self.greedy[sample.sample_id] = token
        self.finished.append(sample.sample_id)
        for node in sample.segments:
            if node not in self._done:
                self._done.add(node)
                self.done_rows += node[1]

    def run_again(self, missing_runs: Sequence[tuple[int, int]]) -> None:
        """Queue samples that have missing rows once more, without the cache: as few as have them all.

        The cache held their blocks, but who filled it did not have these rows as its own, or never came to its end.

        Args:
            missing_runs: rows (first, number) of the shard that never came.
        """
        missing = np.zeros(self.job.rows, dtype=bool)
        for first, count in missing_runs:
            missing[first : first + count] = True
        self.again = []
        for rid, sample in self.ids.items():
            if not missing.any():
                break
            if any(missing[first : first + count].any() for first, count in sample.segments):
                self.again.append((rid, sample))
                for first, count in sample.segments:
                    missing[first : first + count] = False
        for rid, sample in self.again:
            self._ready.put((rid + AGAIN, self._request(rid + AGAIN, sample, reads_cache=False)))
        self.left = len(self.again)
