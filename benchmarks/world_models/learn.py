"""Measure what DreamerV3 learns with its defaults: curves over steps and over CPU seconds.

    OMP_NUM_THREADS=1 python benchmarks/world_models/learn.py --runs outputs/dreamer

This trains each task with the seeds 100-104 and writes benchmarks/world_models/learn.json and learn.png. Finished runs
in the folder are kept, and broken ones resumed. Evaluations are deterministic, with 20 episodes; their time does not
count.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console

from rlox_cli.bench import fingerprint, learn
from rlox_cli.report.statistics import iqm

# Title; arguments in addition to `algo=dreamer`, and the threshold to draw.
TASKS: dict[str, tuple[list[str], float | None]] = {
    "CartPole-v1": (["env=CartPole-v1", "total_timesteps=10000"], 475.0),
    "Pendulum-v1": (["env=Pendulum-v1", "total_timesteps=8000"], -200.0),
    "CartPole-v1 without velocities": (["env=rlox/CartPoleHidden-v1", "total_timesteps=10000"], 475.0),
    "DrawnCatch-v0, images": (
        ["env=rlox/DrawnCatch-v0", "env.kwargs.dense=true", "env.kwargs.size=8", "total_timesteps=4000"],
        6.17,  # the best possible mean return
    ),
}


def draw(cells: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw each seed's evaluations and their interquartile mean, over steps and over CPU seconds of training."""
    figure, axes = plt.subplots(2, len(cells), figsize=(4 * len(cells), 6), layout="constrained", squeeze=False)
    for column, (title, cell) in enumerate(cells.items()):
        curves = list(cell["curves"].values())
        means = iqm([[point["mean"] for point in curve] for curve in curves], axis=0)
        for axis, key, name in ((axes[0, column], "step", "environment steps"), (axes[1, column], "cpu_s", "CPU s")):
            for curve in curves:
                axis.plot([p[key] for p in curve], [p["mean"] for p in curve], color="tab:blue", alpha=0.3, lw=1)
            places = np.mean([[point[key] for point in curve] for curve in curves], 0)
            axis.plot(places, means, color="tab:blue", lw=2, label="IQM")
            if TASKS[title][1] is not None:
                axis.axhline(TASKS[title][1], color="0.5", lw=0.8, ls="--")
            axis.set_xlabel(name)
            axis.grid(alpha=0.2)
        axes[0, column].set_title(f"{title} ({len(cell['curves'])} seeds)")
    axes[0, 0].set_ylabel("return")
    axes[1, 0].set_ylabel("return")
    axes[0, 0].legend()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102, 103, 104])
    parser.add_argument("--runs", type=Path, required=True, help="run folders; finished ones are kept")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("learn.json"))
    given = parser.parse_args()
    console, cells = Console(stderr=True, highlight=False), {}
    known = json.loads(given.out.read_text())["cells"] if given.out.exists() else {}
    for title in given.tasks:
        ((label, job),) = learn.compose_cells(["algo=dreamer", *TASKS[title][0]]).items()
        question = learn.ask({label: job}, given.seeds, given.runs, console, None, score_only=True)
        cell = learn.measure(label, job, given.seeds, given.runs, 1, question, console)
        learn.describe(title, cell, Console(highlight=False))
        kept = ("final", "iqm", "iqm_low", "iqm_high", "area", "threshold", "curves", "settings", "diverged")
        cells[title] = {key: cell[key] for key in kept if key in cell}
        cells[title]["open_loop_share"] = {
            seed: found.get("model/open_loop_share 50%-100%")
            for seed, found in fingerprint.from_table(cell["quantities"]).items()
        }
    cells = {title: cells.get(title, known.get(title)) for title in TASKS if title in cells or title in known}
    result = learn.result("OMP_NUM_THREADS=1 python benchmarks/world_models/learn.py", {})
    given.out.write_text(learn.dumps({**result, "cells": cells}) + "\n")
    draw(cells, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
