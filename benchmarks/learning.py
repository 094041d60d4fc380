"""Does it learn as well as Stable-Baselines3? `rlox train` with tuned settings against SB3's recorded curves.

usage: learning.py --reference FOLDER [--cells CELL ...] [--seeds 100 101 102 103 104] [--runs DIR] [--out FILE]
       FOLDER holds one JSON a run, CELL-sSEED.json, with "evaluations": [{"step", "mean", "std", ...}, ...]

Protocol: deterministic evaluation on 20 episodes of one fresh environment seeded 10_000 + seed, at ten evenly spaced
points, the last at the end. Judged is the final score: the interquartile mean (IQM) over seeds, ours minus theirs, with
a 95 % bootstrap interval over seeds of both sides. A cell passes unless that interval lies wholly below zero.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from rlox.checkpoint import versions
from rlox_cli.bench.machine import provenance

CELLS = [
    *("ppo-CartPole-v1", "ppo-Acrobot-v1", "ppo-Pendulum-v1", "ppo-LunarLander-v3", "ppo-Hopper-v5"),
    "ppo-HalfCheetah-v5",
    *("a2c-CartPole-v1", "a2c-Acrobot-v1", "a2c-Pendulum-v1"),
    *("dqn-CartPole-v1", "dqn-Acrobot-v1", "sac-Pendulum-v1", "td3-Pendulum-v1"),
    "sac-HalfCheetah-v5",
]
# Where the reference differs from the tuned settings.
ARGUMENTS = {"td3-Pendulum-v1": ["total_timesteps=15_000", "algo.learning_starts=5_000"]}
RESAMPLES = 20_000


def iqm(scores: np.ndarray) -> np.ndarray:
    """Mean of the middle half along the last axis; a quarter of the values, rounded down, goes at either end."""
    cut = scores.shape[-1] // 4
    return np.sort(scores, axis=-1)[..., cut : scores.shape[-1] - cut].mean(-1)


def difference(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """IQM(ours) - IQM(theirs) with its 95 % percentile bootstrap interval."""
    rng = np.random.default_rng(0)
    a, b = np.asarray(ours), np.asarray(theirs)
    resampled = iqm(rng.choice(a, (RESAMPLES, len(a)))) - iqm(rng.choice(b, (RESAMPLES, len(b))))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {"difference": float(iqm(a) - iqm(b)), "low": float(low), "high": float(high)}


def train(cell: str, seed: int, folder: Path) -> list[dict]:
    """One run through the command line, or what a finished one left in `folder`; its evaluations."""
    record = folder / "metrics.jsonl"
    if not (record.is_file() and '"finished"' in record.read_text()):
        algo, env = cell.split("-", 1)
        command = [sys.executable, "-m", "rlox_cli.main", "train", f"algo={algo}", f"env={env}", f"seed={seed}"]
        command += [*ARGUMENTS.get(cell, ()), "logger=none", f"hydra.run.dir={folder}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = (json.loads(line) for line in record.read_text().splitlines())
    return [
        {"step": row["step"], "mean": row["eval/mean_return"], "std": row["eval/std_return"]}
        for row in rows
        if "eval/mean_return" in row
    ]


def plot(cells: dict[str, dict], path: Path) -> None:
    """Learning curves: the IQM over seeds, and the range of all seeds behind it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    columns = min(4, len(cells))
    lines = -(-len(cells) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4 * columns, 3 * lines), squeeze=False)
    for axis in axes.flat[len(cells) :]:
        axis.set_visible(False)
    for axis, (cell, of) in zip(axes.flat, cells.items(), strict=False):
        for name, curves, colour in (("rlox", of["curves"], "C0"), ("Stable-Baselines3", of["curves_sb3"], "C1")):
            # The last two points of SB3 lie on one another: its evaluation at the end follows that at 100 %.
            length = min(len(rows) for rows in curves.values())
            steps = [row["step"] for row in next(iter(curves.values()))[:length]]
            means = np.array([[row["mean"] for row in rows[:length]] for rows in curves.values()])
            axis.fill_between(steps, means.min(0), means.max(0), color=colour, alpha=0.2, linewidth=0)
            axis.plot(steps, iqm(means.T), color=colour, label=name)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_title(cell, fontsize=10)
        axis.set_xlabel("environment steps", fontsize=8)
        axis.tick_params(labelsize=7)
    axes[0][0].set_ylabel("evaluation return", fontsize=8)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102, 103, 104])
    parser.add_argument(
        "--runs", type=Path, default=Path("outputs/learning"), help="run folders; finished ones are kept"
    )
    parser.add_argument("--out", type=Path, help="JSON; the curves go beside it as a PNG")
    args = parser.parse_args()
    cells = {}
    for cell in args.cells:
        ours, theirs = {}, {}
        for seed in args.seeds:
            ours[seed] = train(cell, seed, args.runs / f"{cell}-s{seed}")
            theirs[seed] = json.loads((args.reference / f"{cell}-s{seed}.json").read_text())["evaluations"]
            scores = f"{ours[seed][-1]['mean']:.2f} (SB3 {theirs[seed][-1]['mean']:.2f})"
            print(f"{cell} seed {seed}: {scores}", file=sys.stderr)
        final = [[curves[seed][-1]["mean"] for seed in args.seeds] for curves in (ours, theirs)]
        verdict = difference(*final)
        cells[cell] = {
            "iqm": float(iqm(np.asarray(final[0]))),
            "iqm_sb3": float(iqm(np.asarray(final[1]))),
            **verdict,
            "passes": verdict["high"] >= 0,
            "final": dict(zip(map(str, args.seeds), final[0], strict=True)),
            "final_sb3": dict(zip(map(str, args.seeds), final[1], strict=True)),
            "curves": {str(seed): rows for seed, rows in ours.items()},
            "curves_sb3": {
                str(seed): [{key: row[key] for key in ("step", "mean", "std")} for row in rows]
                for seed, rows in theirs.items()
            },
        }
    result = {
        **provenance(
            f"python benchmarks/learning.py --reference FOLDER --cells {' '.join(args.cells)} "
            f"--seeds {' '.join(map(str, args.seeds))}"
        ),
        "versions": versions(),
        "cells": cells,
    }
    if args.out:
        args.out.write_text(json.dumps(result) + "\n")
        plot(cells, args.out.with_suffix(".png"))
    for cell, of in cells.items():
        print(
            f"{cell}: IQM {of['iqm']:.2f}, SB3 {of['iqm_sb3']:.2f}, difference {of['difference']:.2f} "
            f"[{of['low']:.2f}, {of['high']:.2f}]: {'passes' if of['passes'] else 'FAILS'}"
        )


if __name__ == "__main__":
    main()
