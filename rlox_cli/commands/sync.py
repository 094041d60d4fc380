"""``rlox sync``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.exits import reported


def sync(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders; by default all under outputs/.")] = None,
) -> None:
    """Bring the trackers up to date with the runs' own records: after a crash, a dead server, or training offline."""
    with reported("sync"):
        from rlox_cli.run import mirrors

        mirrors.sync(runs or [])
