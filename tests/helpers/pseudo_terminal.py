"""Commands of `rlox` on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path

import forked

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A command in backticks or at the end of a line is never broken, nor is a word.
_UNBROKEN = re.compile(r"`[^`]*`|(?:rlox|pip|wandb|tensorboard) .*|\S+")
_LABEL = 16  # columns before the text of a line


def on_a_terminal(columns: int, *words: str, cwd: Path, **env: str) -> tuple[int, list[str]]:
    """Return the exit code and every line that was shown, including each version of a redrawn line."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", **env}
    process = forked.Rlox(*words, cwd=cwd, env=environment, stdin=theirs, stdout=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            more = os.read(ours, 1 << 16)
        except OSError:  # the terminal's last user has closed it
            break
        if not more:
            break
        shown += more
    os.close(ours)
    return process.wait(timeout=240), re.split(r"[\r\n]+", _ESCAPE.sub("", shown.decode()))


def too_wide(lines: list[str], columns: int) -> list[str]:
    """Return the lines that are wider than the terminal, except for words and commands that do not fit next to a label.

    These stay whole, so that they can be copied.
    """
    return [
        line for line in lines if len(line) > columns and max(map(len, _UNBROKEN.findall(line))) <= columns - _LABEL
    ]
