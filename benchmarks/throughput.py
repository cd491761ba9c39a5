"""End-to-end extraction against vLLM's own prefill, in one run.

Both engines stay loaded and take turns over the same samples: ``LLM.generate(max_tokens=1)`` with nothing captured,
and Coresample from the first step to the last commit record (capture, write, row checks, digests, durable shards). The
figure is the ratio of each pair of rounds, so that a machine that slows down slows both.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from extract_core import local, pipeline
from extract_core.engine.compat import engine_environment
from extract_core.job import Job, prepare
from extract_core.settings import load_job
from extract_core.spool import RunFolder
from extract_core.store import layout


def run(job_file: str, root: Path, rounds: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """Alternate prefill-only and extraction for ``rounds`` pairs; raw times and the ratios."""
    shutil.rmtree(root, ignore_errors=True)
    job = prepare(load_job(job_file, {**overrides, "root": str(root)}))
    tokens = job.plan.meta.tokens
    pairs = []
    with (
        _Prefill(job, root) as prefill,
        RunFolder(job.spool) as folder,
        pipeline.make_supervisor(job, folder) as engine,
    ):
        engine.ready()
        for number in range(rounds + 1):
            bare_s = prefill.round()
            ours_s = _extraction(job, root, engine)
            if number:  # the first pair warms caches and allocators
                pairs.append({"prefill_s": bare_s, "extract_s": ours_s, "ratio": bare_s / ours_s})
                rates = f"prefill {tokens / bare_s:,.0f} tokens/s, extraction {tokens / ours_s:,.0f}"
                print(f"{rates}, ratio {bare_s / ours_s:.3f}", flush=True)
    ratios = sorted(pair["ratio"] for pair in pairs)
    return {
        "benchmark": "throughput",
        "tokens": tokens,
        "samples": job.plan.meta.samples,
        "bytes": job.plan.meta.bytes,
        "shards": len(job.plan.meta.shards),
        "dtype": job.model.dtype,
        "store_dtype": job.dtype,
        "engine": engine.info,
        "pairs": pairs,
        "prefill_tokens_per_s": tokens / median(pair["prefill_s"] for pair in pairs),
        "extract_tokens_per_s": tokens / median(pair["extract_s"] for pair in pairs),
        "ratio_median": median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }


def _extraction(job: Job, root: Path, engine: Any) -> float:
    shutil.rmtree(root / layout.commits_dir(job.plan.fingerprint), ignore_errors=True)
    shutil.rmtree(root / layout.SHARDS, ignore_errors=True)
    started = time.perf_counter()
    local.extract(job, engine)
    return time.perf_counter() - started


class _Prefill:
    """vLLM's ``LLM`` in a process of its own, with the engine settings of the job and no capture."""

    def __init__(self, job: Job, folder: Path):
        import os

        spec = job.engine_spec
        prompts = folder / "prompts.json"
        prompts.write_text(json.dumps([ids for t in job.plan.shards() for ids in t["token_ids"].to_pylist()]))
        settings = {
            "model": spec.model,
            "dtype": spec.dtype,
            "max_model_len": spec.max_model_len,
            "max_num_batched_tokens": spec.max_num_batched_tokens or 2048,
            "max_num_seqs": spec.max_num_seqs or 256,
            "kv_cache_memory_bytes": spec.kv_cache_bytes or 2**30,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "seed": 0,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.throughput", str(prompts), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **engine_environment(cpu=True, eager=True)},
        )

    def round(self) -> float:
        """Seconds of one pass over all prompts."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError("the prefill process ended")

    def __enter__(self) -> _Prefill:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _serve(prompts: str, settings: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(settings))
    requests = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())]
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    for _ in sys.stdin:
        started = time.perf_counter()
        llm.generate(requests, params, use_tqdm=False)
        print(f"seconds {time.perf_counter() - started}", flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:3])
