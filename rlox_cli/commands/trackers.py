"""``rlox sync`` and ``rlox ui``: the trackers that mirror runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.process import report_exceptions


def sync(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders; by default all under outputs/.")] = None,
) -> None:
    """Bring the trackers up to date with the runs' own records, after a crash, a server failure or offline training."""
    with report_exceptions("sync"):
        from rlox_cli.run import mirrors

        mirrors.sync(runs or [])


def ui(
    context: typer.Context,
    store: Annotated[
        Path | None, typer.Option(help="The MLflow database; by default MLFLOW_TRACKING_URI, else outputs/mlflow.db.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 5000,
) -> None:
    """Serve MLflow's web page for the runs made here. Other options are passed to `mlflow server`."""
    with report_exceptions("ui"):
        from rlox_cli.report.ui import default_store, serve

        serve(store or default_store(), port, context.args)
