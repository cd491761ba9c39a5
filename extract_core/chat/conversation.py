"""From a raw row to a ``Conversation`` or to given token ids.

Shapes (the first field that is present and not null decides): ``input_ids`` (with optional ``loss_mask``),
``messages`` (OpenAI), ``conversations`` (ShareGPT). Both kinds of messages may be in either list: ``role``/``content``
and ``from``/``value`` mean the same.

Roles: ``human`` is user; ``gpt``, ``chatgpt``, ``bing``, ``bard``, ``model`` and ``bot`` are assistant (all of them
name a model's answers in public ShareGPT exports); ``function``, ``observation``, ``function_response`` and ``ipython``
are tool; ``function_call`` is an assistant message whose text is the JSON of its call. Anything else is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from extract_core.chat.jsontext import TooDeepError, parse_json
from extract_core.chat.types import Conversation, DropReason, RowProblem, Tokenized

COLUMNS = ("input_ids", "loss_mask", "messages", "conversations", "tools", "chat_template_kwargs", "system")
SHAPES = ("input_ids", "messages", "conversations")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
RESERVED_KWARGS = frozenset(
    {
        "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "padding",
        "continue_final_message", "tokenize", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now",
    }
)  # fmt: skip


def parse_row(row: Mapping[str, Any], *, vocab_size: int, max_characters: int) -> Conversation | Tokenized:
    """One row of the input, checked and normalised.

    Args:
        row: the decoded row.
        vocab_size: ids must be below it.
        max_characters: longest text of all messages together.

    Raises:
        RowProblem: says what is wrong in which field.
    """
    shape = next((name for name in SHAPES if row.get(name) is not None), None)
    if shape is None:
        came = ", ".join(sorted(map(str, row))[:8]) or "no field at all"
        raise RowProblem(
            DropReason.MISSING_FIELD, f"expected one of the fields {', '.join(SHAPES)}; the row has {came}", "messages"
        )
    if shape == "input_ids":
        return _tokenized(row, vocab_size)
    conversation = _conversation(row, shape)
    if conversation.characters > max_characters:
        raise RowProblem(
            DropReason.TOO_MANY_CHARACTERS,
            f"the messages hold {conversation.characters:,} characters, more than chat.max_characters "
            f"({max_characters:,}); split the row or raise the limit",
            shape,
        )
    return conversation


def _tokenized(row: Mapping[str, Any], vocab_size: int) -> Tokenized:
    ids = _integers(row["input_ids"], "input_ids")
    if ids.size == 0:
        raise RowProblem(DropReason.NO_MESSAGES, "expected at least one token id, got an empty list", "input_ids")
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        at = int(wrong[0])
        raise RowProblem(
            DropReason.BAD_TOKEN_ID,
            f"token id {int(ids[at])} at position {at} is outside the model's vocabulary 0..{vocab_size - 1}; "
            "the row was tokenized for another model",
            "input_ids",
        )
    given = row.get("loss_mask")
    if given is None:
        return Tokenized(ids.astype(np.int32), None)
    mask = _integers(given, "loss_mask", allow_bool=True)
    if mask.size != ids.size:
        raise RowProblem(
            DropReason.INVALID_VALUE,
            f"expected as many entries as input_ids ({ids.size}), got {mask.size}",
            "loss_mask",
        )
    if not np.isin(mask, (0, 1)).all():
        at = int(np.flatnonzero(~np.isin(mask, (0, 1)))[0])
        raise RowProblem(DropReason.INVALID_VALUE, f"expected 0 or 1, got {int(mask[at])} at {at}", "loss_mask")
    return Tokenized(ids.astype(np.int32), mask.astype(np.uint8))


def _integers(value: Any, name: str, *, allow_bool: bool = False) -> np.ndarray:
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise RowProblem(DropReason.WRONG_TYPE, f"expected a list of integers, got {_kind(value)}", name)
    for at, item in enumerate(value):
        if not isinstance(item, (int, np.integer)) or (isinstance(item, bool) and not allow_bool):
            raise RowProblem(
                DropReason.WRONG_TYPE, f"expected a list of integers, got {_kind(item)} at position {at}", name
            )
    try:
        return np.asarray(value, dtype=np.int64).reshape(-1)
    except OverflowError:
        raise RowProblem(DropReason.BAD_TOKEN_ID, "an integer does not fit into 64 bits", name) from None


def _conversation(row: Mapping[str, Any], shape: str) -> Conversation:
    raw = _json_list(row[shape], shape)
    if not raw:
        raise RowProblem(DropReason.NO_MESSAGES, "expected at least one message, got an empty list", shape)
    messages = [_message(item, f"{shape}[{i}]") for i, item in enumerate(raw)]
    system = row.get("system")
    if shape == "conversations" and isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = row.get("tools")
    conversation = Conversation(messages)
    if tools is not None and tools != "":
        conversation.tools = _json_list(tools, "tools") or None
        for i, tool in enumerate(conversation.tools or []):
            if not isinstance(tool, Mapping):
                raise RowProblem(DropReason.WRONG_TYPE, f"expected an object, got {_kind(tool)}", f"tools[{i}]")
            refuse_surrogates(tool, f"tools[{i}]")
    kwargs = row.get("chat_template_kwargs")
    if kwargs is not None and kwargs != "":
        conversation.template_kwargs = _template_kwargs(kwargs)
    conversation.characters = sum(_characters(message) for message in messages)
    return conversation


def _template_kwargs(value: Any) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if isinstance(value, str):
        value = _from_json(value, name)
    if not isinstance(value, Mapping):
        raise RowProblem(DropReason.WRONG_TYPE, f"expected an object, got {_kind(value)}", name)
    reserved = sorted(RESERVED_KWARGS & set(value))
    if reserved:
        raise RowProblem(DropReason.INVALID_VALUE, f"{', '.join(reserved)} cannot be set by a row", name)
    refuse_surrogates(value, name)
    return {str(key): item for key, item in value.items() if item is not None}


def _message(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise RowProblem(DropReason.WRONG_TYPE, f"expected an object, got {_kind(raw)}", where)
    role_field = "role" if raw.get("role") is not None else "from"
    given = raw.get(role_field)
    if given is None:
        raise RowProblem(DropReason.MISSING_FIELD, f"expected a role; the message has {_names(raw)}", f"{where}.role")
    if not isinstance(given, str):
        raise RowProblem(DropReason.WRONG_TYPE, f"expected text, got {_kind(given)}", f"{where}.{role_field}")
    role = ROLES.get(given.strip().lower())
    if role is None:
        raise RowProblem(
            DropReason.UNKNOWN_ROLE,
            f"unknown role {given[:80]!r}; known are {', '.join(sorted(ROLES))}",
            f"{where}.{role_field}",
        )
    content_field = "content" if "content" in raw or "value" not in raw else "value"
    reasoning = next((raw[name] for name in REASONING_FIELDS if raw.get(name) is not None), None)
    if reasoning is not None and not isinstance(reasoning, str):
        raise RowProblem(DropReason.WRONG_TYPE, f"expected text, got {_kind(reasoning)}", f"{where}.reasoning_content")
    calls = _tool_calls(raw, where) if role == "assistant" else None
    content, thought = _content(raw.get(content_field), f"{where}.{content_field}")
    if given.strip().lower() == "function_call":
        calls, content = [_tool_call(_from_json(content or "", where), f"{where}.{content_field}", 0)], None
    elif content_field not in raw and calls is None:
        raise RowProblem(
            DropReason.MISSING_FIELD, f"expected the text of the message; it has {_names(raw)}", f"{where}.content"
        )
    elif content is None and calls is None:
        raise RowProblem(
            DropReason.EMPTY_CONTENT,
            f"the content of a {role} message is null, which is allowed only beside tool_calls",
            f"{where}.{content_field}",
        )
    message: dict[str, Any] = {"role": role, "content": content}
    if calls is not None:
        message["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if raw.get(name) is not None:
            message[name] = _text(raw[name], f"{where}.{name}")
    reasoning = reasoning or thought
    if reasoning and role == "assistant":
        message["reasoning_content"] = _text(reasoning, f"{where}.reasoning_content")
    return message


def _content(value: Any, where: str) -> tuple[str | None, str | None]:
    """The text of a message and the reasoning found among its parts; text parts are joined by a newline."""
    if value is None:
        return None, None
    if isinstance(value, str):
        return _text(value, where), None
    if not isinstance(value, (list, tuple)):
        raise RowProblem(DropReason.WRONG_TYPE, f"expected text or a list of parts, got {_kind(value)}", where)
    texts: list[str] = []
    thoughts: list[str] = []
    for i, part in enumerate(value):
        if isinstance(part, str):
            texts.append(_text(part, f"{where}[{i}]"))
            continue
        if not isinstance(part, Mapping):
            raise RowProblem(DropReason.WRONG_TYPE, f"expected a part, got {_kind(part)}", f"{where}[{i}]")
        kind = part.get("type", "text")
        if kind in ("text", "input_text", "output_text"):
            texts.append(_text(part.get("text"), f"{where}[{i}].text"))
        elif kind in ("thinking", "reasoning"):
            thoughts.append(_text(part.get(kind, part.get("text")), f"{where}[{i}].{kind}"))
        else:
            raise RowProblem(
                DropReason.UNSUPPORTED_CONTENT,
                f"only text parts can be used, got a part of type {str(kind)[:40]!r}",
                f"{where}[{i}].type",
            )
    return "\n".join(texts), "\n".join(thoughts) or None


def _tool_calls(raw: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    calls = raw.get("tool_calls")
    if not calls:
        legacy = raw.get("function_call")
        return None if legacy is None else [_tool_call(legacy, f"{where}.function_call", 0)]
    if not isinstance(calls, (list, tuple)):
        raise RowProblem(DropReason.WRONG_TYPE, f"expected a list, got {_kind(calls)}", f"{where}.tool_calls")
    return [_tool_call(call, f"{where}.tool_calls[{i}]", i) for i, call in enumerate(calls)]


def _tool_call(raw: Any, where: str, index: int) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise RowProblem(DropReason.WRONG_TYPE, f"expected an object, got {_kind(raw)}", where)
    function = raw.get("function") if isinstance(raw.get("function"), Mapping) else raw
    assert isinstance(function, Mapping)
    if not isinstance(function.get("name"), str):
        raise RowProblem(
            DropReason.MISSING_FIELD, f"expected the name of the function; the call has {_names(function)}", where
        )
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, (str, Mapping)):
        raise RowProblem(
            DropReason.WRONG_TYPE, f"expected an object or its JSON, got {_kind(arguments)}", f"{where}.arguments"
        )
    call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    call["id"] = raw["id"] if isinstance(raw.get("id"), str) else f"call_{index}"
    refuse_surrogates({"id": call["id"], **call["function"]}, where)
    return call


def _json_list(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):
        value = _from_json(value, name)
    if not isinstance(value, (list, tuple)):
        raise RowProblem(DropReason.WRONG_TYPE, f"expected a list, got {_kind(value)}", name)
    return list(value)


def _from_json(text: str, name: str) -> Any:
    try:
        return parse_json(text)
    except TooDeepError as error:
        raise RowProblem(DropReason.INVALID_VALUE, f"the JSON is {error}", name) from None
    except ValueError:
        raise RowProblem(DropReason.INVALID_VALUE, f"the text is not JSON: {text[:60]!r}", name) from None


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RowProblem(DropReason.WRONG_TYPE, f"expected text, got {_kind(value)}", where)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowProblem(
            DropReason.INVALID_UTF8, f"a lone surrogate at character {error.start} is not Unicode text", where
        ) from None
    return value


def refuse_surrogates(value: Any, where: str) -> None:
    """Check every text and key inside a decoded JSON value.

    Raises:
        RowProblem: ``invalid_utf8``, with the place of the first lone surrogate.
    """
    if isinstance(value, str):
        _text(value, where)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _text(str(key), f"{where}.{key}")
            refuse_surrogates(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            refuse_surrogates(item, f"{where}[{i}]")


def _characters(message: Mapping[str, Any]) -> int:
    total = len(message["content"] or "") + len(message.get("reasoning_content", ""))
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        total += len(arguments) if isinstance(arguments, str) else len(json.dumps(arguments, default=str))
    return total


def _names(raw: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, raw))[:8]) or "no field at all"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", int: "an integer", float: "a number", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), type(value).__name__)
