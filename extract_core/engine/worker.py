"""vLLM workers that hand the rows of every step to the writer.

The override is of ``Worker.execute_model``: there the forward has been launched, nothing is inside a compiled region
or a CUDA graph, and profiling and warm-up runs do not pass through it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.platforms import current_platform

from extract_core.engine import compat
from extract_core.engine.capture import check_layers, enable_capture, next_tokens
from extract_core.engine.sink import RowSink, Span
from extract_core.errors import CaptureError
from extract_core.store.shard import ShardWriter
from extract_core.store.unsealed import UnsealedShard


class CaptureMixin:
    """Adds capture to a vLLM worker; only tensor-parallel rank 0 writes."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    _sink: RowSink | None = None
    _places: dict[str, tuple[int, int]]
    _open = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then switch on the layers, before vLLM's profiling run compiles the forward."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        config = self.vllm_config.additional_config["coresample"]
        self._layer_ids = [int(k) for k in config["layers"].split(",")]
        enable_capture(self.model_runner, self._layer_ids)

    def capture_begin(
        self,
        path: str,
        rows: int,
        places: dict[str, tuple[int, int]],
        store_dtype: str,
        buffer_bytes: int,
        threads: int,
    ) -> None:
        """Start a shard file. ``places`` maps request id to (first row, rows); the rest as in ``EngineSpec``."""
        self._places = places
        self._open = True
        if get_tensor_model_parallel_rank() != 0:
            return
        model = self.vllm_config.model_config
        if self._sink is None:
            self._sink = RowSink(
                max_tokens=self.vllm_config.scheduler_config.max_num_batched_tokens,
                layers=len(self._layer_ids),
                hidden_size=model.get_hidden_size(),
                dtype=getattr(torch, store_dtype),
                device=self.device,
                buffer_bytes=buffer_bytes,
                threads=threads,
            )
        self._writer = ShardWriter(
            Path(path),
            rows=rows,
            layer_ids=self._layer_ids,
            hidden_size=model.get_hidden_size(),
            dtype=store_dtype,
        )
        self._sink.open(self._writer, rows)

    @torch.inference_mode()  # the states are inference tensors: outside it they cannot be copied from in place
    def execute_model(self, scheduler_output: Any) -> Any:
        """One forward; its rows are taken before the step's state is consumed by ``sample_tokens``."""
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if self._open and self._sink is not None and scheduler_output.total_num_scheduled_tokens:
            state = self.model_runner.execute_model_state
            if state is None:
                raise CaptureError("a step ran but left no execute_model_state: its rows cannot be read")
            self._take(scheduler_output, state)
        return output

    def _take(self, scheduler_output: Any, state: Any) -> None:
        total = scheduler_output.total_num_scheduled_tokens
        aux = state.aux_hidden_states
        check_layers(aux, self._layer_ids, total, self.vllm_config.model_config.get_hidden_size())
        firsts = compat.first_positions(scheduler_output)
        spans: list[Span] = []
        source = 0
        for request_id in compat.batch_order(self.model_runner, state):
            count = scheduler_output.num_scheduled_tokens.get(request_id, 0)
            if not count:
                continue
            first_row, rows = self._places[request_id]
            position = firsts[request_id]
            wanted = min(count, rows - position)  # an output token that was scheduled has no place
            if wanted > 0:
                spans.append(Span(source, first_row + position, wanted))
            source += count
        if source != total:
            raise CaptureError(
                f"a step of {total} tokens was accounted for {source}: the batch order is not understood"
            )
        assert self._sink is not None
        self._sink.take(aux, compat.step_input_ids(self.model_runner, state, total), spans)

    def capture_end(self) -> dict[str, Any] | None:
        """Wait for the writer and close the file; returns counters and the requests whose rows did not all come."""
        self._open = False
        if self._sink is None or get_tensor_model_parallel_rank() != 0:
            return None
        covered = self._sink.close()
        self._writer.close()
        missing = [rid for rid, (first, rows) in self._places.items() if not covered[first : first + rows].all()]
        return {"missing": missing, "counters": self._sink.counters}

    def capture_next_tokens(self, path: str, rows: list[int]) -> list[int]:
        """``argmax(lm_head(norm(h_n)))`` of stored rows, read back from the shard file; h_n is the last layer id."""
        with UnsealedShard(Path(path)) as shard:
            stored = shard.last_layer(rows)
        return next_tokens(self.model_runner.get_model(), stored.to(self.device, self.vllm_config.model_config.dtype))

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
