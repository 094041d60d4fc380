"""``rlox ui``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.exits import reported


def ui(
    context: typer.Context,
    store: Annotated[Path, typer.Option(help="The MLflow database.")] = Path("outputs/mlflow.db"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 5000,
) -> None:
    """Open MLflow's web page over the runs made here; further options go to `mlflow server`."""
    with reported("ui"):
        from rlox_cli.report.ui import serve

        serve(store, port, context.args)
