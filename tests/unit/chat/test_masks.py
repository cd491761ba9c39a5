"""Loss masks against templates of every kind, on a tiny tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from extract_core.chat import ChatTokenizer, Conversation, DropReason, RowProblem, cross_check, mask_conversation
from tests.unit.chat import kit
from tests.unit.chat.kit import chat_tokenizer, runs, talk

TWO = talk(("user", "hello"), ("assistant", "first answer"), ("user", "how are you?"), ("assistant", "fine"))


def supervised(template: str, conversation: Conversation, **options) -> tuple[str, list[str]]:
    tokenizer = chat_tokenizer(template)
    masked = mask_conversation(tokenizer, conversation, **options)
    return masked.method, runs(tokenizer, masked.token_ids, masked.loss_mask)


@pytest.mark.parametrize(
    ("template", "method", "expected"),
    [
        (kit.CHATML, "prefix", ["first answer<|im_end|>", "fine<|im_end|>"]),
        (kit.CHATML_DEFAULT_SYSTEM, "prefix", ["first answer<|im_end|>", "fine<|im_end|>"]),
        (kit.CHATML_GENERATION, "generation", ["first answer<|im_end|>", "fine<|im_end|>"]),
        (kit.THINKING, "markers", ["first answer<|im_end|>", "<think>\n\n</think>\n\nfine<|im_end|>"]),
        (kit.FORCED_THINKING, "markers", ["first answer</s>", "fine</s>"]),
        (kit.HARMONY, "markers", ["<|message|>first answer<|end|>", "<|message|>fine<|return|>"]),
        (kit.ALWAYS_HEADER, "markers", ["first answer<|end|>", "fine<|end|>"]),
        (kit.IGNORES_PROMPT, "markers", ["first answer<|im_end|>", "fine<|im_end|>"]),
        (kit.INSTRUCT, "prefix", [" first answer </s>", " fine </s>"]),
        (kit.NO_END, "prefix", ["first answer", "fine"]),
        (kit.PLAIN_TEXT, "prefix", ["first answer\n### end", "fine\n### end"]),
        (kit.MERGES_SYSTEM, "prefix", ["first answer<|end|>", "fine<|end|>"]),
    ],
)
def test_each_kind_of_template(template, method, expected) -> None:
    assert supervised(template, TWO) == (method, expected)
    check = cross_check(chat_tokenizer(template), TWO)
    assert check.agree, check.refused
    assert {"prefix", "markers"} & set(check.masks)


@pytest.mark.parametrize("template", [kit.CHATML, kit.CHATML_GENERATION, kit.THINKING, kit.HARMONY, kit.ALWAYS_HEADER])
@pytest.mark.parametrize("turn", [0, 1])
def test_one_turn_alone_supervises_only_that_turn(template, turn) -> None:
    cut = Conversation(TWO.messages[: 2 * turn + 2])
    _, found = supervised(template, cut, turn=turn)
    assert len(found) == 1
    assert ("first answer", "fine")[turn] in found[0]


def test_separator_behind_the_end_of_turn_token_is_not_supervised() -> None:
    masked = mask_conversation(chat_tokenizer(), TWO)
    assert masked.text.endswith("<|im_end|>\n")
    assert masked.loss_mask[-1] == 0
    assert masked.loss_mask[-2] == 1


@pytest.mark.parametrize("method", ["prefix", "markers"])
def test_marker_quoted_by_the_user_is_not_taken_for_a_turn(method) -> None:
    quote = "what does <|im_start|>assistant\nI am fine<|im_end|>\n<|im_start|>user\n mean?<|im_end|>\n"
    quote += "<|im_start|>assistant\n"
    conversation = talk(("user", quote), ("assistant", "it quotes <|im_end|>\n"), ("user", quote), ("assistant", ""))
    tokenizer = chat_tokenizer()
    assert runs(tokenizer, *_ids_mask(tokenizer, conversation, method)) == [
        "it quotes <|im_end|>\n<|im_end|>",
        "<|im_end|>",
    ]


def _ids_mask(tokenizer, conversation, method):
    masked = mask_conversation(tokenizer, conversation, method=method)
    return masked.token_ids, masked.loss_mask


@pytest.mark.parametrize("method", ["prefix", "markers", "generation"])
def test_token_straddling_the_header_is_not_supervised(method) -> None:
    """The header's newline and the answer's first newline are one token here: no prompt can end inside it."""
    tokenizer = chat_tokenizer(kit.CHATML_GENERATION)
    conversation = talk(("user", "hello"), ("assistant", "\n\nfine"))
    ids, mask = _ids_mask(tokenizer, conversation, method)
    tokens = tokenizer.hf.convert_ids_to_tokens(ids)
    straddling = [i for i, token in enumerate(tokens) if token.endswith("ĊĊ")]
    assert len(straddling) == 1
    assert mask[straddling[0]] == 0
    assert runs(tokenizer, ids, mask) == ["\nfine<|im_end|>"]


def test_conversation_that_begins_with_the_assistant() -> None:
    conversation = talk(("assistant", "hello"), ("user", "how"), ("assistant", "fine"))
    assert supervised(kit.CHATML_DEFAULT_SYSTEM, conversation) == ("markers", ["hello<|im_end|>", "fine<|im_end|>"])


def test_reasoning_is_rendered_by_the_name_the_template_reads() -> None:
    conversation = talk(("user", "hello"), ("assistant", "fine"))
    conversation.messages[1]["reasoning_content"] = "they greet"
    tokenizer = chat_tokenizer(kit.HARMONY)
    assert tokenizer.profile().reasoning_field == "thinking"
    masked = mask_conversation(tokenizer, conversation)
    assert runs(tokenizer, masked.token_ids, masked.loss_mask) == [
        "<|message|>they greet<|end|><|start|>assistant<|message|>fine<|return|>"
    ]
    assert not tokenizer.notes


def test_reasoning_left_out_by_the_template_is_counted() -> None:
    tokenizer = chat_tokenizer(kit.THINKING)
    conversation = talk(
        ("user", "hello"), ("assistant", "<think>\nhmm\n</think>\n\nfirst"), ("user", "how"), ("assistant", "fine")
    )
    masked = mask_conversation(tokenizer, conversation)
    assert "hmm" not in masked.text
    assert tokenizer.notes == {"reasoning of an assistant turn was left out by the chat template": 1}
    assert runs(tokenizer, masked.token_ids, masked.loss_mask)[0] == "first<|im_end|>"


def test_empty_thinking_block_of_the_prompt_is_not_supervised() -> None:
    conversation = Conversation(TWO.messages, template_kwargs={"enable_thinking": False})
    assert supervised(kit.THINKING, conversation)[1][-1] == "fine<|im_end|>"
    single = Conversation(TWO.messages[:2], template_kwargs={"enable_thinking": False})
    check = cross_check(chat_tokenizer(kit.THINKING), single)
    assert set(check.masks) == {"prefix", "markers"}
    assert check.agree


def test_tool_calls_are_supervised_and_tool_answers_are_not() -> None:
    conversation = Conversation(
        [
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "content": "<|im_start|>assistant\n", "tool_call_id": "a"},
            {"role": "assistant", "content": "fine"},
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    tokenizer = chat_tokenizer(kit.TOOLS)
    for method in ("prefix", "markers"):
        ids, mask = _ids_mask(tokenizer, conversation, method)
        assert runs(tokenizer, ids, mask) == ['<call>f{"x": 1}</call><|im_end|>', "fine<|im_end|>"]


def test_tool_calls_that_the_template_loses_are_refused() -> None:
    conversation = talk(("user", "how is the weather?"))
    conversation.messages.append(
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {}}}],
        }
    )
    with pytest.raises(RowProblem, match=r"does not render tool calls .here of 'weather'") as caught:
        mask_conversation(chat_tokenizer(), conversation)
    assert caught.value.reason is DropReason.LOST_BY_TEMPLATE


def test_a_row_that_no_method_can_decide_is_refused() -> None:
    """The template repeats the answer, so its place is not certain; the reason of every method is given."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + m.content + '<|im_end|>' }}{% endfor %}"
        "{{ messages | length }}"
    )
    with pytest.raises(RowProblem, match=r"prefix: .*; markers: .*") as caught:
        mask_conversation(chat_tokenizer(template), TWO)
    assert caught.value.reason is DropReason.MASK_FAILED


@pytest.mark.parametrize("method", ["prefix", "generation"])
def test_a_forced_method_that_does_not_apply_is_refused(method) -> None:
    with pytest.raises(RowProblem, match=f"{method}: "):
        mask_conversation(chat_tokenizer(kit.THINKING), TWO, method=method)


def test_tokenizer_without_offsets() -> None:
    """A tokenizer written in Python has no offsets: a place is found by tokenizing what precedes it."""
    hf = ByT5Tokenizer()
    hf.chat_template = (
        "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + '</s>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
    )
    tokenizer = ChatTokenizer(hf)
    assert not hf.is_fast
    conversation = talk(
        ("user", "héllo 🙂"), ("assistant", "你好"), ("user", "[assistant] x</s>"), ("assistant", " fine")
    )
    masked = mask_conversation(tokenizer, conversation)
    assert runs(tokenizer, masked.token_ids, masked.loss_mask) == ["你好</s>", " fine</s>"]
    assert cross_check(tokenizer, conversation).agree


_TEXT = st.lists(
    st.one_of(
        st.sampled_from(
            ["\n", "\n\n", " ", "hello", "assistant\n", "<|im_end|>", "<|im_start|>assistant\n", "🙂", "你好", "é"]
        ),
        st.text(st.characters(exclude_categories=("Cs",)), max_size=4),
    ),
    max_size=6,
).map("".join)
_CHAT = st.tuples(st.one_of(st.none(), _TEXT), st.lists(st.tuples(_TEXT, _TEXT), min_size=1, max_size=4), st.booleans())


def _build(chat) -> Conversation:
    system, pairs, lead = chat
    turns = [] if system is None else [("system", system)]
    turns += [("assistant", "I begin")] if lead else []
    for question, answer in pairs:
        turns += [("user", question), ("assistant", answer)]
    return talk(*turns)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_CHAT)
def test_mask_equals_an_oracle_made_from_bytes(chat) -> None:
    """A token is supervised iff the byte at which it begins lies in an answer or its end token."""
    conversation = _build(chat)
    tokenizer = _SHARED["chatml"]
    text, inside = "", b""
    for message in conversation.messages:
        head, body, tail = f"<|im_start|>{message['role']}\n", message["content"] + "<|im_end|>", "\n"
        text += head + body + tail
        flag = b"\1" if message["role"] == "assistant" else b"\0"
        inside += b"\0" * len(head.encode()) + flag * len(body.encode()) + b"\0"
    masked = mask_conversation(tokenizer, conversation)
    assert masked.text == text
    assert np.array_equal(masked.token_ids, tokenizer.template_ids(conversation))
    at, expected = 0, []
    for i in masked.token_ids:
        piece = tokenizer.hf.convert_ids_to_tokens(int(i))
        expected.append(inside[at])
        at += len(piece) if piece not in kit.SPECIALS else len(piece.encode())
    assert at == len(inside)
    assert masked.loss_mask.tolist() == expected


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_CHAT, st.sampled_from(["chatml", "generation", "thinking", "harmony"]))
def test_methods_agree(chat, kind) -> None:
    check = cross_check(_SHARED[kind], _build(chat))
    assert check.masks
    assert check.agree


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_TEXT, st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20))
def test_supervised_text_does_not_depend_on_what_the_user_says(question, answer) -> None:
    tokenizer = _SHARED["chatml"]
    first = mask_conversation(tokenizer, talk(("user", question), ("assistant", "x" + answer)))
    second = mask_conversation(tokenizer, talk(("user", "hello"), ("assistant", "x" + answer)))
    assert first.token_ids[first.loss_mask == 1].tolist() == second.token_ids[second.loss_mask == 1].tolist()


_SHARED = {
    "chatml": chat_tokenizer(kit.CHATML),
    "generation": chat_tokenizer(kit.CHATML_GENERATION),
    "thinking": chat_tokenizer(kit.THINKING),
    "harmony": chat_tokenizer(kit.HARMONY),
}
