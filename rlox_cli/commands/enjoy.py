"""``rlox enjoy``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlox_cli.terminal.options import Checkpoint, EvaluationSeed, Imports, MaxSteps, Stochastic
from rlox_cli.terminal.process import report_exceptions


def enjoy(
    checkpoint: Checkpoint,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 3,
    seed: EvaluationSeed = None,
    stochastic: Stochastic = False,
    max_steps: MaxSteps = None,
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
