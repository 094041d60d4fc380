"""Show the progress of a long measurement."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from rlox_cli.terminal.console import TextConsole

_NUMBERS = (MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn)


class Parts(Progress):
    """A progress bar on a terminal, elsewhere a line for each of `total` parts; on standard error."""

    def __init__(self, total: int):
        console = TextConsole(stderr=True)
        # On a narrow terminal the bar becomes shorter and the text takes several lines; numbers stay whole.
        numbers = (kind(table_column=Column(no_wrap=True, min_width=7)) for kind in _NUMBERS)
        text = TextColumn("{task.description}", table_column=Column(overflow="fold"))
        columns = (text, BarColumn(None, table_column=Column(min_width=4, max_width=24)), *numbers)
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.total = total
        self.begun = 0
        self._part = self.add_task("", total=total)

    def begin(self, what: str) -> None:
        """Begin the next part; the previous one is done."""
        self.update(self._part, completed=self.begun, description=what)
        self.begun += 1
        if self.disable:
            self.console.print(f"{what} ({self.begun} of {self.total})")

    def describe(self, what: str) -> None:
        """Show what the part is doing now, only on a terminal."""
        self.update(self._part, description=what)
