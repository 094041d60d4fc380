"""Show the progress of a long measurement."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlox_cli.terminal.console import TextConsole


class Parts(Progress):
    """A progress bar on a terminal, elsewhere a line for each of `total` parts; on standard error."""

    def __init__(self, total: int):
        console = TextConsole(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
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
