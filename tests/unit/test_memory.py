"""The memory plan: sizes computed by hand for known models, and what a job that does not fit is told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from extract_core.errors import MemoryPlanError, SettingsError
from extract_core.hardware import Gpu, HostMemory
from extract_core.job import prepare
from extract_core.planning.memory import Machine, MemoryPlan, memory_plan, reference_bytes, wants_reference
from extract_core.planning.model import ModelInfo, Widths, inspect_model, loaded_files
from extract_core.planning.sizes import Demand, EngineSizes, engine_sizes, kv_bytes, least_kv_cache
from extract_core.progress import reporter, set_reporter
from extract_core.settings import ModelSettings
from tests.unit.cli import kit

MIB, GIB = 2**20, 2**30
LLAMA = Widths(kv_heads=8, head_dim=128, widest=14336, heads=32)
DEEPSEEK = Widths(kv_heads=128, head_dim=56, latent=576, widest=18432, heads=128)
HOST = Machine(HostMemory(64 * GIB, 60 * GIB), spool=1000 * GIB)
H200 = Gpu("NVIDIA H200", 140 * GIB, 139 * GIB)

JOB = Demand(  # Llama-3.1-8B in bfloat16, four layers, ten million tokens
    device="cpu",
    weights=8_030_261_248 * 2,
    compute_bytes=2,
    kv_bytes=2,
    row_bytes=4 * 4096 * 2,
    layers=4,
    blocks=32,
    hidden=4096,
    vocab=128256,
    widths=LLAMA,
    plan_tokens=10_000_000,
    mean_length=1000,
    shard_bytes=512 * MIB,
    spool=1024 * MIB,
    shards=600,
    max_model_len=4098,
)
ON_GPU = replace(JOB, device="cuda")


def gpus(count: int = 1, gpu: Gpu = H200, host: int = 60 * GIB) -> Machine:
    many = tuple(replace(gpu, number=n) for n in range(count))
    return Machine(HostMemory(host, host), many, spool=1000 * GIB)


def line(plan: MemoryPlan, name: str) -> int:
    [found] = [item for item in plan.lines if item.name == name]
    return found.nbytes


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_kv_cache_per_token() -> None:
    assert kv_bytes(JOB, 128) == 128 * 131_072  # 32 blocks x 2 x 8 heads x 128 values x 2 bytes
    assert kv_bytes(replace(JOB, tensor_parallel=4), 128) == 128 * 32_768
    assert kv_bytes(replace(JOB, tensor_parallel=16), 128) == 128 * 16_384, "a head at least on every GPU"
    assert kv_bytes(replace(JOB, kv_bytes=1), 1) == 128 * 65_536, "whole blocks"
    v3 = replace(JOB, blocks=61, hidden=7168, widths=DEEPSEEK)
    assert kv_bytes(v3, 128) == 128 * 70_272  # 61 blocks x (512 + 64) values x 2 bytes
    assert kv_bytes(replace(v3, tensor_parallel=8), 128) == 128 * 70_272, "a latent is whole on every GPU"


def test_defaults_on_a_cpu() -> None:
    sizes = engine_sizes(JOB)
    # A step of 2048 tokens, two samples of 4098, part of a block for each of 3 samples in a step; whole blocks.
    kv = -(-(2048 + 2 * 4098 + 3 * 128) // 128) * 128 * 131_072
    assert sizes == EngineSizes(2048, 256, kv, 2 * 2048 * 32_768, 2048 * 32_768)
    assert least_kv_cache(JOB) == 34 * 128 * 131_072  # 33 blocks hold 4098 tokens, one stays empty


def test_defaults_on_a_gpu() -> None:
    assert engine_sizes(ON_GPU) == EngineSizes(16384, 256, None, GIB, 512 * MIB)
    wide = replace(ON_GPU, row_bytes=33 * 4096 * 2, layers=33)
    assert engine_sizes(wide).step_bytes == 16384 * 270_336 > 4 * GIB
    assert engine_sizes(wide).buffer_bytes == 4 * GIB, "the pool may be smaller than a step"


def test_the_job_decides_where_it_says_something() -> None:
    said = replace(ON_GPU, step_tokens=500, samples=3, kv_cache=GIB, pool=5 * MIB)
    assert engine_sizes(said) == EngineSizes(500, 3, GIB, 5 * MIB, 500 * 32_768)


@pytest.mark.parametrize(
    ("change", "tokens", "samples"),
    [
        ({"plan_tokens": 300}, 384, 256),
        ({"plan_tokens": 1}, 128, 128),
        ({"plan_tokens": 1, "samples": 200}, 200, 200),
        ({"step_tokens": 64}, 64, 64),
    ],
)
def test_no_more_than_the_plan_needs(change: dict[str, int], tokens: int, samples: int) -> None:
    sizes = engine_sizes(replace(ON_GPU, **change))
    assert (sizes.max_num_batched_tokens, sizes.max_num_seqs) == (tokens, samples)


def test_kv_cache_bounds_on_a_cpu() -> None:
    tiny = replace(JOB, blocks=1, widths=Widths(1, 16))
    assert engine_sizes(tiny).kv_cache_bytes == 64 * MIB
    assert engine_sizes(replace(JOB, max_model_len=16384)).kv_cache_bytes == 4 * GIB
    long = replace(JOB, max_model_len=131072)
    assert engine_sizes(long).kv_cache_bytes == least_kv_cache(long) == 1025 * 128 * 131_072 > 16 * GIB


def test_cpu_prefills_latent_attention_whole() -> None:
    """vLLM's CPU backend raises the step to the longest sample for these models (``platforms/cpu.py``)."""
    v3 = replace(JOB, widths=DEEPSEEK, step_tokens=128)
    assert engine_sizes(v3).max_num_batched_tokens == 4098
    assert engine_sizes(replace(v3, max_model_len=100)).max_num_batched_tokens == 2048
    assert engine_sizes(replace(v3, device="cuda")).max_num_batched_tokens == 128


# -- the plan --------------------------------------------------------------------------------------------------------


def test_lines_on_a_cpu() -> None:
    plan = memory_plan(JOB, HOST)
    assert plan.fits and plan.verdict == "fits"
    assert [(item.place, item.name, item.estimate) for item in plan.lines] == [
        ("memory", "weights", False),
        ("memory", "KV cache", False),
        ("memory", "captured states", False),
        ("memory", "activations", True),
        ("memory", "row buffers", False),
        ("memory", "engine process", True),
        ("spool", "shards in the spool", False),
    ]
    assert line(plan, "weights") == 16_060_522_496
    assert line(plan, "captured states") == 2048 * 4 * 4096 * 2
    assert line(plan, "activations") == 2048 * (4 * 4096 + 3 * 14336) * 2 + 256 * 128256 * 6
    assert line(plan, "shards in the spool") == GIB
    memory, spool = plan.places
    assert memory.needed == sum(item.nbytes for item in plan.lines if item.place == "memory")
    assert (memory.available, spool.available) == (60 * GIB, 1000 * GIB)
    assert line(memory_plan(replace(JOB, shards=1), HOST), "shards in the spool") == 512 * MIB
    two = memory_plan(replace(JOB, tensor_parallel=2), HOST)
    assert line(two, "weights") == 16_060_522_496, "all ranks are in the same memory"
    assert line(two, "engine process") == 2 * GIB


def test_lines_on_gpus() -> None:
    plan = memory_plan(replace(ON_GPU, tensor_parallel=2), gpus(2))
    assert plan.fits
    assert line(plan, "weights") == 8_030_261_248
    assert line(plan, "KV cache, at least") == 34 * 128 * 65_536
    assert line(plan, "staging") == 512 * MIB and line(plan, "pinned pool") == GIB
    assert plan.places[0].available == int(140 * GIB * 0.9)
    assert plan.places[0].what == "(0.90 of each of 2 x NVIDIA H200)"
    assert plan.summary()[0].startswith("GPU: ") and "activations about" in plan.summary()[0]
    explicit = memory_plan(replace(ON_GPU, kv_cache=10 * GIB), gpus())
    assert line(explicit, "KV cache") == 10 * GIB and explicit.places[0].available == 139 * GIB
    json.dumps(plan.to_dict())


def test_without_a_visible_gpu_nothing_is_claimed() -> None:
    plan = memory_plan(ON_GPU, gpus(0))
    assert plan.fits and "no GPU is visible here" in plan.verdict
    assert "(not measured)" in plan.summary()[0]


def advised(text: str, setting: str) -> int:
    match = re.search(rf"{re.escape(setting)} to (\d+)", text)
    assert match is not None, text
    return int(match[1])


def test_too_little_main_memory() -> None:
    host = Machine(HostMemory(20 * GIB, 17 * GIB + 700 * MIB, "this container"), spool=1000 * GIB)
    plan = memory_plan(JOB, host)
    with pytest.raises(MemoryPlanError) as caught:
        plan.require()
    text = str(caught.value)
    assert isinstance(caught.value, SettingsError) and caught.value.exit_code == 2
    assert text.startswith("the job does not fit this machine: main memory: ")
    assert "weights 15.0 GiB" in text and "17.7 GiB free within this container's limit" in text
    kv = advised(text, "Lower engine.kv_cache_bytes") * MIB
    assert least_kv_cache(JOB) <= kv < 1.3 * GIB
    assert memory_plan(replace(JOB, kv_cache=kv), host).fits
    assert text.count("lower engine.") + text.count("Lower engine.") + text.count("lower chat.") <= 2


@pytest.mark.parametrize("name", ["kv_cache", "step_tokens", "pool", "max_model_len"])
def test_every_advised_value_fits(name: str) -> None:
    """A machine that is just too small, by what each setting can give."""
    whole = memory_plan(replace(JOB, pool=GIB), HOST).places[0].needed
    host = Machine(HostMemory(whole, whole - 8 * MIB), spool=1000 * GIB)
    demand = replace(JOB, pool=GIB)
    [problem] = memory_plan(demand, host).problems
    setting = {
        "kv_cache": "engine.kv_cache_bytes",
        "step_tokens": "engine.max_num_batched_tokens",
        "pool": "engine.buffer_bytes",
        "max_model_len": "chat.max_length",
    }[name]
    [text] = [item for item in problem.advice if setting in item] or [None]
    if text is None:
        assert name == "max_model_len", problem.advice
        return
    value = advised(text, setting)
    value = value * MIB if name in ("kv_cache", "pool") else value + 2 * (name == "max_model_len")
    assert memory_plan(replace(demand, **{name: value}), host).fits


def test_several_settings_together() -> None:
    demand = replace(JOB, pool=GIB)
    whole = memory_plan(demand, HOST).places[0].needed
    [problem] = memory_plan(demand, Machine(HostMemory(whole, whole - 1300 * MIB))).problems
    assert "Set together engine.max_num_batched_tokens to 512, engine.buffer_bytes to 64MiB" in str(problem)
    small = replace(
        demand, step_tokens=512, pool=64 * MIB, kv_cache=advised(str(problem), "engine.kv_cache_bytes") * MIB
    )
    assert memory_plan(small, Machine(HostMemory(whole, whole - 1300 * MIB))).fits


def test_a_model_that_is_too_large() -> None:
    plan = memory_plan(JOB, Machine(HostMemory(8 * GIB, 7 * GIB)))
    [problem] = plan.problems
    assert problem.advice == () and "No single setting makes it fit: use a machine with more memory" in str(problem)


def test_too_little_gpu_memory() -> None:
    small = Gpu("NVIDIA L4", 24 * GIB, 23 * GIB)
    assert memory_plan(ON_GPU, gpus(gpu=small)).fits
    [problem] = memory_plan(replace(ON_GPU, layers=33, row_bytes=33 * 8192), gpus(gpu=small)).problems
    assert (
        problem.kind == "GPU" and "staging 4.1 GiB" in problem.text and "21.6 GiB (0.90 of NVIDIA L4)" in problem.text
    )
    tokens = advised(str(problem), "Lower engine.max_num_batched_tokens")
    assert tokens % 128 == 0
    fixed = replace(ON_GPU, layers=33, row_bytes=33 * 8192, step_tokens=tokens)
    assert memory_plan(fixed, gpus(gpu=small)).fits
    assert not memory_plan(replace(fixed, step_tokens=tokens + 128), gpus(gpu=small)).fits, "the largest that fits"
    tiny = Gpu("NVIDIA T4", 16 * GIB, 16 * GIB)
    assert "Raise engine.tensor_parallel_size to 2" in str(memory_plan(ON_GPU, gpus(2, tiny)).problems[0])
    assert "use larger or more GPUs" in str(memory_plan(ON_GPU, gpus(1, tiny)).problems[0])
    three = replace(ON_GPU, widths=replace(LLAMA, heads=32), weights=40 * GIB)
    assert "tensor_parallel_size to 4" in str(memory_plan(three, gpus(4, tiny)).problems[0]), "3 does not divide 32"


def test_a_long_context_on_a_gpu() -> None:
    long = replace(ON_GPU, max_model_len=131074, widths=replace(LLAMA, kv_heads=32))
    [problem] = memory_plan(long, gpus(gpu=Gpu("NVIDIA A100", 80 * GIB, 79 * GIB))).problems
    assert "KV cache, at least 64.1 GiB" in problem.text
    assert any("lower chat.max_length to" in item for item in problem.advice)
    less = gpus(gpu=Gpu("NVIDIA Y", 90 * GIB, 90 * GIB))
    [problem] = memory_plan(long, less).problems
    assert "raise engine.gpu_memory_utilization to 0.92" in problem.advice
    assert memory_plan(replace(long, utilization=0.92), less).fits


def test_what_vllm_would_refuse_is_refused_before() -> None:
    [problem] = memory_plan(replace(JOB, kv_cache=100 * MIB), HOST).problems
    assert str(problem) == (
        "KV cache: one sample of 4,098 tokens needs 544.0 MiB, engine.kv_cache_bytes is 100.0 MiB. "
        "Raise engine.kv_cache_bytes to 544MiB, or lower chat.max_length to 576 (now 4096)"
    )
    busy = Gpu("NVIDIA H200", 140 * GIB, 70 * GIB)
    [problem] = memory_plan(ON_GPU, gpus(gpu=busy)).problems
    assert "engine.gpu_memory_utilization 0.90 is 126.0 GiB, but 70.0 GiB of 140.0 GiB are free" in problem.text
    assert "Lower engine.gpu_memory_utilization to 0.50" in str(problem)
    [problem] = memory_plan(replace(ON_GPU, tensor_parallel=4), gpus(2)).problems
    assert "tensor_parallel_size is 4, but only 2" in problem.text
    assert "Lower engine.tensor_parallel_size to 2" in str(problem)
    [problem] = memory_plan(JOB, replace(HOST, spool=100 * MIB)).problems
    assert str(problem) == (
        "spool: a shard has 512.0 MiB, its disk has 100.0 MiB free. Lower store.shard_bytes to 100MiB, or set "
        "store.spool to a larger disk"
    )
    assert (
        "its shards may take 1.0 GiB; lower store.spool_bytes"
        in memory_plan(JOB, replace(HOST, spool=600 * MIB)).verdict
    )


def test_tight_is_said() -> None:
    needed = memory_plan(JOB, HOST).places[0].needed
    plan = memory_plan(JOB, Machine(HostMemory(needed, needed)))
    assert plan.fits and "memory is tight" in plan.verdict


# -- models ----------------------------------------------------------------------------------------------------------


def model(folder: Path, config: dict[str, object], **tensors: torch.Tensor) -> ModelInfo:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors or {"x": torch.zeros(3, 5, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return inspect_model(ModelSettings(path=str(folder)))


LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}


def test_widths_of_known_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model(tmp_path / "m", LLAMA_CONFIG).widths == LLAMA
    found = model(tmp_path / "m", DEEPSEEK_CONFIG).widths
    assert (found.latent, found.widest, found.heads) == (576, 18432, 128)
    assert found.kv_values() * 61 * 2 == 70_272
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    plain = model(tmp_path / "m", DEEPSEEK_CONFIG).widths
    assert (plain.latent, plain.kv_heads, plain.head_dim) == (0, 128, 192)
    assert plain.kv_values() == 2 * 128 * 192


def test_widths_of_a_nested_config(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    info = model(tmp_path / "m", config)
    assert info.n_layers == 34
    assert info.widths == Widths(kv_heads=4, head_dim=256, widest=10240, heads=8)


def test_weights_are_counted_from_the_headers(tmp_path: Path) -> None:
    config = {**LLAMA_CONFIG, "torch_dtype": "float32"}
    info = model(tmp_path / "m", config, a=torch.zeros(10, 20), b=torch.zeros(7))
    assert (info.parameters, info.dtype, info.quantized) == (207, "bfloat16", False)
    assert info.weights_bytes() == 414 and reference_bytes(info) == 828
    packed = model(
        tmp_path / "m",
        {**LLAMA_CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}},
        a=torch.zeros(10, 20, dtype=torch.int32),
        b=torch.zeros(7, dtype=torch.bfloat16),
    )
    assert packed.quantized and packed.parameters == 10 * 20 * 8 + 7
    assert packed.weights_bytes() == packed.file_bytes == (tmp_path / "m" / "model.safetensors").stat().st_size


def test_weights_that_are_there_twice_count_once(tmp_path: Path) -> None:
    info = model(tmp_path / "m", LLAMA_CONFIG)
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"x" * 100)
    assert inspect_model(ModelSettings(path=str(tmp_path / "m"))).parameters == info.parameters == 15
    save_file({"y": torch.zeros(9)}, tmp_path / "m" / "consolidated.safetensors")
    index = {"weight_map": {"x": "model.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in loaded_files(tmp_path / "m")] == ["model.safetensors"]
    assert inspect_model(ModelSettings(path=str(tmp_path / "m"))).parameters == 15
    (tmp_path / "m" / "model.safetensors.index.json").write_text("[]")
    assert len(loaded_files(tmp_path / "m")) == 2


def test_reference_by_size_and_wish(tmp_path: Path) -> None:
    kit.make_model(tmp_path / "model")
    job = kit.settings(kit.write_job(tmp_path / "job.yaml"))
    small = inspect_model(job.model)
    free = HostMemory(8 * GIB, 8 * GIB)
    assert wants_reference(job, small, free)
    assert not wants_reference(job, small, HostMemory(8 * GIB, reference_bytes(small) * 4 - 1))
    at_most = replace(small, parameters=GIB // 2, dtype="float32")
    assert wants_reference(job, at_most, free)
    assert not wants_reference(job, replace(at_most, parameters=GIB // 2 + 1), HostMemory(99 * GIB, 99 * GIB))
    assert not wants_reference(job, replace(small, quantized=True), free)

    def said(**change: object) -> object:
        return kit.settings(kit.write_job(tmp_path / "job.yaml", **change))

    assert not wants_reference(said(engine__load_format="dummy"), small, free)
    assert wants_reference(said(preflight__reference="always"), replace(at_most, parameters=99 * GIB), free)
    assert not wants_reference(said(preflight__reference="never"), small, free)


# -- a job -----------------------------------------------------------------------------------------------------------


class _Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def stage(self, name: str, total: int | None = None, unit: str = "") -> None:
        pass

    def advance(self, done: int) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_job_tells_its_memory_before_the_engine_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.make_model(tmp_path / "model")
    kit.make_chats(tmp_path / "chats.jsonl", 12)
    job = prepare(kit.settings(kit.write_job(tmp_path / "job.yaml", engine__capture="hooks")))
    before, notes = reporter(), _Notes()
    set_reporter(notes)
    try:
        job.require_memory()
    finally:
        set_reporter(before)
    assert [text.partition(":")[0] for text in notes.notes] == ["memory", "spool"]
    tokens = -(-job.plan.meta.tokens // 128) * 128
    spec = job.engine_spec
    assert (spec.max_num_batched_tokens, spec.max_num_seqs) == (tokens, 256)
    assert (spec.kv_cache_bytes, spec.buffer_bytes) == (64 * MIB, 64 * MIB)
    assert spec.capture == "hooks" and spec.enforce_eager is True

    too_much = prepare(kit.settings(kit.write_job(tmp_path / "job.yaml", engine__kv_cache_bytes="900TiB")))
    with pytest.raises(
        MemoryPlanError, match=r"main memory: 900\.0 TiB needed .*Lower engine\.kv_cache_bytes to \d+MiB"
    ):
        too_much.require_memory()


def test_settings_that_only_size_the_engine_leave_the_fingerprint(tmp_path: Path) -> None:
    kit.make_model(tmp_path / "model")
    kit.make_chats(tmp_path / "chats.jsonl", 3)

    def fingerprint(**change: object) -> str:
        return prepare(kit.settings(kit.write_job(tmp_path / "job.yaml", **change))).plan.fingerprint

    plain = fingerprint()
    assert plain == fingerprint(
        engine__buffer_bytes="1GiB",
        engine__kv_cache_bytes="1GiB",
        engine__capture="hooks",
        preflight__reference="never",
    )
    assert fingerprint(layers=["eagle3", -1]) == fingerprint(layers=[6, 3, 2]) == plain
    assert fingerprint(layers="every:2") != plain


def test_a_spool_in_memory_counts_as_memory():
    plan = memory_plan(replace(JOB, spool_in_memory=True), HOST)
    [found] = [item for item in plan.lines if item.name == "shards in the spool"]
    assert (found.place, found.nbytes) == ("memory", 1024 * MIB)
    alone = memory_plan(replace(JOB, spool=MIB), HOST)
    assert line(alone, "shards in the spool") == 512 * MIB  # one shard fits always
