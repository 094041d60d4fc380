"""``rlox eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.exits import reported
from rlox_cli.terminal.options import Imports


def eval_(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run folder (its best one).")],
    episodes: Annotated[
        int | None, typer.Option(min=1, help="Episodes to play, or rows; by default as many as in training.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the environment; by default training's evaluation seed."),
    ] = None,
    stochastic: Annotated[
        bool,
        typer.Option("--stochastic", help="Sample actions, with training's noise, instead of the most likely ones."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    video: Annotated[Path | None, typer.Option(metavar="FILE", help="Film an episode into this .mp4 or .gif.")] = None,
    render: Annotated[bool, typer.Option("--render", help="Show an episode in a window.")] = False,
    predictions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="World models: what is predicted beside what happens, as a film (.mp4, .gif) of images or a plot "
            "(.png, .svg, .pdf) of vectors.",
        ),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps at which an episode is cut; by default as in training.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Language models: completions sampled of each prompt, for their reward and pass@k; 4."
        ),
    ] = None,
    pass_at: Annotated[
        float, typer.Option(metavar="REWARD", help="Language models: the reward from which on a completion is right.")
    ] = 1.0,
    imports: Imports = None,
) -> None:
    """Evaluate a checkpoint; it needs nothing beside the file.

    Without options this replays the evaluation made in training: on `best` it gives exactly the score that chose it.
    Code of your own that a run used is imported only if you name it again with --import.
    """
    with reported("eval"):
        from rlox_cli.run.evaluate import main

        main(
            checkpoint,
            episodes,
            seed,
            stochastic,
            json,
            video,
            render,
            imports or [],
            max_steps,
            samples,
            pass_at,
            predictions,
        )
