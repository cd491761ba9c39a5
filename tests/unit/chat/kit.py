"""A tiny byte-level tokenizer, chat templates of every kind met in the field, and helpers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from extract_core.chat import ChatTokenizer, Conversation, Dropped, Sample, read_samples
from extract_core.settings import ChatSettings, DataSettings

SPECIALS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|end|>",
    "<|return|>",
    "<|message|>",
    "<|user|>",
)
CORPUS = [
    "\n\n\n\n hello world, how are you? I am fine\n\n",
    "assistant\n\nassistant\n\n user\n\n",
    "system answer question",
]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML
)
CHATML_GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Only the last turn keeps its reasoning, and it always gets a (perhaps empty) block.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}"
    "{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# The prompt opens a reasoning block that finished turns do not have.
FORCED_THINKING = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% else %}"
    "{{ '<|start|>' + m.content.split('</think>')[-1] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|><think>\n' }}{% endif %}"
)
# The last turn ends with another token than the earlier ones; reasoning is called thinking.
HARMONY = (
    "{{ '<|start|>system<|message|>You help.<|end|>' }}{% for m in messages %}{{ '<|start|>' + m.role }}"
    "{% if m.thinking and loop.last %}{{ '<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}"
    "{{ '<|message|>' + m.content }}"
    "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}{{ '<|return|>' }}"
    "{% else %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# The header of the next answer is written whether it is asked for or not.
ALWAYS_HEADER = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n\n' + m.content | trim + '<|end|>' }}{% endfor %}"
    "{{ '<|start|>assistant\n\n' }}"
)
IGNORES_PROMPT = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
NO_END = (
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
PLAIN_TEXT = (
    "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n### end\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
MERGES_SYSTEM = (
    "{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if first else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<|start|>' + m.role + '\n' + (first if loop.first else '') + m.content | trim + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls %}{{ '<call>' + c.function.name + (c.function.arguments | tojson) + '</call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def backend() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def hf_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend().to_str()), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def chat_tokenizer(template: str | None = CHATML, **chat: object) -> ChatTokenizer:
    return ChatTokenizer(hf_tokenizer(template), ChatSettings(**chat), name="tiny")


def talk(*turns: tuple[str, str], **extra: object) -> Conversation:
    return Conversation([{"role": role, "content": content} for role, content in turns], **extra)


def runs(tokenizer: ChatTokenizer, ids, mask) -> list[str]:
    """The decoded stretches of supervised tokens."""
    found, start = [], None
    for i, flag in enumerate([*mask, 0]):
        if flag and start is None:
            start = i
        if not flag and start is not None:
            found.append(tokenizer.hf.decode(ids[start:i], clean_up_tokenization_spaces=False))
            start = None
    return found


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path


def read(path: object, tokenizer: ChatTokenizer | None = None, **options: object) -> list[Sample | Dropped]:
    data = {k: options.pop(k) for k in ("format", "split", "limit", "storage_options") if k in options}
    length, progress = options.pop("max_length", 512), options.pop("on_progress", None)
    chat = ChatSettings(**options)
    tokenizer = tokenizer or chat_tokenizer(**options)
    vocab = tokenizer.vocab_size
    paths = [str(p) for p in path] if isinstance(path, list) else str(path)
    return list(
        read_samples(
            DataSettings(path=paths, **data), chat, tokenizer, max_length=length, vocab_size=vocab, on_progress=progress
        )
    )


GOOD = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello world"}]}
