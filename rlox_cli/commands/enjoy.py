"""``rlox enjoy``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.options import Imports
from rlox_cli.terminal.process import report_exceptions


def enjoy(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run folder (for its best one).")],
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 3,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the environment; by default the evaluation seed of the training.")
    ] = None,
    stochastic: Annotated[
        bool,
        typer.Option("--stochastic", help="Sample actions, with training's noise, instead of taking the most likely."),
    ] = False,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps after which an episode is cut off; by default as in training.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Watch a trained agent in a window. Ctrl-C closes it.

    On a machine without a display, `rlox eval RUN --video FILE` records a film.
    """
    with report_exceptions("enjoy"):
        from rlox_cli.families.family import Evaluation
        from rlox_cli.run.evaluate import enjoy as show

        typed = Evaluation(episodes, seed, stochastic, render=True, imports=tuple(imports or ()), max_steps=max_steps)
        show(checkpoint, typed)
