"""Compare prioritised with uniform replay: smallest priorities, and what importance weights are divided by.

usage: prioritised.py [--cells CELL ...] [--variants NAME ...] [--seeds 100 101 102 103 104] [--scale 1.0] [--out FILE]

It trains DQN natively; within a cell, only the memory differs. A variant is ``uniform``, or EPS-NORM for the memory's
``eps`` and ``weight_norm``. ``0-memory`` is the behaviour of rlox 0.6.0. Settings are the library's defaults on
GridWorld-v0 and those of conf/tuned elsewhere, with two layers of 64 units and fewer steps. Each number is the mean
return of 20 deterministic episodes after training. ``--scale`` shortens all trainings, to try out the script.

Results (prioritised.json): on GridWorld-v0, rlox 0.6.0 failed with three of five development seeds (mean 0.20, uniform
0.89); every variant with a smallest priority learned the task. The divisor of the weights acts like a step size: the
largest weight of the memory shrinks late steps, which hurt CartPole-v1 and helped Acrobot-v1; the largest weight of the
batch was the worst on Acrobot-v1. Undivided weights did at least as well as uniform replay in all three development
cells, so they are the default. Seeds 100 to 104, run once, scored 0.97, 227 and -267, compared with 0.95, 211 and -288
for uniform replay and 0.95, 204 and -362 for 0.6.0. Five seeds of such short trainings scatter by more than these
differences: they show that nothing was lost, not that one variant is better; with these seeds, 0.6.0 learned
GridWorld-v0, too. MountainCar-v0 was left out: in 40,000 steps even uniform replay did not reach the goal.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import rlox
from rlox import DQN
from rlox.checkpoint import versions
from rlox_cli.bench.machine import provenance

# Environment, number of environments, steps.
CELLS = {
    "GridWorld-v0": ("GridWorld-v0", 1, 12_000),
    "CartPole-v1": ("CartPole-v1", 1, 20_000),
    "Acrobot-v1": ("Acrobot-v1", 1, 15_000),
}
VARIANTS = ["uniform", "0-memory", "0-batch", *(f"{eps}-{norm}" for eps in ("1e-6", "1e-2") for norm in
            ("memory", "batch", "none"))]  # fmt: skip


def memory(variant: str, size: int) -> dict[str, object]:
    if variant == "uniform":
        return {"name": "uniform", "size": size}
    eps, norm = variant.rsplit("-", 1)
    return {"name": "prioritized", "size": size, "eps": float(eps), "weight_norm": norm}


def score(cell: str, variant: str, seed: int, scale: float) -> float:
    env, n_envs, n_steps = CELLS[cell]
    tuned = {"algo": {}, "buffer": {"size": 100_000}} if env == "GridWorld-v0" else rlox.tuned("dqn", env)
    settings = tuned["algo"] | {"hidden_sizes": [64, 64]}
    dqn = DQN(env, n_envs, seed, buffer=memory(variant, tuned["buffer"]["size"]), **settings)
    dqn.train(int(scale * n_steps))
    return float(dqn.evaluate(20).returns.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102, 103, 104])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found_in: dict[str, dict[str, list[float]]] = {}
    for cell in args.cells:
        for variant in args.variants:
            found = [round(score(cell, variant, seed, args.scale), 4) for seed in args.seeds]
            found_in.setdefault(cell, {})[variant] = found
            print(f"{cell:<16}{variant:<14}{np.mean(found):>9.2f}   {found}", flush=True)
    words = ["--cells", *args.cells, "--variants", *args.variants, "--seeds", *map(str, args.seeds)]
    command = f"python benchmarks/prioritised.py {' '.join(words)}"
    if args.out:
        result = {
            **provenance(command),
            "versions": versions(),
            "steps": {cell: int(args.scale * CELLS[cell][2]) for cell in args.cells},
            "seeds": args.seeds,
            "mean_return": found_in,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
