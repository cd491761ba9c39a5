"""A worker with the bugs that tools of this kind have had, chosen by a prompt's first token; the engine is real."""

from __future__ import annotations

from typing import Any

import torch

from extract_core.engine import compat
from extract_core.engine.places import Place
from extract_core.engine.worker import CPUCaptureWorker

ORDER, LAST_CHUNK, PREFIX_HIT, ZERO, EARLY_LAST, EARLY_MIDDLE, POST_NORM, NAN, STALE = range(500, 509)
"""First tokens beyond the tiny tokenizer's 258, within its model's vocabulary of 512."""

_make_request = compat.make_request


def _make_request_that_reads_the_cache(core: Any, request_id: str, token_ids: list[int], **options: Any) -> Any:
    request = _make_request(core, request_id, token_ids, **options)
    if token_ids[0] == PREFIX_HIT:
        request.skip_reading_prefix_cache = False
    return request


compat.make_request = _make_request_that_reads_the_cache


class Planted(CPUCaptureWorker):
    """Spoils what a step gave, before it is taken."""

    _firsts: dict[str, int]
    _before: list[torch.Tensor] | None = None

    def capture_begin(self, *args: Any) -> None:
        """Forget the shard before."""
        self._firsts, self._before = {}, None
        super().capture_begin(*args)

    def _take(self, scheduler_output: Any, state: Any) -> None:
        self._firsts.update({new.req_id: new.prompt_token_ids[0] for new in scheduler_output.scheduled_new_reqs})
        order = list(self.model_runner.input_batch.req_ids)
        firsts = compat.first_positions(scheduler_output)
        places = self._places
        at = 0
        for rid in order:
            count = scheduler_output.num_scheduled_tokens[rid]
            rows = slice(at, at + count)
            at += count
            bug = self._firsts[rid]
            states = state.aux_hidden_states
            if bug == ZERO:
                states[1][rows] = 0
            if bug == NAN:
                states[-1][rows.stop - 1, 3] = float("nan")
            if bug == EARLY_LAST:
                states[-1][rows] = states[1][rows]
            if bug == EARLY_MIDDLE:
                states[1][rows] = states[0][rows]
            if bug == POST_NORM:
                states[-1][rows] = state.hidden_states[rows]
            if bug == STALE and self._before is not None:
                for now, before in zip(states, self._before, strict=True):
                    size = min(count, len(before))
                    now[rows.start : rows.start + size] = before[:size]
            if bug == LAST_CHUNK and firsts[rid] > 0 and firsts[rid] + count == self._places[rid].rows:
                (whole,) = self._places[rid].spans(0, 0, firsts[rid])
                self._places = {**self._places, rid: Place([(whole.target, whole.rows)])}  # no place for its rows
        if ORDER in self._firsts.values() and len(order) > 1:  # paired by the order of submission, which is another
            self.model_runner.input_batch._req_ids[: len(order)] = [*order[1:], order[0]]
        self._before = [tensor.clone() for tensor in state.aux_hidden_states]
        super()._take(scheduler_output, state)
        self._places = places
