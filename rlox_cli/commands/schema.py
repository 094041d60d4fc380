"""``rlox schema``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.options import Imports
from rlox_cli.terminal.process import report_exceptions


def schema(
    name: Annotated[
        str | None, typer.Argument(help="run, run-ppo, algo-ppo, buffer-mmap, env, logger, …; by default run.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FOLDER", help="Write all schemas as files into this folder.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Print the JSON Schema of a configuration file, with which editors complete and check YAML.

    Shipped files, and copies that `rlox cp` makes, name theirs in a comment that
    editors with a YAML language server read. In a file of your own, after the line
    with @package:

    \b
    # yaml-language-server: $schema=schema/run.json
    """
    with report_exceptions("schema"):
        from rlox_cli.families.imports import import_modules
        from rlox_cli.report.schema import main

        import_modules(imports or [])
        main(name, write)
