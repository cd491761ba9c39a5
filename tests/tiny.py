"""A tiny Llama with random weights, its tokenizer and chats: whole jobs in seconds where values do not matter.

Python that makes it runs in a process of its own, since a test that starts Prefect or many processes should not carry
torch and transformers.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

BLOCKS, HIDDEN, LIMIT = 4, 64, 512
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path) -> Path:
    """Write config, random weights (fixed seed), tokenizer and ChatML template into ``folder``."""
    subprocess.run([sys.executable, __file__, str(folder)], check=True)
    return folder


def write_chats(path: Path, count: int, *, seed: int = 0, words: int = 60) -> Path:
    """A JSONL of ``count`` distinct conversations of two turns."""
    rng = random.Random(seed)
    vocabulary = ["lamp", "river", "Haus", "код", "漢字", "🙂", "def f(x):", "return", "because", "seven", "quietly"]

    def text() -> str:
        return " ".join(rng.choice(vocabulary) for _ in range(rng.randint(3, words)))

    with path.open("w", encoding="utf-8") as file:
        for n in range(count):
            messages = [
                {"role": "user", "content": f"{n} {text()}"},
                {"role": "assistant", "content": text()},
                {"role": "user", "content": text()},
                {"role": "assistant", "content": text()},
            ]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    return path


def write_job(path: Path, *, model: Path, chats: Path, root: Path, **sections: object) -> Path:
    """A job file (JSON is YAML) for a tiny model.

    Without the self-test's Hugging Face forward, which costs more than the rest of a tiny job; tests/integration/engine
    and jobs on the demo's model have it.
    """
    job = {
        "root": str(root),
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(chats)},
        "layers": [1, 2, 4],
        "engine": {"kv_cache_bytes": "256MiB", "max_num_batched_tokens": 256, "max_num_seqs": 8},
        "preflight": {"reference": "never"},
        "store": {"shard_bytes": "2MiB"},
        **sections,
    }
    path.write_text(json.dumps(job, indent=1), encoding="utf-8")
    return path


def _make(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    raw = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=TEMPLATE)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LIMIT,
        initializer_range=0.2,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    _make(Path(sys.argv[1]))
