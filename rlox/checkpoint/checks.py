"""Values that were read from a file: checks, and their form in an error message."""

from __future__ import annotations

import re
from typing import Any

# What a terminal obeys instead of showing it: control characters except line break and tab, and changes of direction.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def one_line(thing: Any, most: int = 300) -> str:
    """Format `thing` for an error message: one paragraph of bounded length, without control characters."""
    text = " ".join(str(thing).split())
    text = text if len(text) <= most else f"{text[:most]} …"
    return "".join(c if c.isprintable() else "?" for c in text)


def visible(text: str) -> str:
    """Return `text` with its control characters written as ``\\x1b``, so that a terminal shows them."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def is_count(value: Any, below: int = 2**53) -> bool:
    """Whether `value`, read from a file, is an integer in [0, `below`)."""
    return type(value) is int and 0 <= value < below
