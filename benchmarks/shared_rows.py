"""Rows of shared prefixes against rows of every sample alone: ``python -m benchmarks.shared_rows --workloads FILE``.

One engine, the turns of real chats twice: with shared rows, prefixes served by the cache, and each sample by itself.
How much two ways of batching differ anyway is measured beside it: the samples by themselves again, in chunks. Seeded
weights of a small Llama, since only values matter; any vLLM, any device, nothing but its packages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.parity import as_json, compare, table

LAYERS = [2, 4, 5, 8]
_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=49152, hidden_size=512, intermediate_size=1376, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=8192, initializer_range=0.05,
)).save_pretrained(sys.argv[1])
"""


def rows_of(engine: Any, folder: Path, samples: list[workloads.Ids], **how: Any) -> tuple[list[Any], dict[str, float]]:
    """Float32 rows ``[N, L, H]`` of each sample, and the shard's counters; the echoed tokens must be theirs."""
    from extract_core.engine.protocol import ShardJob, laid_out
    from extract_core.store.unsealed import UnsealedShard

    made, rows = laid_out(samples, "s", share=how.pop("share"))
    attempt = uuid.uuid4().hex
    job = ShardJob(attempt, str(folder / attempt), rows, made, want_top1=False, **how)
    done = engine.extract(job, lambda told: None)
    with UnsealedShard(Path(job.path)) as shard:
        found = [shard.sample(sample.segments) for sample in made]
    Path(job.path).unlink()
    for (_, echo), ids in zip(found, samples, strict=True):
        np.testing.assert_array_equal(echo.numpy(), ids)
    return [states.float().numpy() for states, _ in found], done.counters


def measure(model: Path, dtype: str, samples: list[workloads.Ids], options: argparse.Namespace) -> dict[str, Any]:
    """Both differences in one dtype."""
    from extract_core.engine.protocol import EngineSpec
    from extract_core.engine.supervisor import EngineSupervisor

    spec = EngineSpec(
        model=str(model),
        layer_ids=LAYERS,
        max_model_len=max(map(len, samples)) + 2,
        dtype=dtype,
        store_dtype=dtype,
        kv_cache_bytes=2**30,
        gpu_memory_utilization=0.3,
        extra={"block_size": options.block_size} if options.block_size else {},
    )
    with (
        tempfile.TemporaryDirectory(prefix="coresample-rows-") as name,
        EngineSupervisor(spec, Path(name) / "logs", start_timeout_s=300, step_timeout_s=300) as engine,
    ):
        alone, _ = rows_of(engine, Path(name), samples, share=False)
        shared, counters = rows_of(engine, Path(name), samples, share=True)
        chunked, _ = rows_of(engine, Path(name), samples, share=False, chunk=64)
        info = engine.info
    between, noise = compare(shared, alone, LAYERS), compare(chunked, alone, LAYERS)
    print(table(f"{dtype}: shared against alone", between), table(f"{dtype}: in chunks against whole", noise), sep="\n")
    names = ("tokens", "computed", "rows", "samples_again")
    return {
        "dtype": dtype,
        "engine": info,
        "counters": {name: counters[name] for name in names},
        "shared": as_json(between),
        "noise": as_json(noise),
    }


def main() -> None:
    """Float32 and bfloat16; prints tables, writes raw figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=Path, required=True, help="file of benchmarks.workloads")
    parser.add_argument("--chats", type=int, default=60)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--block-size", type=int, help="tokens of a KV block; 32 on the CPU, where the default is 128")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--out", type=Path, help="file for the raw figures")
    options = parser.parse_args()
    chats = workloads.load(options.workloads).first(options.chats)
    turns = workloads.make("turns", chats, prompts=0).samples
    samples = list({ids[: options.longest].tobytes(): ids[: options.longest] for ids in turns}.values())
    with tempfile.TemporaryDirectory(prefix="coresample-model-") as name:
        subprocess.run([sys.executable, "-c", _MODEL, name], check=True)
        results = [measure(Path(name), dtype, samples, options) for dtype in options.dtypes.split(",")]
    if options.out is not None:
        made = {"date": time.strftime("%Y-%m-%d"), "samples": len(samples), "results": results}
        options.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
