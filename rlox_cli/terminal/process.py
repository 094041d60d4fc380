"""What a command does to its process: its streams at the start, what is printed on stderr and its exit code at the end.

The streams outlive their reader, and replace characters that their encoding lacks by plain ones.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click
import typer

from rlox_cli.terminal.errors import Stopped
from rlox_cli.terminal.signals import Signals

# Replacements for characters that the output's encoding lacks.
_PLAIN = {
    "±": "+-",
    "×": "x",
    "→": "->",
    "…": "...",
    "−": "-",
    "–": "-",
    "—": "-",
    "·": "-",
    "•": "*",
    "²": "^2",
    "µ": "u",
    "ε": "eps",
    "τ": "tau",
    "’": "'",
    "‘": "'",
    "“": '"',
    "”": '"',
    "\xa0": " ",
    "│": "|",
    "┃": "|",
    "╺": " ",
    "❱": ">",
    "●": "*",
}


def _plain(sign: str) -> str:
    if sign in _PLAIN:
        return _PLAIN[sign]
    if "─" <= sign <= "╿":  # box drawing
        return "-" if sign in "─━═╌╍┄┅┈┉╴╶╸" else "+"
    if "⠀" <= sign <= "⣿":  # a spinner of braille dots
        return "*"
    return sign.encode("ascii", "backslashreplace").decode()


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


codecs.register_error("rlox.plain", _replace)


class Output(io.FileIO):
    """A standard stream whose reader may go away (`| head -1`, a closed terminal); later output is then discarded.

    So is the output to a file that cannot be written (a full disk), with one warning on stderr. A training goes on.
    """

    incomplete = False  # whether something could not be written to a file

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as e:
            if e.errno not in (errno.EPIPE, errno.EIO):
                Output.incomplete = True
                name = "standard output" if self.fileno() == 1 else "standard error"
                text = f"rlox: warning: {name} cannot be written: {e.strerror}; the command goes on without it\n"
                with suppress(OSError):
                    os.write(2, text.encode())
        # Redirect the descriptor itself, for processes that inherit it.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        return super().write(data)


def open_streams() -> None:
    """Prepare the standard streams of this process, so that a command continues whatever happens to them.

    Each stream is open (`>&-` closes one, and the next file to be opened would get its number), stays writable when its
    reader goes away, and replaces characters that its encoding lacks by plain ones.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        if before is not None:
            before.flush()
            if os.name == "nt":  # a console takes text, not bytes
                before.reconfigure(errors="rlox.plain")
                continue
        # If LC_ALL is C or POSIX, Python writes UTF-8 nevertheless.
        asked = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8")
        plain = not asked and os.environ.get("LC_ALL") in ("C", "POSIX")
        encoding = "ascii" if plain else getattr(before, "encoding", None) or "utf-8"
        buffered = io.BufferedWriter(Output(number, "w", closefd=False))
        interactive = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(buffered, encoding, "rlox.plain", line_buffering=interactive)
        setattr(sys, name, stream)


@contextmanager
def report_exceptions(verb: str) -> Iterator[None]:
    """Print an exception as `format_failure` does, or its traceback with RLOX_TRACEBACK=1, and exit with its code.

    The first Ctrl-C or SIGTERM stops the command, except in parts that handle signals themselves, such as a training.
    """
    signals = Signals()
    try:
        with signals:
            yield
    except (click.exceptions.Exit, click.exceptions.Abort, click.ClickException):
        raise
    except Stopped as e:
        raise typer.Exit(e.exit_code) from None
    except BaseException as e:
        # Other packages turn the exception of a signal into errors of their own.
        number = signals.number
        if isinstance(e, KeyboardInterrupt):
            number = getattr(e, "signal_number", signal.SIGINT)
        if number is not None:
            print(f"rlox {verb}: interrupted", file=sys.stderr)
            raise typer.Exit(128 + number) from None
        # Imports NumPy, which --help does without.
        from rlox_cli.terminal.account import exit_code, format_failure, is_of_user
        from rlox_cli.terminal.console import print_text

        # Hydra and its plugins may end the process themselves; an environment must not.
        if isinstance(e, SystemExit) and not is_of_user(e):
            raise
        if os.environ.get("RLOX_TRACEBACK") == "1":
            traceback.print_exception(e)
            raise typer.Exit(exit_code(e)) from None
        rank = int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0
        lost = type(e).__name__ == "RankLost"
        # A rank that only lost another rank has nothing to add to what rank 0 prints, unless rank 0 was killed.
        if not rank or not lost or getattr(e, "unreported", False):
            print_text(format_failure(verb, e, 0 if lost else rank), stderr=True)
        raise typer.Exit(exit_code(e)) from None
