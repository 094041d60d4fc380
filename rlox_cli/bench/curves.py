"""Learning curves of ``rlox bench learn``, drawn with Matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox_cli.bench.judge import Curve
from rlox_cli.records.runs import unit_of
from rlox_cli.report.statistics import interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def align_curves(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps of all evaluations (K,), and the curves at these steps (K, R).

    A curve that stopped early keeps its last value.
    """
    first = max(curve[0]["step"] for curve in curves)
    steps = np.unique([row["step"] for curve in curves for row in curve])
    steps = steps[steps >= first]
    heights = [np.interp(steps, [row["step"] for row in c], [row["mean"] for row in c]) for c in curves]
    return steps, np.stack(heights, axis=-1)


def draw(cells: dict[str, dict[str, Any]]) -> Figure:
    """Draw learning curves: the IQM over seeds with its 95 % band, and the score to reach."""
    from matplotlib.figure import Figure

    from rlox_cli.report.ticks import spread, thousands, wrap_text

    columns = min(4, len(cells))
    lines = -(-len(cells) // columns)
    figure = Figure(figsize=(max(6.4, 4 * columns + 0.4), 3.4 * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    handles = {}
    for axis in axes.flat[len(cells) :]:
        axis.set_visible(False)
    for axis, (label, cell) in zip(axes.flat, cells.items(), strict=False):
        counts: list[str] = []
        sides = (("curves", "rlox", "C0"), ("curves_sb3", "Stable-Baselines3", "C1"), ("curves_before", "before", "C1"))
        for key, name, colour in sides:
            if not cell.get(key):
                continue
            curves = list(cell[key].values())
            steps, heights = align_curves(curves)
            band = interval([heights])
            if len(curves) > 1:
                axis.fill_between(steps, band.low, band.high, color=colour, alpha=0.2, linewidth=0)
            (handles[name],) = axis.plot(steps, band.value, marker="." if len(steps) < 3 else "", color=colour)
            counts.append(f"{len(curves)}")
        note = ""
        if "threshold" in cell:
            score = cell["threshold"]["score"]
            axis.axhline(score, color="0.4", linewidth=0.8, linestyle="--")
            note = f"\ndashed: score to reach, {score:g}"
        n_seeds = f" ({' and '.join(dict.fromkeys(counts))} seed{'' if counts == ['1'] else 's'})"
        axis.set_title(wrap_text(label + n_seeds, 44), fontsize=10)
        axis.set_xlabel(unit_of(cell.get("settings", {})).replace("steps", "environment steps") + note, fontsize=9)
        axis.set_ylabel("evaluation return", fontsize=9)
        axis.tick_params(labelsize=8)
        spread(axis.xaxis, thousands())
        spread(axis.yaxis, most=8)
    # Outside the panels, where it does not cover a curve.
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), fontsize=9)
    episodes = sorted({str(cell.get("settings", {}).get("eval", {}).get("n_episodes", 20)) for cell in cells.values()})
    caption = (
        f"IQM over seeds and its 95 % bootstrap interval; {' or '.join(episodes)} deterministic episodes per point"
    )
    figure.supxlabel(caption, fontsize=9)
    return figure
