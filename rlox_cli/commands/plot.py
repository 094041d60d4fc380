"""``rlox plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.process import report_exceptions


def plot(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Run folders, or folders that contain runs.")],
    metric: Annotated[
        str | None, typer.Option(help="Metric to plot: any name in metrics.jsonl; by default the evaluations' return.")
    ] = None,
    x: Annotated[str, typer.Option(help="Horizontal axis: steps or time.")] = "steps",
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Group by this setting, or by PATH with `path`. Can be repeated."),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name of each PATH, whose runs are then one group.")
    ] = None,
    out: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Write this .png, .pdf, .svg or .html. Can be repeated.")
    ] = None,
) -> None:
    """Plot learning curves, performance profiles and speed of runs, as a picture and as a self-contained page.

    Runs that differ only in the seed, or in how they were run (device, threads,
    eval.workers, logger, …), are one group: the line is their interquartile mean,
    the band its 95 % bootstrap interval. Without --out, a .png and a .html
    are written to the sweep's folder, or below outputs/plots.

    \b
    rlox plot outputs/sweeps/…                         one group per combination
    rlox plot outputs/sweeps/… --by learning_rate
    rlox plot before after --label old --label new     one group per PATH
    rlox plot outputs --metric mean_reward --x time --out curves.png
    """
    with report_exceptions("plot"):
        from rlox_cli.report.plot import main

        main(paths, metric, x, by or [], label or [], out or [])
