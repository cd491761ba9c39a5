"""vLLM's own ``ExampleHiddenStatesConnector`` where it cannot run as it is; loaded by ``kv_connector_module_path``.

Two differences and no other: without a GPU the copy is a plain gather (the original asks for pinned memory and CUDA
events), and ``bytes_per_s`` in its extra configuration limits what all its writers together hand to the file system.
Wherever neither is needed, the benchmarks load vLLM's class itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as original

from benchmarks.sinks import TokenBucket


class _Done:
    """Stands for the CUDA event of a copy that is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class BenchmarkConnector(original.ExampleHiddenStatesConnector):
    """The connector with a limited sink, and for the CPU."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        limit = self._kv_transfer_config.get_from_extra_config("bytes_per_s", None)
        self._bucket = TokenBucket(limit) if limit else None

    def _write_tensors(self, tensors: Any, event: Any, filename: str, lock_fd: int | None) -> None:  # type: ignore[override]
        if self._bucket is not None:
            event.synchronize()
            self._bucket.take(sum(tensor.nbytes for tensor in tensors.values()))
        original.ExampleHiddenStatesConnector._write_tensors(tensors, event, filename, lock_fd)

    def _submit_async_write(self, pending: Any) -> None:
        if torch.cuda.is_available():
            super()._submit_async_write(pending)
            return
        size = self._block_size
        slots = torch.tensor([block * size + offset for block in pending.block_ids for offset in range(size)])
        states = original.extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        done = _Done()
        lock_fd = self._lock_fds.pop(pending.req_id, None)
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock_fd)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
