"""Chats in, samples out: read conversations, render them with the model's template, build the loss mask, account."""

from __future__ import annotations

from extract_core.chat.conversation import ROLES, parse_row
from extract_core.chat.inputs import InputFile, input_files
from extract_core.chat.mask import CrossCheck, Masked, cross_check, mask_conversation
from extract_core.chat.samples import read_samples
from extract_core.chat.tokenizer import ChatTokenizer, TemplateProfile, load_chat_tokenizer
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

__all__ = [
    "ROLES",
    "ChatTokenizer",
    "Conversation",
    "CrossCheck",
    "DropReason",
    "Dropped",
    "InputFile",
    "Masked",
    "RowProblem",
    "Sample",
    "Source",
    "Tally",
    "TemplateProfile",
    "Tokenized",
    "cross_check",
    "input_files",
    "load_chat_tokenizer",
    "mask_conversation",
    "parse_row",
    "read_samples",
    "sample_id_of",
]
