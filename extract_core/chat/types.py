"""The values that the chat layer hands to planning: one ``Sample`` or one ``Dropped`` per input candidate."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import xxhash

from extract_core.errors import InputDataError, TemplateError


class DropReason(StrEnum):
    """Why a candidate is not published. ``malformed`` ones are faults of the data, the others follow from a rule."""

    INVALID_UTF8 = "invalid_utf8"
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    INVALID_VALUE = "invalid_value"
    UNKNOWN_ROLE = "unknown_role"
    EMPTY_CONTENT = "empty_content"
    NO_MESSAGES = "no_messages"
    UNSUPPORTED_CONTENT = "unsupported_content"
    TOO_MANY_CHARACTERS = "too_many_characters"
    BAD_TOKEN_ID = "bad_token_id"
    TEMPLATE_FAILED = "template_failed"
    TOKENIZER_FAILED = "tokenizer_failed"
    LOST_BY_TEMPLATE = "lost_by_template"
    MASK_FAILED = "mask_failed"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    NO_SUPERVISED_TOKEN = "no_supervised_token"
    TRUNCATED_AWAY = "truncated_away"

    @property
    def malformed(self) -> bool:
        """True where the row itself (or the template on it) is at fault; False for an exclusion by rule."""
        return self not in _BY_RULE


_BY_RULE = frozenset({DropReason.NO_ASSISTANT_TURN, DropReason.NO_SUPERVISED_TOKEN, DropReason.TRUNCATED_AWAY})


_LONGEST_DETAIL, _LONGEST_FIELD, _LEFT_OUT = 1000, 200, " [...] "


def printable(text: str, longest: int) -> str:
    """Text for one line of a log or a file: what cannot be printed or encoded is escaped, too much is left out."""
    if len(text) > longest:
        head, tail = longest * 2 // 3, longest - longest * 2 // 3 - len(_LEFT_OUT)
        text = f"{text[:head]}{_LEFT_OUT}{text[-tail:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a sample comes from.

    Attributes:
        file: path or URL as the job names it.
        row: 1-based line number (JSONL; blank lines are counted) or 1-based row (Parquet, Hugging Face, JSON array).
        turn: index of the supervised turn, 0-based among the assistant turns; None for whole conversations.
    """

    file: str
    row: int
    turn: int | None = None

    def __str__(self) -> str:
        turn = "" if self.turn is None else f", assistant turn {self.turn}"
        return f"{self.file}, row {self.row}{turn}"


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One training row before its hidden states exist.

    Attributes:
        sample_id: 32 hex digits of ``sample_id_of(token_ids, loss_mask)``: equal content, equal id.
        token_ids: int32 ``[N]``.
        loss_mask: uint8 ``[N]``, 1 = supervised. Unshifted: it marks the tokens themselves, not the positions that
            predict them; a trainer that shifts targets left shifts the mask with them.
        mask_method: ``generation``, ``prefix``, ``markers``; ``given`` or ``all`` for rows that came tokenized.
        truncated: tokens after ``max_length`` were cut off.
    """

    sample_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    source: Source
    split: str
    mask_method: str
    truncated: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """An input candidate that is not published, and why; what it quotes from the data is made ``printable``."""

    source: Source
    reason: DropReason
    detail: str
    field: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", printable(self.detail, _LONGEST_DETAIL))
        if self.field is not None:
            object.__setattr__(self, "field", printable(self.field, _LONGEST_FIELD))

    @property
    def message(self) -> str:
        """One line for people: file, row, turn, field, what was expected and what came."""
        where = str(self.source) if self.field is None else f"{self.source}, field '{self.field}'"
        return f"{where}: {self.detail} [{self.reason.value}]"


@dataclass(slots=True)
class Conversation:
    """A normalised conversation: what is handed to the chat template.

    ``messages`` have ``role`` (system, developer, user, assistant, tool) and ``content``; an assistant message may
    have ``tool_calls`` and ``reasoning_content``. ``characters`` counts all their text.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    characters: int = 0


@dataclass(slots=True)
class Tokenized:
    """A row that came as token ids."""

    token_ids: np.ndarray
    loss_mask: np.ndarray | None


class RowProblem(Exception):
    """A row (or a candidate of it) cannot become a sample; turned into a ``Dropped`` by the reader."""

    def __init__(self, reason: DropReason, detail: str, field: str | None = None) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.field = reason, detail, field


@dataclass(slots=True)
class Tally:
    """Counts what ``read_samples`` yields, for the accounting and for judging an input as a whole."""

    samples: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    first: Dropped | None = None

    def add(self, item: Sample | Dropped) -> None:
        """Count one item."""
        if isinstance(item, Sample):
            self.samples += 1
            self.methods[item.mask_method] += 1
            return
        self.dropped[item.reason] += 1
        if self.first is None:
            self.first = item

    @property
    def candidates(self) -> int:
        """Everything that was read: samples and dropped together."""
        return self.samples + sum(self.dropped.values())

    @property
    def malformed(self) -> int:
        """How many were dropped through a fault of the data or of the template on it."""
        return sum(count for reason, count in self.dropped.items() if reason.malformed)

    def raise_if_unusable(self) -> None:
        """Raise when nothing at all can be published.

        Raises:
            TemplateError: the chat template failed on every row.
            InputDataError: no row was usable; names the first one and the counts by reason.
        """
        if self.samples or self.first is None:
            return
        counts = ", ".join(f"{count} {reason.value}" for reason, count in self.dropped.most_common())
        if set(self.dropped) == {DropReason.TEMPLATE_FAILED}:
            raise TemplateError(
                f"the chat template failed on every one of {self.candidates} rows; the first: {self.first.message}. "
                "Correct the template (chat.template), its variables (chat.template_kwargs) or the roles in the data"
            )
        raise InputDataError(
            f"not one of {self.candidates} rows can be used ({counts}); the first: {self.first.detail}",
            file=self.first.source.file,
            row=self.first.source.row,
            field=self.first.field,
        )


def sample_id_of(token_ids: np.ndarray, loss_mask: np.ndarray) -> str:
    """32 hex digits: xxh3_128 over the token ids (int32, little endian) followed by the loss mask (uint8)."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return digest.hexdigest()
