"""The model families as tiny checkpoints with random weights, and the prompts that go through them.

Each is made by the installed transformers from a configuration and a fixed seed. Norm weights are random too, so that a
row taken on the wrong side of a norm differs, and every weight is a bfloat16 number, so that one float32 reference
serves both dtypes. ``python -m tests.compat.families make FOLDER NAME ...`` writes checkpoints and ``... refer ...``
the references beside them, in processes of their own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BLOCKS, HIDDEN, VOCAB, LIMIT = 6, 128, 512, 512
LENGTHS = (1, 5, 33, 64, 127, 128, 129, 200, 257)
"""Around the CPU backend's default KV block of 128 tokens; the long ones share their first tokens."""
REFERENCE = "reference.npz"

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_DENSE = {"intermediate_size": 256, **_HEADS}
_GEMMA = {
    **_DENSE,
    "sliding_window": 64,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",  # published checkpoints have this beside transformers' hidden_activation
}
_DEEPSEEK = {
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_V3 = {**_DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # vLLM reads both, transformers knows them
# vLLM's CPU rotary path for DeepSeek is right only with YaRN scaling; published checkpoints have it too.
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        title: its name in the table.
        model: name of the class in transformers.
        config: what its configuration gets beside the sizes that all share.
        rope: rotary scaling, written as the installed transformers wants it.
        model_type: replaces that of the configuration in the checkpoint.
        mla_off: run with vLLM's multi-head latent attention disabled.
        extra: engine arguments.
        bfloat16_on: on these 0.x of vLLM the family's code takes or computes in bfloat16 whatever the dtype.
        since: the 0.x of vLLM whose CPU backend first has what the family needs; a failure below is vLLM's.
    """

    title: str
    model: str
    config: dict[str, Any]
    rope: dict[str, Any] = field(default_factory=dict)
    model_type: str | None = None
    mla_off: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    bfloat16_on: range = range(0)
    since: int = 0

    @property
    def chunked(self) -> bool:
        """Whether prefills may be cut into chunks."""
        return bool(self.extra.get("enable_chunked_prefill", True))


FAMILIES = {
    "llama": Family("Llama", "LlamaForCausalLM", _DENSE),
    "mistral": Family("Mistral", "MistralForCausalLM", {**_DENSE, "sliding_window": None}),
    "qwen2": Family("Qwen2", "Qwen2ForCausalLM", {k: v for k, v in _DENSE.items() if k != "head_dim"}),
    "qwen3": Family("Qwen3", "Qwen3ForCausalLM", _DENSE),
    "qwen3-moe": Family(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        {**_DENSE, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "mixtral": Family(
        "Mixtral",
        "MixtralForCausalLM",
        {**_DENSE, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gpt-oss": Family(
        "gpt-oss",
        "GptOssForCausalLM",
        {**_DENSE, "intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64},
        bfloat16_on=range(31),  # attention sinks
    ),
    "deepseek-v2": Family(
        "DeepSeek-V2",
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
        rope=_YARN,
        bfloat16_on=range(20, 25),  # router logits
        mla_off=True,
    ),
    "deepseek-v3": Family("DeepSeek-V3", "DeepseekV3ForCausalLM", _V3, rope=_YARN, mla_off=True),
    "deepseek-v3-mla": Family(
        "DeepSeek-V3, MLA on",
        "DeepseekV3ForCausalLM",
        # The sizes that vLLM's CPU kernel takes: 512 + 64.
        {**_V3, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64},
        rope=_YARN,
        extra={"attention_config": {"backend": "CPU_MLA"}, "enable_chunked_prefill": False},
        since=30,
    ),
    "kimi-k2": Family(
        "Kimi-K2",
        "DeepseekV3ForCausalLM",
        _V3,
        rope=_YARN,
        model_type="kimi_k2",
        mla_off=True,
        since=20,  # of the releases that were run; earlier ones need the model type's remote code
    ),
    "gemma2": Family("Gemma-2", "Gemma2ForCausalLM", _GEMMA),
    "gemma3": Family("Gemma-3", "Gemma3ForCausalLM", _GEMMA),
    "olmo2": Family("OLMo-2", "Olmo2ForCausalLM", {k: v for k, v in _DENSE.items() if k != "head_dim"}),
    "glm4": Family("GLM-4", "Glm4ForCausalLM", _DENSE),
    "glm4-moe": Family(
        "GLM-4-MoE",
        "Glm4MoeForCausalLM",
        {
            **_DENSE,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    "opt": Family(
        "OPT",
        "OPTForCausalLM",
        {"ffn_dim": 256, "num_attention_heads": 4, "word_embed_proj_dim": HIDDEN, "init_std": 0.1, "dropout": 0.0},
    ),
    "gpt2": Family("GPT-2", "GPT2LMHeadModel", {"num_attention_heads": 4}),
}


def prompts() -> list[np.ndarray]:
    """Token ids, int32, one array per length of ``LENGTHS``."""
    generator = np.random.default_rng(7)
    shared = generator.integers(4, VOCAB, max(LENGTHS), dtype=np.int32)
    made = []
    for length in LENGTHS:
        own = generator.integers(4, VOCAB, length, dtype=np.int32)
        made.append(np.concatenate([shared[: length - 1], own[-1:]]) if length > 100 else own)
    return made


def make(name: str, folder: Path) -> None:
    """Write the checkpoint of a family; torch and transformers are imported here."""
    import torch
    import transformers

    family = FAMILIES[name]
    kind = getattr(transformers, family.model)
    shared = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": BLOCKS,
        "max_position_embeddings": LIMIT,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = kind.config_class(**{**shared, **family.config, **_rope(kind.config_class, family.rope)})
    config.dtype = torch.float32
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "ln_" in parameter_name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            elif parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.1)
            parameter.copy_(parameter.bfloat16().float())
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.05)
                buffer.copy_(buffer.bfloat16().float())
    model.save_pretrained(folder)
    if family.model_type:
        path = folder / "config.json"
        config_json = json.loads(path.read_text(encoding="utf-8")) | {"model_type": family.model_type}
        path.write_text(json.dumps(config_json, indent=1), encoding="utf-8")


def _rope(config_class: Any, scaling: dict[str, Any]) -> dict[str, Any]:
    if not scaling:
        return {}
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        return {"rope_scaling": scaling, "rope_theta": 10000.0}
    return {"rope_parameters": {"rope_theta": 10000.0, **scaling}}


def refer(name: str, folder: Path) -> None:
    """Write the float32 reference of a checkpoint: states at every layer id and the greedy token of each prompt."""
    from extract_core.engine.reference import forward

    made = forward(str(folder / name), prompts(), range(BLOCKS + 1))
    np.savez(folder / name / REFERENCE, rows=np.concatenate(made.rows), greedy=np.array(made.greedy))


def main(what: str, folder: str, *names: str) -> None:
    """Run the command line; everything in one process, since its imports take longest."""
    for name in names:
        if what == "make":
            make(name, Path(folder) / name)
        else:
            refer(name, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
