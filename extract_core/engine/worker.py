"""vLLM workers that hand the rows of every step to the writer.

The override is of ``Worker.execute_model``: there the forward has been launched, nothing is inside a compiled region
or a CUDA graph. Warm-up passes through it too (runner V2), but no shard is open then.
"""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.platforms import current_platform

from extract_core.engine import compat
from extract_core.engine.capture import LayerCapture
from extract_core.engine.logs import root_cause
from extract_core.engine.norm import describe_norm, next_tokens
from extract_core.engine.places import Place, Span, runs_of
from extract_core.engine.protocol import AGAIN
from extract_core.engine.sink import OpenShard, RowSink
from extract_core.errors import CaptureError, CoresampleError, EngineIncompatibleError
from extract_core.store.unsealed import UnsealedShard
from extract_core.store.writer import ShardWriter


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps what a method failed with for ``capture_failure``; another process only gets the text of an exception."""

    @wraps(method)
    def call(self: CaptureMixin, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._failure = error
            raise

    return call


class CaptureMixin:
    """Adds capture to a vLLM worker; only tensor-parallel rank 0 writes.

    Several shards can be open at once; a request belongs to one of them, and a step may hold requests of two.
    """

    model_runner: Any
    vllm_config: Any
    _sink: RowSink | None = None
    _failure: BaseException | None = None
    _aside: ThreadPoolExecutor | None = None
    _asked: dict[str, Future[list[int]]]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then switch on the layers, before vLLM's profiling run compiles the forward."""
        self._startup: dict[str, float] = {}
        with self._timed("weights"):
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        config = self.vllm_config.additional_config["coresample"]
        self._layer_ids = [int(k) for k in config["layers"].split(",")]
        self._store_dtype = getattr(torch, config["store_dtype"])
        self._hidden_size = self.vllm_config.model_config.get_hidden_size()
        self._capture = LayerCapture(
            self.model_runner,
            self._layer_ids,
            n=compat.block_count(self.vllm_config.model_config),
            hidden_size=self._hidden_size,
            hooks=config["capture"] == "hooks",
        )
        self._writes = get_tensor_model_parallel_rank() == 0
        # Allocated before vLLM measures what is left for its cache, so that it is counted.
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        shape = (tokens, len(self._layer_ids), self._hidden_size)
        self._device = self.model_runner.device  # the worker's own is None in some CPU releases
        self._shards: dict[str, OpenShard] = {}
        self._asked = {}
        self._places: dict[str, Place] = {}
        self._owners: dict[str, OpenShard] = {}
        staged = self._writes and self._device.type == "cuda"
        self._staging = torch.empty(shape, dtype=self._store_dtype, device=self._device) if staged else None

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._startup[stage] = self._startup.get(stage, 0.0) + time.perf_counter() - began

    def determine_available_memory(self, *args: Any, **kwargs: Any) -> Any:
        """VLLM's profiling run, in which the forward is compiled or comes from the compile cache."""
        with self._timed("compile and profile"):
            return super().determine_available_memory(*args, **kwargs)  # type: ignore[misc]

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """VLLM's warm-up of kernels and CUDA graphs."""
        with self._timed("warm up"):
            return super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]

    def capture_startup(self) -> dict[str, float]:
        """Seconds of the stages of this worker's start; ``compiler`` is part of another."""
        compiler = getattr(self.vllm_config.compilation_config, "compilation_time", 0.0)
        return {**self._startup, "compiler": float(compiler)}

    def capture_setup(self, pool_bytes: int, threads: int) -> None:
        """Make the writer: its pool of host buffers and its threads."""
        if self.vllm_config.parallel_config.world_size == 1 and self._device.type == "cuda":
            self._aside = ThreadPoolExecutor(1, "next-tokens", partial(torch.cuda.set_device, self._device))
        if self._writes:
            self._sink = RowSink(
                max_tokens=self.vllm_config.scheduler_config.max_num_batched_tokens,
                layers=len(self._layer_ids),
                hidden_size=self._hidden_size,
                dtype=self._store_dtype,
                staging=self._staging,
                pool_bytes=pool_bytes,
                threads=threads,
                judge=self._capture.judge,
            )
            self._opening = ThreadPoolExecutor(1, "shard-opener")

    @_recorded
    def capture_begin(self, shard: str, path: str, rows: int, places: dict[str, list[tuple[int, int]]]) -> None:
        """Start a shard file, whose space is reserved meanwhile.

        Args:
            shard: name of the shard for the other calls.
            path: of the file.
            rows: of the shard.
            places: request id to its segments (first row, rows).
        """
        if not self._shards:
            self._failure = None
        if self._sink is None:
            return
        writer = self._opening.submit(
            ShardWriter,
            Path(path),
            rows=rows,
            layer_ids=self._layer_ids,
            hidden_size=self._hidden_size,
            dtype=str(self._store_dtype).removeprefix("torch."),
        )
        opened = self._shards[shard] = OpenShard(writer, rows)
        self._places.update((rid, Place(segments)) for rid, segments in places.items())
        self._owners.update(dict.fromkeys(places, opened))

    @_recorded  # with async scheduling a failure here is only logged
    @torch.inference_mode()  # the states are inference tensors: outside it they cannot be copied from in place
    def execute_model(self, scheduler_output: Any) -> Any:
        """One forward; its rows are taken before the step's state is consumed by ``sample_tokens``."""
        counts = bool(self._shards) and scheduler_output.total_num_scheduled_tokens > 0
        if not counts:
            return self._forward(scheduler_output)
        self._capture.begin()
        try:
            output = self._forward(scheduler_output)
        finally:
            self._capture.end()
        state = self.model_runner.execute_model_state
        if state is None:
            raise CaptureError("a step ran but left no execute_model_state: its rows cannot be read")
        self._take(scheduler_output, state)
        return output

    def _forward(self, scheduler_output: Any) -> Any:
        with compat.current_config(self.vllm_config):
            return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The second phase, which must not go on as if the first had not failed."""
        if self._failure is not None:
            raise self._failure
        return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]

    def _take(self, scheduler_output: Any, state: Any) -> None:
        total = scheduler_output.total_num_scheduled_tokens
        states = self._capture.states(state, total)
        firsts = compat.first_positions(scheduler_output)
        places: dict[OpenShard, list[Span]] = defaultdict(list)
        source = 0
        for request_id in compat.batch_order(self.model_runner, state):
            count = scheduler_output.num_scheduled_tokens.get(request_id, 0)
            if not count:
                continue
            known = request_id.removesuffix(AGAIN)
            places[self._owners[known]] += self._places[known].spans(source, firsts[request_id], count)
            source += count
        if source != total:
            raise CaptureError(
                f"a step of {total} tokens was accounted for {source}: the batch order is not understood"
            )
        first = any(not shard.counters["steps"] for shard in places)
        assert self._sink is not None
        self._sink.take(
            states,
            compat.step_input_ids(self.model_runner, state, total),
            list(places.items()),
            self._capture.proof(states, state, total, first=first),
        )

    def capture_failure(self) -> dict[str, str] | None:
        """The exception that ended the shard in this worker: its kind if it is one of ours, message and traceback."""
        error = self._failure
        if error is None:
            return None
        known = isinstance(error, CoresampleError)
        return {
            "kind": type(error).__name__ if known else "",
            "message": str(error) if known else root_cause(error),
            "traceback": "".join(traceback.format_exception(error)),
        }

    @_recorded
    def capture_missing(self, shard: str) -> list[tuple[int, int]] | None:
        """Rows (first, number) of the shard's requests that were not computed: the prefix cache served them, and who
        filled it did not have them as its own.
        """
        if self._sink is None:
            return None
        opened = self._shards[shard]
        wanted = np.zeros(len(opened.taken), dtype=bool)
        for place in self._of(opened).values():
            place.mark(wanted)
        return runs_of(wanted & ~opened.taken)

    @_recorded
    def capture_end(self, shard: str) -> dict[str, Any] | None:
        """Close the shard's file when all its rows are written.

        Args:
            shard: all of its requests have been computed.

        Returns:
            counters and the requests whose rows did not all come (``missing``); while it is written, an empty one. None
            from a rank that writes nothing.
        """
        if self._sink is None:
            return None
        opened = self._shards[shard]
        self._sink.raise_failure()
        if not (opened.idle.is_set() and opened.writer.done()):
            return {}
        opened.writer.result().close()
        del self._shards[shard]
        places = self._of(opened)
        for rid in places:
            del self._places[rid], self._owners[rid]
        missing = [rid for rid, place in places.items() if not place.filled(opened.taken)]
        return {"missing": missing, "counters": opened.counters}

    def _of(self, shard: OpenShard) -> dict[str, Place]:
        return {rid: place for rid, place in self._places.items() if self._owners[rid] is shard}

    @_recorded
    def capture_next_tokens(self, path: str, rows: list[int]) -> list[int] | None:
        """``argmax(lm_head(norm(h_n)))`` of stored rows, read back from the shard file; h_n is the last layer id.

        Returns:
            the tokens; None while they are computed beside the step that is under way: then call again.
        """
        if self._aside is None:  # the CPU has no room beside a step, and ranks must keep to one order
            return self._next_tokens(path, rows)
        if path not in self._asked:
            self._asked[path] = self._aside.submit(self._next_tokens, path, rows)
        return self._asked.pop(path).result() if self._asked[path].done() else None

    @torch.inference_mode()
    def _next_tokens(self, path: str, rows: list[int]) -> list[int]:
        with UnsealedShard(Path(path)) as shard:
            stored = shard.last_layer(rows)
        stream = nullcontext() if self._aside is None else torch.cuda.stream(torch.cuda.Stream(self._device))
        with stream:
            stored = stored.to(self._device, self.vllm_config.model_config.dtype)
            return next_tokens(self._capture.model, self._capture.norm, stored)

    def capture_norm(self) -> dict[str, Any]:
        """The final norm as plain data, or ``{"unknown": reason}``."""
        try:
            norm = describe_norm(
                self._capture.norm, self._hidden_size, self.vllm_config.model_config.dtype, self._device
            )
        except EngineIncompatibleError as error:
            return {"unknown": str(error)}
        found: dict[str, Any] = msgspec.structs.asdict(norm)
        return found

    def capture_runner(self) -> str:
        """Module of vLLM's model runner in use, for the manifest."""
        return f"{type(self.model_runner).__module__}.{type(self.model_runner).__name__}"


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker

    class CPUCaptureWorker(CaptureMixin, CPUWorker):
        """Capture on the CPU backend."""

else:
    from vllm.v1.worker.gpu_worker import Worker

    class GPUCaptureWorker(CaptureMixin, Worker):
        """Capture on CUDA."""
