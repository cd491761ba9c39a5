"""JSON as it comes in chat data: one text with a limit on its nesting, and one array cut into its elements' bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_DEPTH = 200
"""Levels of nesting a row may have: far above any chat, far below what recursion in a template can take."""

_CHUNK = 1 << 20
_LONGEST = 1 << 30
_WHITE = b" \t\r\n"
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_WITHIN = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+", re.DOTALL)
_BETWEEN = re.compile(rb'(?:[^"\[\]{},]++|' + _STRING + rb")*+", re.DOTALL)


class TooDeepError(ValueError):
    """JSON nested beyond ``MAX_DEPTH``."""

    def __init__(self) -> None:
        super().__init__(f"nested too deeply (more than {MAX_DEPTH} levels)")


class BrokenArrayError(ValueError):
    """The elements of an array cannot be told apart any further."""


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON (then a ``json.JSONDecodeError``), nested too deeply, or an integer beyond any use.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise TooDeepError from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _too_deep(value):
        raise TooDeepError
    return value


def _too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        items = (item for parent in level for item in (parent.values() if isinstance(parent, dict) else parent))
        level = [item for item in items if isinstance(item, (dict, list))]
    return bool(level)


def well_formed(raw: bytes) -> bool:
    """Whether these bytes are one JSON value, whatever its numbers and its invalid UTF-8 stand for."""
    try:
        json.loads(raw.decode("utf-8", errors="replace"), parse_int=len)
    except (ValueError, RecursionError):
        return False
    return True


def array_elements(stream: BinaryIO) -> Iterator[bytes]:
    """The bytes of each element of the JSON array that a stream holds, without white space around them.

    Only strings and brackets are looked at. So an element is one element of the array if and only if it is
    ``well_formed``, which the caller checks: behind one that is not, no boundary can be trusted.

    Raises:
        BrokenArrayError: the array is cut off, an element is missing, or something follows the array.
    """
    buffer, at, begun, depth, count = b"", 0, 0, 0, 0
    while True:
        more = stream.read(max(_CHUNK, len(buffer)))  # as much again: a long string is not scanned over and over
        if not more:
            raise BrokenArrayError("the file ends inside the array")
        buffer += more
        while True:
            at = (_BETWEEN if depth <= 1 else _WITHIN).match(buffer, at).end()  # type: ignore[union-attr]
            mark = buffer[at : at + 1]
            if mark in (b"", b'"'):  # the end of what was read, perhaps inside a string
                break
            at += 1
            if mark in (b"[", b"{"):
                depth += 1
                begun = at if depth == 1 else begun
            elif mark in (b"]", b"}"):
                depth -= 1
            if depth == 0 or (depth == 1 and mark == b","):
                element, begun = buffer[begun : at - 1].strip(_WHITE), at
                if not element and (count or depth):
                    raise BrokenArrayError(f"expected a value, got {mark.decode()!r}")
                if element:
                    yield element
                count += 1
            if depth == 0:
                _only_white_space(buffer[at:], stream, mark)
                return
        buffer, at, begun = buffer[begun:], at - begun, 0
        if len(buffer) > _LONGEST:
            raise BrokenArrayError(f"the row does not end within {_LONGEST:,} bytes")


def _only_white_space(rest: bytes, stream: BinaryIO, closing: bytes) -> None:
    if closing != b"]":
        raise BrokenArrayError(f"expected ',' or ']', got {closing.decode()!r}")
    while rest or (rest := stream.read(_CHUNK)):
        if rest.strip(_WHITE):
            raise BrokenArrayError("something follows the end of the array")
        rest = b""
