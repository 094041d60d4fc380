"""Errors as a user should meet them: one paragraph on stderr and an exit code that is not 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

# What bad input, a bad machine or diverged training raises. Anything else is a bug of ours and keeps its traceback.
_EXPECTED = (ValueError, TypeError, ImportError, OSError, FloatingPointError, RuntimeError, MemoryError)


class Stopped(BaseException):
    """A signal ended the training after everything was saved; not an Exception, so that a sweep ends too."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.exit_code = 128 + signal_number


def paragraph(e: BaseException) -> str:
    """The message of `e` in one paragraph; an OSError with the file it is about."""
    text = str(e)
    if isinstance(e, OSError) and e.strerror:
        text = f"{e.strerror}: {e.filename}" if e.filename else e.strerror
    return " ".join(text.split()) or type(e).__name__


@contextmanager
def reported(verb: str) -> Iterator[None]:
    """Turn expected exceptions into a paragraph and exit code 1, or 2 for a `UsageError`.

    RLOX_TRACEBACK=1 shows them whole.
    """
    try:
        yield
    except Stopped as e:
        raise typer.Exit(e.exit_code) from None
    except KeyboardInterrupt:
        print(f"rlox {verb}: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader of our output (head, less) has left; pointing stdout elsewhere keeps the interpreter quiet at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except _EXPECTED as e:
        if os.environ.get("RLOX_TRACEBACK") == "1":
            raise
        print(f"rlox {verb}: {paragraph(e)}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(e, UsageError) else 1) from None


class UsageError(ValueError):
    """What was typed cannot be a run: an unknown key, a wrong type, a value out of range, a missing choice."""
