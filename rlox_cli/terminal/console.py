"""The console for all output, and tables that fit its width."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from rlox.checkpoint.checks import CONTROL, visible

# Width when the output is not a terminal: no line of a table is ever broken.
_UNBROKEN = 100_000
_PROSE = 30  # columns that a paragraph needs to be readable
_INDENT = 4
_GAP = 2  # columns between two columns of a table
# A command in backticks or at the end of a line is never broken, so that it can be copied.
_UNIT = re.compile(r"\S*`[^`]*`\S*|(?<=(?:: |  ))(?:rlox|pip|torchrun|wandb|tensorboard|ray) .*|\S+")
_LABEL = re.compile(r" *(?:\S+(?: \S+)* {2,}|\[ *\d+/\d+\] )?")  # before the text that the next lines align with


class TextConsole(Console):
    """A console for plain text. On a terminal, it breaks lines between words only; in files and pipes it breaks none.

    Words and commands that are wider than the terminal are printed whole. Neither brackets nor colons in a path or a
    message are markup. Control characters in a text, which may be somebody else's, are shown and not obeyed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)
        if not self.is_terminal and "width" not in options:
            self.width = _UNBROKEN

    def print(self, *objects: Any, **options: Any) -> None:
        if len(objects) != 1 or not isinstance(text := objects[0], (str, Text)):
            super().print(*objects, **options)
            return
        if isinstance(text, str) and CONTROL.search(text):
            text = visible(text)
        if self.is_terminal:
            lines = Text(text).split("\n") if isinstance(text, str) else text.split("\n")
            for line in lines or [Text()]:
                for part in _wrap(line, self.width):
                    super().print(part, **{**options, "soft_wrap": True})
        else:
            super().print(text, **{**options, "soft_wrap": True})


class PlainTable(Table):
    """A table of plain text, in which neither brackets are markup nor control characters are obeyed."""

    def __init__(self, *columns: str, optional: Sequence[str] = ()):
        super().__init__(*(Column(visible(name)) for name in columns), box=None, pad_edge=False)
        self.optional = optional

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(visible(cell)) if isinstance(cell, str) else cell for cell in cells), **options)


def make_table(*columns: str, optional: Sequence[str] = ()) -> PlainTable:
    """Return a table without borders, for `print_table`.

    Parameters
    ----------
    columns : str
        The headers. The first column says what a row is about.
    optional : sequence of str
        Columns to leave out where the terminal is too narrow for all, the least useful first.
    """
    return PlainTable(*columns, optional=optional)


def print_table(console: Console, table: PlainTable) -> None:
    """Print a table from `make_table`.

    If it is too wide, its optional columns are left out. If that is not enough, its last column is printed as
    paragraphs, or each row on several lines, with all columns. In the latter case the first cell has a line of its own,
    so that a path can be copied whole.
    """
    headers = [str(column.header) for column in table.columns]
    rows = list(zip(*(map(_text, column.cells) for column in table.columns), strict=True))
    printed = [*rows, headers] if table.show_header else rows
    widths = [max((cell_len(str(row[i])) for row in printed), default=0) for i in range(len(headers))]
    kept = [i for i, width in enumerate(widths) if width]
    for left_out in (None, *table.optional):
        kept = [i for i in kept if headers[i] != left_out]
        room = console.width - sum(widths[i] + _GAP for i in kept[:-1])  # for the last column
        words = (cell_len(word) for row in printed for word in str(row[kept[-1]]).split())
        if widths[kept[-1]] <= room or room >= max((_PROSE, *words)):
            table.columns = [table.columns[i] for i in kept]
            for column in table.columns[:-1]:
                column.no_wrap = True
            console.print(table)
            return
    for first, *others in rows:
        if first.plain:
            console.print(first, style="bold", soft_wrap=True)
        for line in _pack(headers[1:], others, console.width - _INDENT):
            console.print(Text(" " * _INDENT).append(line), soft_wrap=True)


def _text(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _wrap(line: Text, width: int) -> Iterator[Text]:
    """Yield the lines of a paragraph. Those after the first are indented like the text after the first one's label."""
    text = line.plain
    label = _LABEL.match(text)
    begin = label.end() if label else 0  # of the text
    indent = begin if width - begin >= _PROSE else _INDENT
    if not text[:begin].strip():  # no label
        indent = begin + 2 if begin else 0
    start = end = 0  # of the part of `line` that fits, and is not printed yet
    prefix = Text()
    for unit in _UNIT.finditer(text):
        if end > max(start, begin) and cell_len(prefix.plain) + cell_len(text[start : unit.end()]) > width:
            yield prefix + line[start:end]
            start, prefix = unit.start(), Text(" " * indent)
        end = unit.end()
    yield prefix + line[start:]


def _pack(headers: list[str], cells: list[Text], width: int) -> list[Text]:
    """Return lines of cells with their names, as many per line as fit.

    If the last cell has several words, it gets its own lines. Words are never broken.
    """
    *_, last = cells
    alone = " " in last.plain
    lines: list[Text] = []
    for header, cell in zip(headers, cells[:-1] if alone else cells, strict=False):
        if not cell.plain:
            continue
        label = Text.assemble(f"{header} " if header else "", cell)
        if lines and cell_len(lines[-1].plain) + 2 + cell_len(label.plain) <= width:
            lines[-1].append("  ").append(label)
        else:
            lines.append(label)
    return [*lines, *_wrap(last, width)] if alone else lines


def print_text(text: str, stderr: bool = False) -> None:
    """Print a paragraph, broken between words on a terminal."""
    TextConsole(stderr=stderr).print(text, soft_wrap=True)
