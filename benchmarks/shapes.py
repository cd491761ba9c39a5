"""Model shapes with random weights: a ``config.json`` for vLLM's dummy loader and a tokenizer that nobody uses.

Every shape names the layers that are captured and the numbers of its engines, the same for every contestant. ``--tiny``
replaces the sizes, not the kind: every code path can be run on a CPU in minutes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
# The published widths; 6 blocks instead of 61, 32 routed experts instead of 256, so that three engines fit one GPU.
_DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_COMMON = {"hidden_act": "silu", "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2}
_TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 49152}
_TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_TINY_MLA = {
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
    "n_group": 2,
    "topk_group": 1,
}


@dataclass(frozen=True)
class Shape:
    """A model and how its engines are built.

    Attributes:
        config: of the model.
        layers: ids that are captured, ascending.
        kv_bytes: KV cache of each engine; given, so that engines that start at once do not count each other's memory.
        prompts: of the uniform workload.
        chats: conversations of the two others.
        environment: of every engine process.
    """

    config: dict[str, Any]
    layers: list[int]
    kv_bytes: int
    prompts: int
    chats: int
    dtype: str = "bfloat16"
    step_tokens: int = 16384
    longest: int = 4096
    length: int = 1024
    environment: dict[str, str] = field(default_factory=dict)

    def tiny(self) -> Shape:
        """The same kind of model, small."""
        mla = "kv_lora_rank" in self.config
        return replace(
            self,
            config={**self.config, **_TINY, **(_TINY_MLA if mla else _TINY_HEADS)},
            layers=[2, 3, 6],
            kv_bytes=2**28,
            prompts=24,
            chats=8,
            dtype="float32",  # bfloat16 takes ten times as long where the CPU has no units for it
            step_tokens=1024,
            longest=512,
            length=128,
            environment={"VLLM_MLA_DISABLE": "1"} if mla else {},  # vLLM's CPU kernel takes only few sizes
        )

    def write(self, folder: Path) -> Path:
        """The model's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {**_COMMON, **self.config, "dtype": self.dtype, "torch_dtype": self.dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        # A job looks for weights and names them by their digest; the dummy loader reads none.
        save_file({"lm_head.weight": np.zeros((1, 1), np.float32)}, str(folder / "model.safetensors"))
        _write_tokenizer(folder)
        return folder


SHAPES = {
    "8b": Shape(_LLAMA_8B, [2, 16, 29, 32], kv_bytes=20 * 2**30, prompts=2560, chats=2000),
    "0.6b": Shape(_QWEN3_0_6B, [2, 14, 25, 28], kv_bytes=16 * 2**30, prompts=8192, chats=2000),
    # Two layers of six: a whole model has ten times the work per stored byte.
    "dsv3": Shape(_DEEPSEEK_V3, [3, 6], kv_bytes=8 * 2**30, prompts=2048, chats=800),
}


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes: a job needs one to be checked, token ids come from the workload."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages[0]['content'] }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
