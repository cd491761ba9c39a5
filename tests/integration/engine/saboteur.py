"""A worker that fails on purpose, chosen through ``engine.extra.worker_cls``; a prompt's first token says how.

Real failures of the real engine process: it dies, hangs, raises as vLLM did on the seed of this project, or returns
states that a broken capture would.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from extract_core.engine.worker import CPUCaptureWorker

DIE, HANG, RAISE, ZERO, NAN, SWAP, SHORT, COPY, DIE_ONCE, EARLY = range(500, 510)
STOP, CRASH, EXIT, HOARD, DIE_WHILE_ILL, NAN_WHILE_ILL = range(490, 496)
"""First tokens beyond the tiny tokenizer's 258, within its model's vocabulary of 512."""
DIE_AT_END = 496
"""A last token: the sample may share its beginning with others."""
ILL = "SABOTEUR_ILL"
"""Variable without which ``DIE_WHILE_ILL`` and ``NAN_WHILE_ILL`` do nothing: what fails in one run passes later."""
REFUSE_TO_LOAD = "SABOTEUR_REFUSES"
"""Variable that makes the workers fail while they load."""


class Saboteur(CPUCaptureWorker):
    """Acts when a sample with one of the tokens above enters."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Fail in the worker's own process where that is asked for, with an empty message as vLLM's assertions have."""
        assert not os.environ.get(REFUSE_TO_LOAD)
        super().load_model(*args, **kwargs)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Fail before or after the real forward."""
        for new in scheduler_output.scheduled_new_reqs:
            token = new.prompt_token_ids[0]
            if (
                token == DIE
                or new.prompt_token_ids[-1] == DIE_AT_END
                or (token == DIE_WHILE_ILL and os.environ.get(ILL))
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            if token == DIE_ONCE:
                mark = Path(os.environ["SABOTEUR_MARK"])
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            if token == STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            if token == CRASH:
                ctypes.string_at(0)  # SIGSEGV, in native code
            if token == EXIT:
                os._exit(137)
            if token == HOARD:
                _run_out_of_memory()
            if token == HANG:
                time.sleep(3600)
            if token == RAISE:
                block_hashes: list[bytes] = []
                assert len(block_hashes) >= len(new.prompt_token_ids) // 16
        return super().execute_model(scheduler_output)

    def _take(self, scheduler_output: Any, state: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self._spoil(new, scheduler_output, state)
        super()._take(scheduler_output, state)

    def _spoil(self, new: Any, scheduler_output: Any, state: Any) -> None:
        order = list(self.model_runner.input_batch.req_ids)
        starts, at = {}, 0
        for rid in order:
            starts[rid] = at
            at += scheduler_output.num_scheduled_tokens[rid]
        start, count = starts[new.req_id], scheduler_output.num_scheduled_tokens[new.req_id]
        rows = slice(start, start + count)
        token = new.prompt_token_ids[0]
        if token == ZERO:
            state.aux_hidden_states[1][rows] = 0
        if token == NAN or (token == NAN_WHILE_ILL and os.environ.get(ILL)):
            state.aux_hidden_states[-1][start + count - 1, 3] = float("nan")
        if token == COPY:
            state.aux_hidden_states[0][rows] = state.aux_hidden_states[0][start]
        if token == EARLY:  # the stream one block too early under the name of the last
            state.aux_hidden_states[-1][rows] = state.aux_hidden_states[1][rows]
        if token == SWAP:  # rows of another request under this one's name
            first, second = order[0], order[-1]
            order[0], order[-1] = second, first
            self.model_runner.input_batch._req_ids[: len(order)] = order
        if token == SHORT:  # as a prefix-cache hit would: the first rows never come
            new.num_computed_tokens += 1


def _run_out_of_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
    hoard = []
    while True:
        hoard.append(bytearray(2**24))
