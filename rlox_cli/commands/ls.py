"""``rlox ls``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.exits import reported
from rlox_cli.terminal.options import Imports


def ls(
    what: Annotated[str, typer.Argument(help="algos, buffers, envs, experiments, tuned, runs or sweeps.")],
    folder: Annotated[Path, typer.Option(help="Where runs and sweeps lie.")] = Path("outputs"),
    imports: Imports = None,
) -> None:
    """List algorithms, replay memories, environments, presets, tuned settings, or runs and sweeps made here."""
    with reported("ls"):
        from rlox_cli.config.imports import import_modules
        from rlox_cli.report.lists import list_things

        import_modules(imports or [])
        list_things(what, folder)
