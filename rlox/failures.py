"""Exceptions of code that is not rlox's: which call they came out of, kept on the exception itself.

The library raises the user's own exception, of the user's own type, with a note that names the environment, reward,
callback or worker. The command line prints the note, and the frames of the user's code, from what is kept here.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

_NAME = "__rlox_failure__"


class Frame(NamedTuple):
    """One line of a traceback."""

    file: str
    line: int
    function: str
    source: str  # the line itself, stripped; empty where the file cannot be read
    module: str  # first part of the module's name


class Diverged(FloatingPointError):
    """The policy's numbers are not finite any more: its weights are not worth keeping."""


@dataclass
class Failure:
    """What is known about an exception beside its type and message."""

    what: str = ""  # the call it came out of: "environment 3 (Mine-v0): step 7 of its episode"; empty: not known
    frames: list[Frame] = field(default_factory=list)  # of another process, outermost first
    trace: str = ""  # the same as Python prints it
    running: bool = False  # whether a training had begun
    saved: str = ""  # what a training had saved before
    file: str = ""  # holds the whole traceback


def failure_of(e: BaseException) -> Failure:
    """What is kept on `e`; made on demand."""
    found = getattr(e, _NAME, None)
    if found is None:
        found = Failure()
        setattr(e, _NAME, found)
    return found


def blame(e: BaseException, what: str) -> None:
    """Keep on `e` which call of the user's code it came out of, as a note too; the first one that says so counts."""
    found = failure_of(e)
    if not found.what:
        found.what = what
        add_note(e, f"rlox: {what} failed")


def add_note(e: BaseException, note: str) -> None:
    """As ``e.add_note``, which Python 3.10 lacks; there nothing prints it, but it can be read."""
    if sys.version_info >= (3, 11):
        e.add_note(note)
    else:
        e.__notes__ = [*getattr(e, "__notes__", []), note]


def frames_of(trace: TracebackType | None) -> list[Frame]:
    """The lines of a traceback, outermost first."""
    modules = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in traceback.walk_tb(trace)]
    return [
        Frame(item.filename, item.lineno or 0, item.name, item.line or "", module)
        for item, module in zip(traceback.extract_tb(trace), modules, strict=True)
    ]
