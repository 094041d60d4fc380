"""``rlox ls`` and ``rlox cp``: list what there is, and copy shipped configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.options import Imports
from rlox_cli.terminal.process import report_exceptions


def ls(
    what: Annotated[
        str, typer.Argument(help="What to list: algos, buffers, envs, experiments, tuned, runs or sweeps.")
    ],
    folder: Annotated[Path, typer.Option(help="Folder to search for runs and sweeps.")] = Path("outputs"),
    imports: Imports = None,
) -> None:
    """List algorithms, replay memories, environments, presets, tuned settings, or the runs and sweeps made here."""
    with report_exceptions("ls"):
        from rlox_cli.families.imports import import_modules
        from rlox_cli.report.lists import list_things

        import_modules(imports or [])
        list_things(what, folder)


def cp(
    name: Annotated[
        str, typer.Argument(help="algo/ppo, tuned/ppo/CartPole-v1, experiment/ppo-smoke, …; or conf for everything.")
    ],
    dest: Annotated[Path, typer.Argument(help="The folder to copy into.")] = Path("conf"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Copy shipped configuration files into a folder of your own, to edit and use with `rlox train -cd FOLDER`."""
    with report_exceptions("cp"):
        from rlox_cli.config.shipped import copy

        copy(name, dest, force)
