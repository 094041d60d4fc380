"""How far a long measurement is."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Parts:
    """A bar on a terminal, elsewhere a line for each of `total` parts; on standard error."""

    def __init__(self, total: int):
        self.total = total
        self.begun = 0
        self.console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Parts:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str) -> None:
        """The next part, with which the one before is done."""
        self.begun += 1
        if self._bar is None:
            self.console.print(f"{what} ({self.begun} of {self.total})", soft_wrap=True, markup=False)
        else:
            self._bar.update(self._task, completed=self.begun - 1, description=what)

    def tell(self, what: str) -> None:
        """What the part is doing now, for a terminal alone."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)
