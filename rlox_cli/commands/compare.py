"""``rlox compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.options import Json
from rlox_cli.terminal.process import report_exceptions


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run folder, or a folder that contains runs.")],
    b: Annotated[
        Path | None,
        typer.Argument(
            metavar="B", help="The same. Differences are B minus A. Without B, the groups in A are compared."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Metric to compare: any name in metrics.jsonl; by default the evaluations' return."),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Count the steps to this score; by default the tuned settings' reference.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="GROUP", help="Without B: the group to compare the others with; by default the first."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare two runs, two groups of runs, or the groups of one sweep: scores, and whether they differ.

    The verdict needs several seeds on each side: B is better if the 95 %
    bootstrap interval of the difference of interquartile means is above zero and
    a permutation test agrees. Two sides are also compared in settings and versions.

    \b
    rlox compare outputs/sweeps/before outputs/sweeps/after
    rlox compare RUN RUN --threshold 475 --json
    rlox compare outputs/sweeps/… --baseline a2c
    """
    with report_exceptions("compare"):
        if b is None:
            from rlox_cli.report import compare_groups

            if threshold is not None:
                raise UsageError("--threshold needs two sides, A and B")
            compare_groups.main(a, metric, baseline, json)
        else:
            from rlox_cli.report.compare import main

            if baseline is not None:
                raise UsageError("--baseline must be left out with B: A is the baseline")
            main(a, b, metric, threshold, json)
