"""Compare the reported cells, with tuned settings, with Stable-Baselines3: `rlox bench learn` over all of them.

usage: learning.py --reference FOLDER [--cells CELL ...] [--seeds 100 101 102 103 104] [--runs DIR] [--out FILE]
       FOLDER contains one JSON file for each run of Stable-Baselines3, CELL-sSEED.json

`rlox_cli.bench.learn` documents how the cells are judged. ``passes`` only means that the interval of (our IQM - theirs)
is not wholly below 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from rlox_cli.bench import learn
from rlox_cli.terminal.errors import UsageError

CELLS = [
    *("ppo-CartPole-v1", "ppo-Acrobot-v1", "ppo-Pendulum-v1", "ppo-LunarLander-v3", "ppo-Hopper-v5"),
    "ppo-HalfCheetah-v5",
    *("a2c-CartPole-v1", "a2c-Acrobot-v1", "a2c-Pendulum-v1"),
    *("dqn-CartPole-v1", "dqn-Acrobot-v1", "sac-Pendulum-v1", "td3-Pendulum-v1"),
    "sac-HalfCheetah-v5",
]
# Settings in which the reference differs from the tuned ones.
ARGUMENTS = {"td3-Pendulum-v1": ["total_timesteps=15_000", "algo.learning_starts=5_000"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102, 103, 104])
    parser.add_argument(
        "--runs", type=Path, default=Path("outputs/learning"), help="run folders; finished ones are kept"
    )
    parser.add_argument("--out", type=Path, help="JSON file; the curves go next to it as a PNG")
    args = parser.parse_args()
    console = Console(stderr=True, highlight=False)
    jobs = {}
    for cell in args.cells:
        algo, env = cell.split("-", 1)
        jobs |= learn.compose_cells([f"algo={algo}", f"env={env}", *ARGUMENTS.get(cell, ())])
    try:
        question = learn.ask(jobs, args.seeds, args.runs, console, "sb3", args.reference)
    except UsageError as e:
        parser.error(str(e))
    cells = {}
    for label, job in jobs.items():
        cells[label] = learn.measure(label, job, args.seeds, args.runs, 1, question, console)
        learn.describe(label, cells[label], Console(highlight=False))
    command = f"--reference FOLDER --cells {' '.join(args.cells)} --seeds {' '.join(map(str, args.seeds))}"
    found = learn.result(f"python benchmarks/learning.py {command}", cells)
    if args.out:
        learn.write(found, args.out)


if __name__ == "__main__":
    main()
