"""A tiny model folder, chats and job files for tests of the command line; no engine can or need run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from extract_core.settings import JobSettings

BLOCKS, HIDDEN, POSITIONS = 6, 16, 128
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_model(folder: Path, template: str = CHATML) -> Path:
    """Config, weights of the right names and a byte-level tokenizer: what planning reads."""
    folder.mkdir(parents=True)
    specials = ["<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user\nassistant\nsystem\nhello world, how are you?"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": BLOCKS,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": POSITIONS,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template})
    )
    save_file({"model.embed_tokens.weight": torch.zeros(config["vocab_size"], HIDDEN)}, folder / "model.safetensors")
    return folder


def make_chats(path: Path, count: int = 5, start: int = 0) -> Path:
    """Conversations with distinct answers."""
    with path.open("w") as file:
        for n in range(start, start + count):
            messages = [
                {"role": "user", "content": "how are you?"},
                {"role": "assistant", "content": f"hello {n} " * (n + 1)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_job(path: Path, **change: Any) -> Path:
    """A job file; ``change`` sets fields by dotted name written with two underscores, None removes one."""
    job: dict[str, Any] = {
        "root": str(path.parent / "dataset"),
        "model": {"path": str(path.parent / "model"), "dtype": "float32"},
        "data": {"path": str(path.parent / "chats.jsonl")},
    }
    for name, value in change.items():
        *parents, leaf = name.split("__")
        section = job
        for part in parents:
            section = section.setdefault(part, {})
        if value is None:
            section.pop(leaf)
        else:
            section[leaf] = value
    path.write_text(yaml.safe_dump(job))
    return path


def settings(path: Path) -> JobSettings:
    """What a job file says."""
    from extract_core.settings import load_job

    return load_job(path)


def coresample(*arguments: object, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "extract_core.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, by relative path; empty when it does not exist."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
