"""Read the input of a job as a stream of ``Sample`` and ``Dropped``, exactly one for every candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from extract_core.chat.conversation import parse_row
from extract_core.chat.inputs import InputFile, input_files
from extract_core.chat.mask import assistant_turns, mask_conversation
from extract_core.chat.tokenizer import ChatTokenizer
from extract_core.chat.types import (
    Conversation,
    Dropped,
    DropReason,
    RowProblem,
    Sample,
    Source,
    Tally,
    Tokenized,
    sample_id_of,
)
from extract_core.errors import InputDataError, TemplateOverrunError
from extract_core.settings import ChatSettings, DataSettings


def read_samples(
    data: DataSettings,
    chat: ChatSettings,
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    vocab_size: int,
    files: Sequence[InputFile] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Iterator[Sample | Dropped]:
    """Stream the input as samples, in the order of the files and rows.

    With ``chat.samples == "turn"`` a conversation gives one candidate per assistant turn, rendered with its history
    exactly as the model would have seen it, only that turn supervised. A row that cannot be read gives one ``Dropped``.
    Duplicates are not merged here.

    Args:
        data: where the rows are.
        chat: how they become samples.
        tokenizer: from ``load_chat_tokenizer`` with the same ``chat``.
        max_length: samples are cut on the right to this many tokens.
        vocab_size: rows of the model's embedding; a token id at or above it drops the candidate.
        files: what ``input_files`` gave before, so that exactly those are read; default: look again.
        on_progress: called with the number of rows read so far, after each row.

    Raises:
        InputDataError: the input as a whole cannot be used: nothing there, unreadable, or no row at all.
        TemplateError: the tokenizer has no chat template and a row needs one, or the template failed on every row, or
            (``TemplateOverrunError``) does not end on one.
    """
    files = input_files(data) if files is None else files
    tally = Tally()
    rows = 0
    for file in files:
        samples_before, first_unread = tally.samples, None
        for number, raw in file.rows():
            if data.limit is not None and rows >= data.limit:
                break
            rows += 1
            if first_unread is None:
                first_unread = isinstance(raw, RowProblem)
            source = Source(file.path, number)
            try:
                if isinstance(raw, RowProblem):
                    raise raw
                row = parse_row(raw, vocab_size=vocab_size, max_characters=chat.max_characters)
            except RowProblem as problem:
                items: Iterator[Sample | Dropped] = iter((_dropped(source, problem),))
            else:
                items = _candidates(row, source, data, chat, tokenizer, max_length=max_length, vocab_size=vocab_size)
            for item in items:
                tally.add(item)
                yield item
            if on_progress is not None:
                on_progress(rows)
        if first_unread and tally.samples == samples_before:
            file.refuse_other_kind()
    if rows == 0:
        names = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
        raise InputDataError("the input has no rows; expected at least one conversation", file=names)
    if tally.samples == 0 and set(tally.dropped) == {DropReason.TEMPLATE_FAILED}:
        tally.raise_if_unusable()


def _candidates(
    row: Conversation | Tokenized,
    source: Source,
    data: DataSettings,
    chat: ChatSettings,
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    vocab_size: int,
) -> Iterator[Sample | Dropped]:
    if isinstance(row, Tokenized):
        mask = np.ones(len(row.token_ids), dtype=np.uint8) if row.loss_mask is None else row.loss_mask
        method = "all" if row.loss_mask is None else "given"
        yield _sample(row.token_ids, mask, source, data.split, method, max_length)
        return
    turns = assistant_turns(row)
    if chat.samples == "conversation" or not turns:
        yield _masked(row, None, source, data, tokenizer, max_length, vocab_size)
        return
    for k, i in enumerate(turns):
        history = Conversation(row.messages[: i + 1], row.tools, row.template_kwargs)
        yield _masked(history, k, Source(source.file, source.row, k), data, tokenizer, max_length, vocab_size)


def _masked(
    conversation: Conversation,
    turn: int | None,
    source: Source,
    data: DataSettings,
    tokenizer: ChatTokenizer,
    max_length: int,
    vocab_size: int,
) -> Sample | Dropped:
    try:
        masked = mask_conversation(tokenizer, conversation, turn=turn)
        if masked.token_ids.size and int(masked.token_ids.max()) >= vocab_size:
            raise RowProblem(
                DropReason.BAD_TOKEN_ID,
                f"the tokenizer gives token id {int(masked.token_ids.max())}, the model's vocabulary ends at "
                f"{vocab_size - 1}; tokenizer and model do not belong together (model.tokenizer)",
            )
    except RowProblem as problem:
        return _dropped(source, problem)
    except TemplateOverrunError as error:
        raise TemplateOverrunError(f"{source}: {error}") from error
    return _sample(masked.token_ids, masked.loss_mask, source, data.split, masked.method, max_length)


def _sample(
    ids: np.ndarray, mask: np.ndarray, source: Source, split: str, method: str, max_length: int
) -> Sample | Dropped:
    truncated = len(ids) > max_length
    if not mask[:max_length].any():
        if truncated and mask.any():
            first = int(np.flatnonzero(mask)[0])
            return Dropped(
                source,
                DropReason.TRUNCATED_AWAY,
                f"the first supervised token is number {first + 1} of {len(ids)}, behind the cut at {max_length} "
                "tokens (chat.max_length)",
            )
        return Dropped(source, DropReason.NO_SUPERVISED_TOKEN, f"none of its {len(ids)} tokens is supervised")
    ids = np.ascontiguousarray(ids[:max_length], dtype=np.int32)
    mask = np.ascontiguousarray(mask[:max_length], dtype=np.uint8)
    return Sample(sample_id_of(ids, mask), ids, mask, source, split, method, truncated)


def _dropped(source: Source, problem: RowProblem) -> Dropped:
    return Dropped(source, problem.reason, problem.detail, problem.field)
