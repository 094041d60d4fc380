"""``rlox compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.options import Json
from rlox_cli.terminal.process import report_exceptions


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run folder, or a folder that contains runs.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same. Differences are B minus A.")],
    metric: Annotated[
        str | None,
        typer.Option(help="Metric to compare: any name in metrics.jsonl; by default the evaluations' return."),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Count the steps to this score; by default the tuned settings' reference.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare two runs, or two groups of runs: settings, versions, scores, and whether B differs from A.

    The verdict needs several seeds on each side: B is better if the 95 %
    bootstrap interval of the difference of interquartile means is above zero and
    a permutation test agrees.

    \b
    rlox compare outputs/sweeps/before outputs/sweeps/after
    rlox compare RUN RUN --threshold 475 --json
    """
    with report_exceptions("compare"):
        from rlox_cli.report.compare import main

        main(a, b, metric, threshold, json)
