"""``rlox plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.exits import reported


def plot(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Run folders, or folders that hold such.")],
    metric: Annotated[str, typer.Option(help="What to draw: any name in metrics.jsonl.")] = "eval/mean_return",
    x: Annotated[str, typer.Option(help="steps or time.")] = "steps",
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Group by this setting; `path`: by PATH. As often as you like."),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A name for the runs of each PATH, which are one group.")
    ] = None,
    out: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Write this .png or .html; as often as you like.")
    ] = None,
) -> None:
    """Draw learning curves, performance profiles and speed of runs: a picture, and a page that holds everything.

    Runs that differ in nothing but the seed are one group: the line is the interquartile mean over them, the band its
    95 % bootstrap interval. Without --out both files go into the sweep's folder, or under outputs/plots.

    \b
    rlox plot outputs/sweeps/…                         every combination a group
    rlox plot outputs/sweeps/… --by learning_rate
    rlox plot before after --label old --label new     each PATH a group
    rlox plot outputs --metric mean_reward --x time --out curves.png
    """
    with reported("plot"):
        from rlox_cli.report.plot import main

        main(paths, metric, x, by or [], label or [], out or [])
