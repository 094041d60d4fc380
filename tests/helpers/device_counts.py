"""Counts of what a GPU's host spends its time on: kernel launches, copies in both directions, synchronisations."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator

_open: list[Counter[str]] = []
_lines: Counter[str] | None = None


def note(kind: str, name: str = "") -> None:
    """Count one event of a `kind` (``launch``, ``h2d``, ``d2h``, ``sync``), of the operation `name`."""
    for counter in _open:
        counter[kind] += 1
        if name:
            counter[f"{kind}:{name}"] += 1
    if _lines is not None and kind != "launch":
        _lines[f"{kind} {_line_of_rlox()}"] += 1


def _line_of_rlox() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/rlox/" in path:
            return f"{path.split('/rlox/', 1)[1]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside rlox"


@contextlib.contextmanager
def count_work() -> Iterator[Counter[str]]:
    """Count ``launch``, ``h2d``, ``d2h`` and ``sync`` inside the context, each also as ``launch:<operation>``."""
    counter: Counter[str] = Counter()
    _open.append(counter)
    try:
        yield counter
    finally:
        _open.remove(counter)


@contextlib.contextmanager
def find_waits() -> Iterator[Counter[str]]:
    """Count the lines of rlox that copy between host and device or synchronise inside the context."""
    global _lines
    _lines = Counter()
    try:
        yield _lines
    finally:
        _lines = None
