"""Loss masks: which tokens of a rendered conversation the assistant generated.

The conversation is rendered once and tokenized once. Every method finds *character* spans in that text, and one rule
turns spans into tokens: **a token is supervised if and only if its first character lies inside a span.** So a token
that straddles the end of the assistant header (its newline merged with the newline that begins the answer) is not
supervised, since no prompt could have ended there; a token that straddles the end of the span is. Nothing is decoded
and encoded again.

A span runs from the end of the generation prompt to the end of the turn's end-of-turn token. Separators after that
token (the newline behind ``<|im_end|>``) are never supervised. Where a template has no end-of-turn token the span ends
with the last character that is not white space.

Methods, in the order in which ``auto`` tries them, per row:

``generation``
    The template marks generated text itself by ``{% generation %}``; its own spans are taken.
``prefix``
    For assistant turn ``i`` the renderings of ``messages[:i]`` with the generation prompt and of ``messages[:i+1]``
    must be true prefixes of the full text; the span is the difference. Verified for every turn of every row: templates
    that render an earlier turn differently from the last one (they strip reasoning, or end it with another token) fail
    here and fall through.
``markers``
    The row is rendered once more with every text replaced by a sentinel. Between the sentinels is exactly what the
    template itself writes: role headers and end-of-turn tokens. These pieces and the messages' own texts must then
    rebuild the full text to the last character. A marker quoted inside a message cannot be mistaken for one, because
    it is inside a text, not inside a piece. Where the pieces do not fit in one way only, the row fails.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from extract_core.chat.tokenizer import ChatTokenizer, TemplateProfile
from extract_core.chat.types import Conversation, DropReason, RowProblem

Span = tuple[int, int]
METHODS = ("generation", "prefix", "markers")
_THINK_END = "</think>"


class Inapplicable(Exception):
    """A method cannot decide this row; its text says why."""


@dataclass(frozen=True, slots=True)
class Masked:
    """A rendered, tokenized and masked conversation.

    Attributes:
        text: the rendering.
        token_ids: int32 ``[N]``.
        loss_mask: uint8 ``[N]``, unshifted.
        method: how the mask was made.
        spans: supervised characters of ``text``, ascending, one per assistant turn (``generation``: one per block).
    """

    text: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    method: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """The masks of every method on one conversation.

    Attributes:
        token_ids: int32 ``[N]``.
        masks: method -> uint8 ``[N]``, for the methods that apply.
        refused: method -> why it does not apply.
        same_tokens: the ids equal those of ``apply_chat_template(tokenize=True)``.
    """

    token_ids: np.ndarray
    masks: dict[str, np.ndarray]
    refused: dict[str, str]
    same_tokens: bool

    @property
    def agree(self) -> bool:
        """The tokens are the template's own, and at least one method applies and all that do give one mask."""
        masks = list(self.masks.values())
        return self.same_tokens and bool(masks) and all(np.array_equal(masks[0], mask) for mask in masks[1:])


def mask_conversation(
    tokenizer: ChatTokenizer, conversation: Conversation, *, turn: int | None = None, method: str | None = None
) -> Masked:
    """Render, tokenize and mask a conversation.

    Args:
        tokenizer: the tokenizer with its template.
        conversation: as ``parse_row`` gives it; in turn mode already cut after the supervised turn.
        turn: supervise only this assistant turn (0-based among assistant turns), which must be the last message.
        method: one of ``METHODS`` or ``auto``; default: the job's ``chat.mask``.

    Raises:
        RowProblem: ``template_failed``, ``tokenizer_failed``, ``mask_failed`` or ``no_assistant_turn``.
        TemplateError: the tokenizer has no template.
    """
    adapted, profile = tokenizer.prepare(conversation)
    turns = assistant_turns(adapted)
    if not turns:
        raise RowProblem(DropReason.NO_ASSISTANT_TURN, "the conversation has no assistant message", "messages")
    wanted = turns if turn is None else [turns[turn]]
    text = tokenizer.render(adapted)
    _refuse_lost_calls(adapted, profile, text)
    method = method or tokenizer.mask_setting
    refused: list[str] = []
    for name in METHODS if method == "auto" else (method,):
        if name == "generation" and method == "auto" and not profile.generation:
            continue
        try:
            spans = _SPANS[name](tokenizer, adapted, profile, text, wanted)
        except Inapplicable as reason:
            refused.append(f"{name}: {reason}")
            continue
        ids, starts = tokenizer.encode(text)
        mask = _token_mask(tokenizer, text, ids, starts, spans)
        _note_losses(tokenizer, adapted, text)
        return Masked(text, ids, mask, name, tuple(spans))
    raise RowProblem(
        DropReason.MASK_FAILED,
        f"no loss mask can be made that is certain ({'; '.join(refused)}); a template with {{% generation %}} tags "
        "(chat.template) always can",
        "messages",
    )


def cross_check(tokenizer: ChatTokenizer, conversation: Conversation) -> CrossCheck:
    """Apply every mask method to one conversation and compare, and compare the token ids with the template's own.

    Raises:
        RowProblem: the conversation cannot be rendered or has no assistant turn.
        TemplateError: the tokenizer has no template.
    """
    masks: dict[str, np.ndarray] = {}
    refused: dict[str, str] = {}
    adapted, profile = tokenizer.prepare(conversation)
    turns = assistant_turns(adapted)
    if not turns:
        raise RowProblem(DropReason.NO_ASSISTANT_TURN, "the conversation has no assistant message", "messages")
    text = tokenizer.render(adapted)
    ids, starts = tokenizer.encode(text)
    for name in METHODS:
        try:
            masks[name] = _token_mask(
                tokenizer, text, ids, starts, _SPANS[name](tokenizer, adapted, profile, text, turns)
            )
        except Inapplicable as reason:
            refused[name] = str(reason)
    return CrossCheck(ids, masks, refused, np.array_equal(ids, tokenizer.template_ids(adapted)))


def assistant_turns(conversation: Conversation) -> list[int]:
    """Positions of the assistant messages."""
    return [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def _token_mask(
    tokenizer: ChatTokenizer, text: str, ids: np.ndarray, starts: np.ndarray | None, spans: Sequence[Span]
) -> np.ndarray:
    mask = np.zeros(len(ids), dtype=np.uint8)
    for begin, end in spans:
        if starts is not None:
            mask[(starts >= begin) & (starts < end)] = 1
        else:
            mask[_index_by_prefix(tokenizer, text, ids, begin) : _index_by_prefix(tokenizer, text, ids, end)] = 1
    return mask


def _index_by_prefix(tokenizer: ChatTokenizer, text: str, ids: np.ndarray, at: int) -> int:
    """Tokens in front of a character, for tokenizers without offsets: the text up to there must give the same ids."""
    before, _ = tokenizer.encode(text[:at])
    if len(before) > len(ids) or not np.array_equal(before, ids[: len(before)]):
        raise RowProblem(
            DropReason.MASK_FAILED, f"the tokenizer gives no offsets and a token straddles character {at}", "messages"
        )
    return len(before)


def _generation_spans(
    tokenizer: ChatTokenizer, conversation: Conversation, profile: TemplateProfile, text: str, wanted: list[int]
) -> list[Span]:
    if not profile.generation:
        raise Inapplicable("the template has no {% generation %} tags")
    again, spans = tokenizer.render_generation(conversation)
    if again != text:
        raise Inapplicable("the template gives another text each time")
    if not spans:
        raise Inapplicable("no {% generation %} block was reached")
    if wanted == assistant_turns(conversation):
        return spans
    history = _render_or_refuse(tokenizer, conversation, conversation.messages[: wanted[0]])
    if not text.startswith(history):
        raise Inapplicable("the history is rendered differently with the last turn behind it")
    return [span for span in spans if span[0] >= len(history)]


def _prefix_spans(
    tokenizer: ChatTokenizer, conversation: Conversation, profile: TemplateProfile, text: str, wanted: list[int]
) -> list[Span]:
    if profile.header and not profile.prompt:
        raise Inapplicable("the template ignores add_generation_prompt")
    spans: list[Span] = []
    messages = conversation.messages
    for i in wanted:
        if i == 0:
            raise Inapplicable("the conversation begins with the assistant")
        before = _render_or_refuse(tokenizer, conversation, messages[:i], prompt=True)
        if not text.startswith(before):
            raise Inapplicable(f"the prompt of message {i} is not a prefix of the whole rendering")
        after = text if i == len(messages) - 1 else _render_or_refuse(tokenizer, conversation, messages[: i + 1])
        if not text.startswith(after) or len(after) < len(before):
            raise Inapplicable(f"the conversation up to message {i} is not a prefix of the whole rendering")
        spans.append((len(before), len(before) + _turn_length(tokenizer, after[len(before) :], profile, i)))
    return spans


def _turn_length(tokenizer: ChatTokenizer, turn: str, profile: TemplateProfile, index: int) -> int:
    """Characters of a rendered turn up to and including its end-of-turn token."""
    end = max((turn.rfind(mark) + len(mark) for mark in profile.ends if mark in turn), default=-1)
    if end < 0:
        specials = tokenizer.special_tokens if profile.ends else ()
        end = max((turn.rfind(token) + len(token) for token in specials if token in turn), default=-1)
    if end < 0:
        end = len(turn.rstrip())
    if turn[end:].strip():
        raise Inapplicable(f"message {index} is followed by more than white space behind its end-of-turn token")
    return end


def _render_or_refuse(
    tokenizer: ChatTokenizer, conversation: Conversation, messages: list[dict[str, Any]], *, prompt: bool = False
) -> str:
    try:
        return tokenizer.render(conversation, messages, prompt=prompt)
    except RowProblem as problem:
        raise Inapplicable(f"a part of the conversation cannot be rendered alone: {problem.detail}") from problem


@dataclass(frozen=True, slots=True)
class _Piece:
    """What the template writes between two texts, and the message whose text follows it (None behind the last)."""

    text: str
    message: int | None


def _marker_spans(
    tokenizer: ChatTokenizer, conversation: Conversation, profile: TemplateProfile, text: str, wanted: list[int]
) -> list[Span]:
    pieces, tails = _skeleton(tokenizer, conversation)
    places = _fit(text, pieces, tails)
    spans: list[Span] = []
    for i in wanted:
        known = next((k for k, piece in enumerate(pieces) if piece.message == i), None)
        if known is not None:
            begin = places[known][0] - len(pieces[known].text) + _header_end(pieces[known].text, profile, i)
            behind, at = pieces[known + 1].text, places[known][1]
            calls = bool(conversation.messages[i].get("tool_calls"))
            spans.append((begin, _end_in(behind, at, begin, text, profile, i, ambiguous=calls)))
            continue
        # A turn without text of its own (null or empty content beside tool calls) lies inside one piece.
        k = next((k for k, piece in enumerate(pieces) if piece.message is None or piece.message > i), len(pieces) - 1)
        stop = pieces[k].message
        inside = range(_after_message(pieces, k), len(conversation.messages) if stop is None else stop)
        if [m for m in inside if conversation.messages[m]["role"] == "assistant"] != [i] or not profile.header:
            raise Inapplicable(f"message {i} has no text and cannot be told from its neighbours")
        piece = pieces[k].text
        if piece.count(profile.header) != 1:
            raise Inapplicable(f"the header of message {i} occurs {piece.count(profile.header)} times")
        offset = piece.index(profile.header) + len(profile.header)
        base = places[k][0] - len(piece)
        spans.append(
            (base + offset, _end_in(piece[offset:], base + offset, base + offset, text, profile, i, ambiguous=True))
        )
    return spans


def _after_message(pieces: list[_Piece], k: int) -> int:
    """Index of the first message behind the one whose text precedes piece ``k``."""
    previous = pieces[k - 1].message if k else None
    return 0 if previous is None else previous + 1


def _skeleton(tokenizer: ChatTokenizer, conversation: Conversation) -> tuple[list[_Piece], dict[int, str]]:
    """Render with sentinels in place of the texts; returns the template's own pieces and the texts replaced."""
    stem = "qz"
    whole = json.dumps(conversation.messages, default=str)
    while stem in whole:
        stem += "xq"
    messages, tails, marks = [], {}, {}
    for i, message in enumerate(conversation.messages):
        content = message["content"]
        if content is None or (content == "" and message.get("tool_calls")):
            messages.append(message)
            continue
        head = ""
        if message["role"] == "assistant" and _THINK_END in content:
            # Templates treat the text in front of this tag differently: it stays, what follows is replaced.
            at = content.rindex(_THINK_END) + len(_THINK_END)
            head, content = content[:at], content[at:]
        marks[i], tails[i] = f"{stem}{i}zq", content
        messages.append({**message, "content": head + marks[i]})
    text = _render_or_refuse(tokenizer, conversation, messages)
    pieces, at = [], 0
    for i, mark in marks.items():
        found = text.find(mark)
        if found < 0:
            del tails[i]  # the template leaves this message out
            continue
        if found < at or text.count(mark) != 1:
            raise Inapplicable(f"the text of message {i} is rendered more than once or out of order")
        pieces.append(_Piece(text[at:found], i))
        at = found + len(mark)
    pieces.append(_Piece(text[at:], None))
    return pieces, tails


def _variants(text: str) -> list[str]:
    """A message's text as templates write it: as it is, trimmed, or as the inside of a JSON string."""
    forms = [text, text.strip(), text.strip("\n"), text.lstrip("\n"), text.rstrip("\n"), text.lstrip(), text.rstrip()]
    forms += [json.dumps(form, ensure_ascii=False)[1:-1] for form in (text, text.strip())]
    return list(dict.fromkeys(forms))


def _fit(text: str, pieces: list[_Piece], tails: dict[int, str]) -> list[Span]:
    """Place every piece and text so that together they are exactly the rendering.

    Returns:
        For piece ``k`` the span of the text that follows it (empty, at the end, for the last).
    """
    if not text.startswith(pieces[0].text):
        raise Inapplicable("the template writes something else around these texts")
    at, places = len(pieces[0].text), []
    for k, piece in enumerate(pieces):
        if piece.message is None:
            if at != len(text):
                raise Inapplicable("the rendering goes on behind the last piece")
            places.append((at, at))
            break
        following = pieces[k + 1]
        last = following.message is None
        for form in _variants(tails[piece.message]):
            end = at + len(form)
            if not (text.startswith(form, at) and text.startswith(following.text, end)):
                continue
            if last and end + len(following.text) != len(text):
                continue
            break
        else:
            end = _search(text, at, following, tails)
        places.append((at, end))
        at = end + len(following.text)
    return places


def _search(text: str, at: int, following: _Piece, tails: dict[int, str]) -> int:
    """Where a text ends that the template changed in a way unknown here: only if one place is possible."""
    if following.message is None:
        end = len(text) - len(following.text)
        if end < at or not text.endswith(following.text):
            raise Inapplicable("the end of the last text cannot be found")
        return end
    forms = _variants(tails[following.message])
    found = [
        place for place in _occurrences(text, following.text, at)
        if any(text.startswith(form, place + len(following.text)) for form in forms)
    ] if following.text else []  # fmt: skip
    if len(found) != 1:
        raise Inapplicable(f"the text in front of message {following.message} can end in {len(found)} places")
    return found[0]


def _occurrences(text: str, part: str, at: int) -> list[int]:
    places: list[int] = []
    while (at := text.find(part, at)) >= 0:
        places.append(at)
        at += 1
    return places


def _header_end(piece: str, profile: TemplateProfile, index: int) -> int:
    """Where in the piece in front of an assistant text the generated part begins."""
    if profile.header and profile.header in piece:
        expected = profile.user_end if piece.startswith(profile.user_end + profile.header) else None
        if expected is not None:
            at = len(expected)
        elif piece.count(profile.header) == 1:
            at = piece.index(profile.header)
        else:
            raise Inapplicable(f"the header of message {index} occurs {piece.count(profile.header)} times")
        rest, shared = piece[at:], 0
        while shared < min(len(rest), len(profile.prompt)) and rest[shared] == profile.prompt[shared]:
            shared += 1
        return at + max(shared, len(profile.header))
    if profile.user_end and piece.startswith(profile.user_end):
        return len(profile.user_end)
    return len(piece)


def _end_in(
    behind: str, at: int, begin: int, text: str, profile: TemplateProfile, index: int, *, ambiguous: bool
) -> int:
    """Where a turn ends whose text stops at ``at`` and is followed by the piece ``behind``."""
    found = [(behind.find(mark), mark) for mark in profile.ends if mark in behind]
    if found:
        place, mark = min(found, key=lambda item: (item[0], -len(item[1])))
        if ambiguous and sum(behind.count(other) for other in profile.ends) > 1:
            raise Inapplicable(f"message {index} has several end-of-turn tokens behind its text")
        return at + place + len(mark)
    if profile.ends and behind.strip():
        raise Inapplicable(f"message {index} has no end-of-turn token")
    if ambiguous and behind.strip():
        raise Inapplicable(f"the end of message {index} cannot be told without an end-of-turn token")
    return begin + len(text[begin:at].rstrip())


def _refuse_lost_calls(conversation: Conversation, profile: TemplateProfile, text: str) -> None:
    """A template without tool calls renders them as an empty answer, which nobody wants to train on."""
    for i, message in enumerate(conversation.messages):
        for call in message.get("tool_calls", ()):
            if not profile.tool_calls or call["function"]["name"] not in text:
                raise RowProblem(
                    DropReason.LOST_BY_TEMPLATE,
                    f"the chat template does not render tool calls (here of {call['function']['name'][:60]!r}); use a "
                    "template that does (chat.template)",
                    f"messages[{i}].tool_calls",
                )


def _note_losses(tokenizer: ChatTokenizer, conversation: Conversation, text: str) -> None:
    """Count what the template left out of the rendering: its right, but a user should know."""
    for message in conversation.messages:
        reasoning = next((message[k] for k in ("reasoning_content", "reasoning", "thinking") if message.get(k)), None)
        if reasoning and reasoning.strip() not in text:
            tokenizer.notes["reasoning of an assistant turn was left out by the chat template"] += 1
        content = message["content"]
        if not content or message["role"] == "tool":
            continue
        if message["role"] == "assistant" and _THINK_END in content:
            thought, _, content = content.rpartition(_THINK_END)
            if thought.removeprefix("<think>").strip() not in text:
                tokenizer.notes["reasoning of an assistant turn was left out by the chat template"] += 1
        if content.strip() not in text:
            tokenizer.notes[
                f"the text of a {message['role']} message was left out or changed by the chat template"
            ] += 1


_SPANS = {"generation": _generation_spans, "prefix": _prefix_spans, "markers": _marker_spans}
