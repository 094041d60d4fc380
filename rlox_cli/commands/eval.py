"""``rlox eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.options import Checkpoint, EvaluationSeed, Imports, Json, MaxSteps, Stochastic
from rlox_cli.terminal.process import report_exceptions


def eval_(
    checkpoint: Checkpoint,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="Number of episodes, or of rows; by default as in training.")
    ] = None,
    seed: EvaluationSeed = None,
    stochastic: Stochastic = False,
    json: Json = False,
    video: Annotated[Path | None, typer.Option(metavar="FILE", help="Record an episode as an .mp4 or .gif.")] = None,
    render: Annotated[bool, typer.Option("--render", help="Show an episode in a window.")] = False,
    predictions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="World models: draw predictions next to what really happens, as a film (.mp4, .gif) of images or a "
            "plot (.png, .svg, .pdf) of vectors.",
        ),
    ] = None,
    max_steps: MaxSteps = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Language models: completions to sample for each prompt, for reward and pass@k; by default 4."
        ),
    ] = None,
    pass_at: Annotated[
        float | None,
        typer.Option(metavar="REWARD", help="Language models: the least reward of a correct completion; by default 1."),
    ] = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option(
            "--reward", metavar="URL", help="Language models: the address of the run's reward, again. Can be repeated."
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Evaluate a checkpoint. Only the checkpoint file is needed.

    Without options, this repeats the evaluation made in training: for `best`, the
    result is exactly the score for which it was saved. If a run used code of your
    own, it is imported only if you name it again with --import; completions are
    sent to another machine only if you name it again with --reward.
    """
    with report_exceptions("eval"):
        from rlox_cli.families.family import Evaluation
        from rlox_cli.run.evaluate import main

        words = (episodes, seed, stochastic, json, video, render, tuple(imports or ()), max_steps)
        main(checkpoint, Evaluation(*words, samples, pass_at, predictions, tuple(rewards or ())))
