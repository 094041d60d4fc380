"""The console for all output, and tables that fit its width."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

# Width when the output is not a terminal: no line of a table is ever broken.
_UNBROKEN = 100_000
_PROSE = 30  # columns that the last cell needs to be readable as a paragraph next to the others
_INDENT = 4


def make_console() -> Console:
    """Return a Rich console that does not break lines in files and pipes."""
    # Brackets in a path or a message are not markup.
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_UNBROKEN)


class PlainTable(Table):
    """A table of plain text, in which brackets are not markup."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def make_table(*columns: str) -> PlainTable:
    """Return a table without borders, for `print_table`."""
    return PlainTable(*(Column(name) for name in columns), box=None, pad_edge=False)


def print_table(console: Console, table: PlainTable) -> None:
    """Print a table from `make_table`.

    If it is too wide, its last column is printed as paragraphs, or each row on several lines. In the latter case the
    first cell has a line of its own, so that a path can be copied whole.
    """
    headers = [str(column.header) for column in table.columns]
    rows = list(zip(*(map(_text, column.cells) for column in table.columns), strict=True))
    shown = [*rows, headers] if table.show_header else rows
    widths = [max((cell_len(str(row[i])) for row in shown), default=0) for i in range(len(headers))]
    # Columns are one character apart.
    room = console.width - sum(widths[:-1]) - (len(widths) - 1)
    words = (cell_len(word) for row in shown for word in str(row[-1]).split())
    if widths[-1] <= room or room >= max(_PROSE, *words):
        for column in table.columns[:-1]:
            column.no_wrap = True
        console.print(table)
        return
    for first, *others in rows:
        console.print(first, style="bold", soft_wrap=True)
        for line in _lines(headers[1:], others, console.width - _INDENT):
            console.print(Text(" " * _INDENT).append(line), soft_wrap=True)


def _text(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _lines(headers: list[str], cells: list[Text], width: int) -> list[Text]:
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
    if alone:
        line = Text()
        for word in last.split(" "):
            if line.plain and cell_len(line.plain) + 1 + cell_len(word.plain) > width:
                lines.append(line)
                line = Text()
            line.append(" " if line.plain else "").append(word)
        lines.append(line)
    return lines
