"""A progress bar in a notebook: one output that is replaced, so that a long training leaves one line."""

from __future__ import annotations

import html
import sys
from typing import Any


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


class NotebookBar:
    """A bar with a line of text, in the output of the cell that is running."""

    def __init__(self) -> None:
        self._handle: Any = None  # of the output, once it is there

    def show(self, share: float | None, text: str) -> None:
        """Show that `share` in [0, 1] is done; None: it is not known."""
        from IPython.display import HTML, display

        value = "" if share is None else f'value="{share:.4f}" max="1"'
        page = HTML(f'<progress {value} style="width:16em"></progress> {html.escape(text)}')
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)
