"""``rlox sweep status`` and ``rlox sweep resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.options import PASS_ON
from rlox_cli.terminal.process import report_exceptions

sweep = typer.Typer(help="Show and resume sweeps that `rlox train -m` started.", no_args_is_help=True)


@sweep.command()
def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the sweep.")],
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list of the jobs.")] = False,
) -> None:
    """Show every job of a sweep: what distinguishes it from the others, its progress and its scores.

    A job is waiting, running, finished, failed (with the reason), interrupted
    (Ctrl-C) or killed. Jobs in the last three states resume at the printed step.
    """
    with report_exceptions("sweep"):
        from rlox_cli.sweep.control import status as show

        show(folder, json)


@sweep.command(context_settings={**PASS_ON, "allow_interspersed_args": True})
def resume(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the sweep.")],
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Also retry jobs that failed because of their settings or numbers.")
    ] = False,
) -> None:
    """Resume a sweep that was stopped or killed: finished jobs stay, others continue from their last checkpoints.

    A job without a checkpoint starts over. Jobs keep the settings that they had
    when the sweep was started, even if shipped settings have changed since. The
    launcher is the same unless you choose another one.

    \b
    rlox sweep resume outputs/sweeps/…
    rlox sweep resume outputs/sweeps/… hydra/launcher=joblib
    rlox sweep resume outputs/sweeps/… --import my_package
    rlox sweep resume outputs/sweeps/… -cd conf
    rlox sweep resume outputs/sweeps/… hydra.sweeper.n_trials=50     more trials
    """
    with report_exceptions("sweep"):
        from rlox_cli.sweep.control import resume as go_on

        go_on(folder, context.args, retry_failed)
