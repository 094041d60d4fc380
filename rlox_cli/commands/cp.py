"""``rlox cp``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.exits import reported


def cp(
    name: Annotated[
        str, typer.Argument(help="algo/ppo, tuned/ppo/CartPole-v1, experiment/ppo-smoke, …; conf: everything.")
    ],
    dest: Annotated[Path, typer.Argument(help="The folder to copy into.")] = Path("conf"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Copy configuration that ships into a folder of your own, to edit and use with `rlox train -cd FOLDER`."""
    with reported("cp"):
        from rlox_cli.config.shipped import copy

        copy(name, dest, force)
