"""``rlox sweep status`` and ``rlox sweep resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.exits import reported
from rlox_cli.terminal.options import PASS_ON

sweep = typer.Typer(help="See and go on with what `rlox train -m` began.", no_args_is_help=True)


@sweep.command()
def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the sweep.")],
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list of the jobs.")] = False,
) -> None:
    """Show every job of a sweep: what distinguishes it from the others, how far it has come, its scores.

    A job is waiting, running, finished, failed (with why), interrupted (Ctrl-C) or killed; the last three go on
    from the step that is printed.
    """
    with reported("sweep"):
        from rlox_cli.sweep.control import status as show

        show(folder, json)


@sweep.command(context_settings={**PASS_ON, "allow_interspersed_args": True})
def resume(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the sweep.")],
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try again what failed by its settings or its numbers, too.")
    ] = False,
) -> None:
    """Go on with a sweep that was stopped or killed: finished jobs stay, others go on from their last checkpoints.

    A job without a checkpoint starts anew. Jobs are what they were when the sweep was typed, even if settings that ship
    have changed since. The launcher is the same unless another is typed.

    \b
    rlox sweep resume outputs/sweeps/…
    rlox sweep resume outputs/sweeps/… hydra/launcher=joblib hydra.launcher.n_jobs=4
    rlox sweep resume outputs/sweeps/… --import my_package
    rlox sweep resume outputs/sweeps/… hydra.sweeper.n_trials=50      a search by Optuna, to more trials
    """
    with reported("sweep"):
        from rlox_cli.sweep.control import resume as go_on

        go_on(folder, context.args, retry_failed)
