"""Standard streams that outlive their reader, and replace characters that their encoding lacks by plain ones."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import Any, TextIO

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


class _Output(io.FileIO):
    """A standard stream whose reader may go away (`| head -1`, a closed terminal); later output is then discarded."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as e:
            if e.errno not in (errno.EPIPE, errno.EIO):
                raise
        # Redirect the descriptor itself, for processes that inherit it.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        return super().write(data)


def _encoding(stream: TextIO | None) -> str:
    """Return the stream's encoding, or ASCII if LC_ALL is C or POSIX, although Python writes UTF-8 then."""
    asked = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8")
    if not asked and os.environ.get("LC_ALL") in ("C", "POSIX"):
        return "ascii"
    return getattr(stream, "encoding", None) or "utf-8"


def use_utf8_paths() -> None:
    """Start Python again in UTF-8 mode if it would read the names of files as ASCII; its output stays ASCII.

    Names in other scripts would otherwise be strings that no library can write to a file.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault("PYTHONIOENCODING", "ascii")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


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
        buffered = io.BufferedWriter(_Output(number, "w", closefd=False))
        interactive = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(buffered, _encoding(before), "rlox.plain", line_buffering=interactive)
        setattr(sys, name, stream)
