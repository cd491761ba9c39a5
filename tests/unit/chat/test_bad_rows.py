"""Every way in which a row can be wrong: one Dropped each, with file, row, field, what was expected and what came."""

from __future__ import annotations

import numpy as np
import pytest

from extract_core.chat import Dropped, DropReason, Sample, Source, Tally, sample_id_of
from extract_core.errors import InputDataError, TemplateError
from tests.unit.chat import kit
from tests.unit.chat.kit import GOOD, chat_tokenizer, read, write_jsonl


def _messages(*messages: object, **columns: object) -> dict:
    return {"messages": [*messages], **columns}


USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "fine"}

BAD = [
    (b"{not json", "not_json", None, "not valid JSON at column 2"),
    (b'{"messages": [', "not_json", None, "not valid JSON"),
    (b"[" * 100_000, "not_json", None, "nested too deeply"),
    (b'{"messages": ' + b"[" * 250 + b"]" * 250 + b"}", "not_json", None, "nested too deeply (more than 200 levels)"),
    ({"messages": "[" * 250 + "]" * 250}, "invalid_value", "messages", "nested too deeply (more than 200 levels)"),
    (b'{"\\ud800": 1, "\\u001b[0m": 1}', "missing_field", "messages", r"the row has \x1b[0m, \ud800"),
    (b'{"n": ' + b"9" * 5000 + b"}", "not_json", None, "not valid JSON"),
    (b'{"messages": "\xff"}', "invalid_utf8", None, "byte 0xff at 14"),
    (b"[1, 2]", "not_an_object", None, "expected a JSON object, got list"),
    (b'"text"', "not_an_object", None, "expected a JSON object, got str"),
    ({"text": "x", "id": 1}, "missing_field", "messages", "one of the fields input_ids, messages, conversations"),
    ({"text": "x", "id": 1}, "missing_field", "messages", "the row has id, text"),
    ({}, "missing_field", "messages", "no field at all"),
    ({"messages": 7}, "wrong_type", "messages", "expected a list, got an integer"),
    ({"messages": "hello"}, "invalid_value", "messages", "not JSON: 'hello'"),
    ({"messages": []}, "no_messages", "messages", "at least one message"),
    (_messages("hello"), "wrong_type", "messages[0]", "expected an object, got text"),
    (
        _messages(USER, {"content": "x"}),
        "missing_field",
        "messages[1].role",
        "expected a role; the message has content",
    ),
    (_messages({"role": 3, "content": "x"}), "wrong_type", "messages[0].role", "expected text, got an integer"),
    (
        _messages(USER, {"role": "narrator", "content": "x"}),
        "unknown_role",
        "messages[1].role",
        "'narrator'; known are",
    ),
    (
        _messages(USER, {"role": "assistant"}),
        "missing_field",
        "messages[1].content",
        "the text of the message; it has role",
    ),
    (_messages({"role": "user", "content": None}), "empty_content", "messages[0].content", "only beside tool_calls"),
    (_messages({"role": "user", "content": 5}), "wrong_type", "messages[0].content", "text or a list of parts"),
    (
        _messages({"role": "user", "content": [5]}),
        "wrong_type",
        "messages[0].content[0]",
        "expected a part, got an integer",
    ),
    (
        _messages({"role": "user", "content": [{"type": "image_url"}]}),
        "unsupported_content",
        "messages[0].content[0].type",
        "a part of type 'image_url'",
    ),
    (
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        "invalid_utf8",
        "messages[0].content",
        "lone surrogate",
    ),
    (_messages(USER, ANSWER, tools=[{"a": {"b": ["\ud800"]}}]), "invalid_utf8", "tools[0].a.b[0]", "lone surrogate"),
    (_messages(USER, ANSWER, tools=[{"\udfff": 1}]), "invalid_utf8", r"tools[0].\udfff", "lone surrogate"),
    (
        _messages(USER, ANSWER, chat_template_kwargs={"x": "\ud800"}),
        "invalid_utf8",
        "chat_template_kwargs.x",
        "lone surrogate",
    ),
    (
        _messages(
            USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "\ud800"}}}]}
        ),
        "invalid_utf8",
        "messages[1].tool_calls[0].arguments.a",
        "lone surrogate",
    ),
    (
        _messages(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": "\\ud800"}'}]}),
        "invalid_utf8",
        "messages[1].tool_calls[0].arguments.a",
        "lone surrogate",
    ),
    (_messages(USER, {"role": "assistant", "tool_calls": 1}), "wrong_type", "messages[1].tool_calls", "a list"),
    (_messages(USER, {"role": "assistant", "tool_calls": [1]}), "wrong_type", "messages[1].tool_calls[0]", "an object"),
    (
        _messages(USER, {"role": "assistant", "tool_calls": [{"function": {}}]}),
        "missing_field",
        "messages[1].tool_calls[0]",
        "the name of the function",
    ),
    (
        _messages(USER, {**ANSWER, "reasoning": 5}),
        "wrong_type",
        "messages[1].reasoning_content",
        "text, got an integer",
    ),
    (_messages(USER, ANSWER, tools={"a": 1}), "wrong_type", "tools", "a list, got an object"),
    (_messages(USER, ANSWER, tools=["a"]), "wrong_type", "tools[0]", "an object, got text"),
    (_messages(USER, ANSWER, chat_template_kwargs=[1]), "wrong_type", "chat_template_kwargs", "an object"),
    (
        _messages(USER, ANSWER, chat_template_kwargs={"tokenize": 1}),
        "invalid_value",
        "chat_template_kwargs",
        "tokenize",
    ),
    (_messages(USER), "no_assistant_turn", "messages", "no assistant message"),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown_role", "conversations[0].from", "'alien'"),
    ({"conversations": [{"from": "human"}]}, "missing_field", "conversations[0].content", "it has from"),
    ({"conversations": [{"from": "human", "value": None}]}, "empty_content", "conversations[0].value", "null"),
    ({"conversations": [{"from": "function_call", "value": "f()"}]}, "invalid_value", "conversations[0]", "not JSON"),
    ({"input_ids": 5}, "wrong_type", "input_ids", "expected a list of integers, got an integer"),
    ({"input_ids": [1, 2.5]}, "wrong_type", "input_ids", "got a number at position 1"),
    ({"input_ids": [1, True]}, "wrong_type", "input_ids", "got a boolean at position 1"),
    ({"input_ids": []}, "no_messages", "input_ids", "at least one token id"),
    ({"input_ids": [1, 100_000]}, "bad_token_id", "input_ids", "token id 100000 at position 1 is outside"),
    ({"input_ids": [-1]}, "bad_token_id", "input_ids", "token id -1"),
    ({"input_ids": [10**30]}, "bad_token_id", "input_ids", "64 bits"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "invalid_value", "loss_mask", "as many entries as input_ids (2), got 1"),
    ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "invalid_value", "loss_mask", "expected 0 or 1, got 2 at 1"),
    ({"input_ids": [1, 2], "loss_mask": "11"}, "wrong_type", "loss_mask", "a list of integers, got text"),
    ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "no_supervised_token", None, "none of its 2 tokens"),
]


@pytest.mark.parametrize(("row", "reason", "field", "text"), BAD)
def test_bad_row_is_one_dropped_and_the_rest_goes_on(tmp_path, row, reason, field, text) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", GOOD, row, GOOD)
    first, dropped, last = read(path)
    assert isinstance(first, Sample)
    assert isinstance(last, Sample)
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, dropped.field, dropped.source.row) == (reason, field, 2)
    assert text in dropped.message
    assert f"{path}, row 2" in dropped.message
    assert dropped.field is None or f"field '{field}'" in dropped.message


def test_a_million_characters_in_a_turn(tmp_path) -> None:
    """Allowed by default, and cut at the length; above chat.max_characters the row is dropped before tokenizing."""
    long = {"messages": [USER, {"role": "assistant", "content": "hello world " * 83_334}]}
    path = write_jsonl(tmp_path / "chats.jsonl", long)
    (sample,) = read(path, max_length=300)
    assert isinstance(sample, Sample)
    assert sample.truncated
    assert len(sample.token_ids) == 300
    (dropped,) = read(path, max_characters=1_000_000)
    assert dropped.reason is DropReason.TOO_MANY_CHARACTERS
    assert f"{path}, row 1, field 'messages': the messages hold 1,000,013 characters" in dropped.message
    assert "chat.max_characters (1,000,000)" in dropped.message


def test_a_million_characters_without_a_space(tmp_path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", {"messages": [USER, {"role": "assistant", "content": "a" * 1_000_000}]})
    (sample,) = read(path, max_length=300)
    assert sample.loss_mask.sum() > 0


def test_answer_behind_the_cut_is_dropped_with_its_place(tmp_path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "hello " * 100}, ANSWER]})
    (dropped,) = read(path, max_length=50)
    assert dropped.reason is DropReason.TRUNCATED_AWAY
    assert "behind the cut at 50 tokens (chat.max_length)" in dropped.message
    assert not dropped.reason.malformed


def test_template_that_fails_on_one_row(tmp_path) -> None:
    bad = {"messages": [USER, USER, ANSWER]}
    path = write_jsonl(tmp_path / "c.jsonl", GOOD, bad)
    good, dropped = read(path, chat_tokenizer(kit.MERGES_SYSTEM))
    assert isinstance(good, Sample)
    assert dropped.message == f"{path}, row 2: the chat template failed: Roles must alternate [template_failed]"


def test_template_that_fails_on_every_row(tmp_path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", GOOD, GOOD)
    with pytest.raises(TemplateError, match="failed on every one of 2 rows") as caught:
        read(path, chat_tokenizer("{{ raise_exception('no such role') }}"))
    assert "no such role" in str(caught.value)
    assert f"{path}, row 1" in str(caught.value)
    assert "chat.template" in str(caught.value)


def test_token_id_above_the_models_vocabulary(tmp_path) -> None:
    from extract_core.chat import read_samples
    from extract_core.settings import ChatSettings, DataSettings

    path = write_jsonl(tmp_path / "c.jsonl", GOOD)
    (dropped,) = read_samples(
        DataSettings(path=str(path)), ChatSettings(), chat_tokenizer(), max_length=99, vocab_size=5
    )
    assert dropped.reason is DropReason.BAD_TOKEN_ID
    assert "the model's vocabulary ends at 4; tokenizer and model do not belong together" in dropped.message


def test_all_rows_malformed_can_be_judged(tmp_path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", b"{", {"messages": 1}, {"messages": [USER]})
    tally = Tally()
    for item in read(path):
        tally.add(item)
    assert (tally.candidates, tally.samples, tally.malformed) == (3, 0, 2)
    with pytest.raises(InputDataError, match="not one of 3 rows can be used") as caught:
        tally.raise_if_unusable()
    assert (caught.value.file, caught.value.row) == (str(path), 1)
    assert "1 not_json, 1 wrong_type, 1 no_assistant_turn" in str(caught.value)


def test_exclusions_by_rule_are_not_malformed() -> None:
    assert {reason.value for reason in DropReason if not reason.malformed} == {
        "no_assistant_turn",
        "no_supervised_token",
        "truncated_away",
    }


def test_equal_content_has_an_equal_id_and_the_mask_counts(tmp_path) -> None:
    ids = [5, 6, 7]
    path = write_jsonl(
        tmp_path / "c.jsonl",
        {"input_ids": ids, "loss_mask": [0, 1, 1]},
        {"input_ids": ids, "loss_mask": [False, True, True]},
        {"input_ids": ids},
    )
    first, second, third = read(path)
    assert first.sample_id == second.sample_id != third.sample_id
    assert first.sample_id == sample_id_of(np.array(ids), np.array([0, 1, 1]))
    assert len(first.sample_id) == 32
    assert (first.mask_method, third.mask_method) == ("given", "all")
    assert first.token_ids.dtype == np.int32
    assert first.loss_mask.dtype == np.uint8


def test_what_is_quoted_from_the_data_is_short_and_can_be_written() -> None:
    quoted = Dropped(Source("a.jsonl", 1), DropReason.INVALID_VALUE, "\ud800\n\x00é" + "x" * 5000 + "end", "f" * 5000)
    assert quoted.detail.startswith(r"\ud800\n\x00éxxx")
    assert quoted.detail.endswith("xend")
    assert " [...] " in quoted.detail
    assert len(quoted.detail) < 1100
    assert len(quoted.field) == 200
    assert quoted.message.encode().decode().isprintable()


def test_tool_calls_of_text_arguments_stay_as_they_are_where_the_template_wants_text(tmp_path) -> None:
    """The escape inside JSON text is plain ASCII: only a template that takes objects meets the surrogate."""
    template = kit.TOOLS.replace("(c.function.arguments | tojson)", "c.function.arguments").replace(
        "+ m.content }", "+ (m.content or '') }"
    )
    call = {"name": "f", "arguments": '{"a": "\\ud800"}'}
    path = write_jsonl(tmp_path / "c.jsonl", _messages(USER, {"role": "assistant", "tool_calls": [call]}))
    (item,) = read(path, chat_tokenizer(template))
    assert isinstance(item, Sample), item


def test_surrogate_from_the_jobs_own_variables_is_named_as_what_it_is(tmp_path) -> None:
    tokenizer = chat_tokenizer("{{ greeting }}" + kit.CHATML, template_kwargs={"greeting": "\ud800"})
    (dropped,) = read(write_jsonl(tmp_path / "c.jsonl", GOOD), tokenizer)
    assert (dropped.reason, dropped.field) == (DropReason.INVALID_UTF8, "messages")
