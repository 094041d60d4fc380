"""Values that were read from a file: checks, and their form in an error message."""

from __future__ import annotations

from typing import Any


def one_line(thing: Any, most: int = 300) -> str:
    """Format `thing` for an error message: one paragraph of bounded length, without control characters."""
    text = " ".join(str(thing).split())
    text = text if len(text) <= most else f"{text[:most]} …"
    return "".join(c if c.isprintable() else "?" for c in text)


def is_count(value: Any, below: int = 2**53) -> bool:
    """Whether `value`, read from a file, is an integer in [0, `below`)."""
    return type(value) is int and 0 <= value < below
