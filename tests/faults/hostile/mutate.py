"""Ways to damage bytes, JSON and tables."""

# ruff: noqa: E501 -- data in tables

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    2**31 - 1,
    2**31,
    -(2**31),
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**12,
    10**40,
    0.5,
    -0.0,
    1e308,
)
TEXTS = (
    "", ".", "..", "../../etc/passwd", "/etc/passwd", "a/b", "a\nb", "\x1b[31mred", "\u202egnp.exe", "\x00", "x" * 300,
    "latest", "NaN", "Infinity", "1e999", "http://other.host/x", "s3://other/x", "0" * 64, "f" * 16, "é", "\U0001f600", "٣",
)  # fmt: skip
TOKENS = (
    b"\x00", b"\xff", b"\xff\xfe", b"{", b"}", b"[" * 2000, b'{"a":' * 2000, b'"', b"\\", b"\n", b"\r\n", b"NaN", b"Infinity",
    b"1e999", b"9" * 5000, b"-", b"\\ud800", b"\xed\xa0\x80", b"\x1b[2J", b"null", b"true", b"../", b",,", b"\x00" * 64,
)  # fmt: skip


def any_bytes(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Flips, cuts, splices, repeats and inserted tokens; sometimes several."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        # headers matter most
        at = min(at, rng.choice((len(data), len(data), 16, 256, 4096)))
        match rng.randrange(8):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[min(at, len(data) - 1)] = rng.randrange(256)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + rng.choice((1, 2, 8, 100))]
            case 4:
                data[at:at] = rng.choice(TOKENS)
            case 5:
                other = rng.choice(seeds)
                start = rng.randrange(len(other) + 1)
                data[at:at] = other[start : start + rng.choice((1, 8, 64, 1000))]
            case 6:
                value = rng.choice((0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 10**12, 2**63, 2**64 - 1))
                width = rng.choice((4, 8))
                data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, rng.choice(("little", "big")))
            case 7:
                data[at:at] = data[at : at + rng.choice((1, 8, 64))] * rng.choice((1, 2, 50))
    return bytes(data)


def value(rng: random.Random, old: Any) -> Any:
    """Something else in place of a value."""
    kind = rng.randrange(10)
    if kind < 4 and isinstance(old, (int, float)) and not isinstance(old, bool):
        return rng.choice((*NUMBERS, old + 1, old - 1, old * 2, -old, float(old) if abs(old) < 1e300 else 0))
    if kind < 4 and isinstance(old, str):
        cut = rng.randrange(len(old) + 1)
        return rng.choice((*TEXTS, old[:cut], old + old, old.upper(), old[::-1]))
    if kind < 4 and isinstance(old, list):
        return rng.choice(([], old + old, old[:1] * 50, old[::-1], old[:-1], [*old, None], [old]))
    return rng.choice((None, True, False, [], {}, [[]], {"a": 1}, rng.choice(NUMBERS), rng.choice(TEXTS), nested(rng)))


def nested(rng: random.Random) -> Any:
    """Deeply nested lists."""
    tree: Any = 1
    for _ in range(rng.choice((3, 90, 190, 250))):
        tree = [tree] if rng.random() < 0.5 else {"a": tree}
    return tree


def tree(rng: random.Random, root: Any) -> Any:
    """A copy of a JSON value, changed in a few places: values, missing, added and renamed keys."""
    holder = [copy.deepcopy(root)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        parent: Any = holder
        key: Any = 0
        while isinstance(parent[key], (dict, list)) and parent[key] and rng.random() < 0.85:
            parent = parent[key]
            key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
        choice = rng.random()
        if choice < 0.75 or parent is holder:
            parent[key] = value(rng, parent[key])
        elif choice < 0.85:
            del parent[key]
        elif isinstance(parent, dict):
            parent[rng.choice(TEXTS)] = value(rng, parent[key])
        else:
            parent.append(copy.deepcopy(parent[key]))
    return holder[0]


def json_bytes(dump: Callable[[Any], bytes]) -> Callable[[random.Random, list[bytes]], bytes]:
    """Mutates the JSON of a seed and writes it with ``dump`` (which makes checksums right); half the time raw bytes."""

    def mutate(rng: random.Random, seeds: list[bytes]) -> bytes:
        if rng.random() < 0.3:
            return any_bytes(rng, seeds)
        changed = tree(rng, json.loads(rng.choice(seeds)))
        try:
            return dump(changed)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return any_bytes(rng, seeds)

    return mutate
