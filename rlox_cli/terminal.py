"""The console everything is printed on."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table


def make_console() -> Console:
    """Rich's console; wide where the output is a file or a pipe, so that nothing there is cut to 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=400)


def make_table(*columns: str) -> Table:
    """A borderless table whose cells fold rather than lose their ends."""
    return Table(*(Column(name, overflow="fold") for name in columns), box=None, pad_edge=False)
