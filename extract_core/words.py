"""How numbers and strangers' texts are written for people."""

from __future__ import annotations

import re

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys, that turn the direction of text around, or that cannot be encoded."""

_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def size(count: float) -> str:
    """Bytes for people: ``9.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds for people: ``2 h 03 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours / 24:.1f} days"


def harmless(text: str) -> str:
    """Text for a terminal: colours left out, other control characters written out; tab and line feed stay."""
    if UNSAFE.search(text) is None:
        return text
    text = _COLOUR.sub("", text)
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)
