"""``rlox export``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.options import Checkpoint, Imports
from rlox_cli.terminal.process import report_exceptions


class Format(str, Enum):
    """What can be written; Typer lists the values."""

    onnx = "onnx"
    torchscript = "torchscript"
    c = "c"


def export(
    checkpoint: Checkpoint,
    to: Annotated[
        Format | None, typer.Option("--to", help="What to write; by default what the ending of --out says, or ONNX.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write it (.onnx, .pt or .c); by default below the run's folder."),
    ] = None,
    observations: Annotated[
        int, typer.Option(min=0, help="Number of observations of the run's environment to check it with; 0: none.")
    ] = 1000,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each file.")] = False,
    imports: Imports = None,
) -> None:
    """Write the policy as a file that runs without rlox: ONNX, TorchScript or C.

    \b
    rlox export outputs/… --to onnx
    rlox export outputs/… --out robot/policy.c
    rlox export outputs/… --to torchscript --observations 10000

    The file contains normalisation, networks and bounds of actions: it takes
    observations as the environment gives them and returns the most likely
    action. It is then run with observations of the environment, and compared
    with the agent. A file that differs is not written.
    """
    with report_exceptions("export"):
        from rlox_cli.run.export import main

        main(checkpoint, None if to is None else to.value, out, observations, json, imports or [])
