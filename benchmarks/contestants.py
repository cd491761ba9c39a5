"""One contestant of the throughput benchmarks as a process: ``python -m benchmarks.contestants SPEC.json``.

It loads its engine, says so, and then runs workloads when asked, one JSON object per line on standard input. Answers
are lines on standard output that begin with ``ANSWER``; everything else there is talk of the libraries.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks import workloads
from benchmarks.sinks import FileConsumer, ShardConsumer, limit_roots

ANSWER = "@contestant "
LATEST_FILE_S = 900.0


@dataclass(frozen=True)
class Spec:
    """What to load, the same for every contestant of a run except ``kind`` and ``cached``.

    Attributes:
        kind: ``prefill``, ``connector`` or ``ours``.
        cached: prefix caching; for ours whether any of its jobs shares prefixes.
        target: where the states go: a folder, or for ours a URL of an object store.
        bytes_per_s: limit of the sink.
        consume: delete what is complete, so that a long run fits.
        self_test: whether ours tests its engine first (random weights pass no thresholds).
    """

    kind: str
    model: str
    layers: list[int]
    dtype: str
    store_dtype: str
    target: str
    scratch: str
    cached: bool = False
    max_model_len: int = 4098
    step_tokens: int = 16384
    max_num_seqs: int = 256
    kv_bytes: int = 2**30
    block_size: int | None = None
    gpu_memory_utilization: float = 0.2
    load_format: str = "auto"
    enforce_eager: bool | None = None
    bytes_per_s: float | None = None
    consume: bool = False
    self_test: bool = True
    shard_bytes: int = 512 * 2**20
    spool_bytes: int | None = None
    storage_options: dict[str, Any] = field(default_factory=dict)


class Contestant(Protocol):
    """A loaded engine."""

    def facts(self) -> dict[str, Any]:
        """What it says of itself."""

    def prepare(self, name: str, samples: list[workloads.Ids], share: bool) -> dict[str, Any]:
        """Take a workload, outside the time that is measured."""

    def round(self, name: str, share: bool) -> dict[str, Any]:
        """Run it once; at least ``seconds``, ``computed`` and ``bytes``."""


class Vllm:
    """``LLM.generate(max_tokens=1)``, with vLLM's extraction connector or without."""

    def __init__(self, spec: Spec, stack: ExitStack) -> None:
        from vllm import LLM, SamplingParams

        self._spec, self._folder = spec, Path(spec.target)
        _more_open_files()
        arguments: dict[str, Any] = {
            "model": spec.model,
            "dtype": spec.dtype,
            "load_format": spec.load_format,
            "max_model_len": spec.max_model_len,
            "max_num_batched_tokens": spec.step_tokens,
            "max_num_seqs": spec.max_num_seqs,
            "kv_cache_memory_bytes": spec.kv_bytes,
            "gpu_memory_utilization": spec.gpu_memory_utilization,
            "enforce_eager": bool(spec.enforce_eager),
            "enable_prefix_caching": spec.cached,
            "skip_tokenizer_init": True,
            "seed": 0,
        }
        if spec.block_size:
            arguments["block_size"] = spec.block_size
        if spec.kind == "connector":
            self._folder.mkdir(parents=True, exist_ok=True)
            arguments |= _extraction(spec)
        self._llm = LLM(**arguments)
        self._params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self._requests: dict[str, list[Any]] = {}

    def facts(self) -> dict[str, Any]:
        config = self._llm.llm_engine.vllm_config
        return {
            "processes": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1"),
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "enforce_eager": config.model_config.enforce_eager,
            "kv_block_size": config.cache_config.block_size,
        }

    def prepare(self, name: str, samples: list[workloads.Ids], share: bool) -> dict[str, Any]:
        self._requests[name] = [{"prompt_token_ids": ids.tolist()} for ids in samples]
        return {}

    def round(self, name: str, share: bool) -> dict[str, Any]:
        requests = self._requests[name]
        if self._spec.cached:
            self._empty_cache()
        if self._spec.kind == "prefill":
            started = time.perf_counter()
            outputs = self._llm.generate(requests, self._params, use_tqdm=False)
            return {"seconds": time.perf_counter() - started, "bytes": 0, "computed": _computed(outputs)}
        with FileConsumer(self._folder, len(requests), delete=self._spec.consume) as files:
            started = time.perf_counter()
            outputs = self._llm.generate(requests, self._params, use_tqdm=False)
            generated = time.perf_counter() - started
            files.finish(LATEST_FILE_S)
            seconds = time.perf_counter() - started
        self._empty_folder()
        found = {"bytes": files.nbytes, "files": files.count, "computed": _computed(outputs)}
        return {"seconds": seconds, "generate_s": generated, **found}

    def _empty_folder(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()

    def _empty_cache(self) -> None:
        """The round before must not help this one."""
        for _ in range(3):
            if self._llm.reset_prefix_cache():
                return
            # The connector holds the blocks of its last requests until another step asks it.
            files = len(list(self._folder.glob("*.lock"))) if self._spec.kind == "connector" else 0
            self._llm.generate([{"prompt_token_ids": [5, 6, 7]}], self._params, use_tqdm=False)
            if self._spec.kind == "connector":
                FileConsumer(self._folder, files + 1, delete=False).finish(60)
                self._empty_folder()
        raise RuntimeError("the prefix cache could not be emptied")


def _extraction(spec: Spec) -> dict[str, Any]:
    connector: dict[str, Any] = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    extra: dict[str, Any] = {"shared_storage_path": spec.target}
    if spec.bytes_per_s or not _on_gpu():
        connector |= {"kv_connector": "BenchmarkConnector", "kv_connector_module_path": "benchmarks.connector"}
        extra["bytes_per_s"] = spec.bytes_per_s
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": spec.layers}},
        },
        "kv_transfer_config": {**connector, "kv_connector_extra_config": extra},
    }


def _on_gpu() -> bool:
    # Asked of the driver's library: CUDA must not be up in a process that vLLM forks.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return bool(torch.cuda.is_available())


def _computed(outputs: Any) -> int:
    return sum(len(output.prompt_token_ids) - (output.num_cached_tokens or 0) for output in outputs)


def _more_open_files() -> None:
    """The connector holds the lock of every file that waits to be written."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Ours:
    """Coresample, from the first step to the last commit record, with an engine that stays up."""

    def __init__(self, spec: Spec, stack: ExitStack) -> None:
        from extract_core import pipeline
        from extract_core.spool import RunFolder

        if spec.bytes_per_s:
            limit_roots(spec.bytes_per_s)
        self._spec, self._jobs = spec, {}
        Path(spec.scratch).mkdir(parents=True, exist_ok=True)
        # Two full steps: what the engine of a job gets by default follows from the job, up to that size.
        length = min(512, spec.max_model_len - 2)
        ids = np.random.default_rng(1).integers(3, 250, (2 * spec.step_tokens // length + 1, length), dtype=np.int32)
        # A job without shared prefixes gets an engine that hashes none.
        first, _ = self._job("first", [*ids, *([ids[0][: length // 2]] if spec.cached else [])], share=True)
        folder = stack.enter_context(RunFolder(first.spool))
        self._engine = stack.enter_context(pipeline.make_supervisor(first, folder))
        self._engine.ready()
        if not spec.self_test:
            self._engine.preflight = {"skipped": "random weights"}

    def facts(self) -> dict[str, Any]:
        return {**self._engine.info, "engine_start_s": self._engine.start_seconds}

    def _job(self, name: str, samples: list[workloads.Ids], *, share: bool) -> tuple[Any, float]:
        from extract_core.job import prepare
        from extract_core.settings import load_job

        spec, scratch = self._spec, Path(self._spec.scratch)
        rows = workloads.write_rows(samples, scratch / f"{name}.jsonl")
        engine: dict[str, Any] = {
            "max_num_batched_tokens": spec.step_tokens,
            "max_num_seqs": spec.max_num_seqs,
            "max_model_len": spec.max_model_len,
            "kv_cache_bytes": spec.kv_bytes,
            "gpu_memory_utilization": spec.gpu_memory_utilization,
            "load_format": spec.load_format,
            "enforce_eager": spec.enforce_eager,
            "extra": {"block_size": spec.block_size} if spec.block_size else {},
        }
        job = {
            "root": f"{spec.target}/{name}-{'shared' if share else 'alone'}",
            "model": {"path": spec.model, "dtype": spec.dtype},
            "data": {"path": str(rows)},
            "chat": {"max_length": spec.max_model_len - 2},
            "layers": spec.layers,
            "engine": engine,
            "preflight": {"reference": "never"},
            "checks": {"top1_agreement": 0.0},
            "store": {
                "dtype": spec.store_dtype,
                "shard_bytes": spec.shard_bytes,
                "spool_bytes": spec.spool_bytes,
                "share_prefixes": share,
                "reuse": False,
                "storage_options": spec.storage_options,
            },
        }
        file = scratch / f"{name}.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        started = time.perf_counter()
        return prepare(load_job(file)), time.perf_counter() - started

    def prepare(self, name: str, samples: list[workloads.Ids], share: bool) -> dict[str, Any]:
        job, seconds = self._job(name, samples, share=share)
        self._jobs[name, share] = job
        meta = job.plan.meta
        if meta.samples != len(samples):
            raise RuntimeError(f"{meta.samples} of {len(samples)} samples are planned: {meta.dropped}")
        planned = {"rows": meta.rows, "computed": meta.computed, "bytes": meta.rows * meta.row_bytes}
        return {"plan_s": seconds, "planned": {**planned, "tokens": meta.tokens, "shards": len(meta.shards)}}

    def round(self, name: str, share: bool) -> dict[str, Any]:
        from extract_core import local
        from extract_core.store import layout
        from extract_core.store.commits import read_commits

        job = self._jobs[name, share]
        commits = layout.commits_dir(job.plan.fingerprint)
        with ShardConsumer(job, delete=self._spec.consume) as shards:
            started = time.perf_counter()
            local.extract(job, self._engine)
            seconds = time.perf_counter() - started
        shards.look()
        timings: Counter[str] = Counter()
        for records in read_commits(job.root, job.plan.fingerprint).values():
            timings.update({k: v for k, v in records.timings.items() if isinstance(v, int | float)})
        if self._engine.starts != 1:
            raise RuntimeError("the engine was replaced in mid-round; its log says why")
        for folder in (commits, layout.SHARDS):
            for entry in job.root.entries(folder):
                job.root.delete(entry.path)
        rates = {
            f"{name.removesuffix('_s')}_gb_per_s": shards.nbytes / timings[name] / 1e9
            for name in ("take_s", "write_s", "engine_s", "check_and_seal_s", "upload_s")
            if timings.get(name)
        }
        found = {"computed": int(timings["computed"]), "bytes": shards.nbytes, "shards": shards.count}
        return {"seconds": seconds, **found, "timings": dict(timings), "rates": rates}


def serve(spec: Spec) -> None:
    """Load, answer, and end with the input."""
    with ExitStack() as stack:
        try:
            started = time.perf_counter()
            contestant: Contestant = (Ours if spec.kind == "ours" else Vllm)(spec, stack)
            _answer({"start_s": time.perf_counter() - started, "facts": contestant.facts()})
            for line in sys.stdin:
                _answer(_obey(contestant, json.loads(line)))
        except Exception as error:  # noqa: BLE001 - told, and recorded in the result
            traceback.print_exc()
            _answer({"failed": f"{type(error).__name__}: {error}"})


def _obey(contestant: Contestant, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "round":
        return contestant.round(command["name"], command["share"])
    ids = workloads.read_samples(Path(command["file"]))
    return contestant.prepare(command["name"], ids, command["share"])


def _answer(what: dict[str, Any]) -> None:
    print(ANSWER + json.dumps(what, default=str), flush=True)


def write_spec(spec: Spec, path: Path) -> Path:
    """For the command line."""
    path.write_text(json.dumps(asdict(spec), indent=1), encoding="utf-8")
    return path


if __name__ == "__main__":
    serve(Spec(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
