"""What offline algorithms learn from datasets of our own policies: BC, TD3+BC, IQL and CQL on four sets of each task.

usage: offline.py [--envs ENV ...] [--sets SET ...] [--algos ALGO ...] [--seeds 0 1 2] [--updates N] [--runs DIR]
                  [--datasets-only] [--out FILE]

The sets are named as D4RL's (Fu et al. 2020, arXiv:2004.07219): ``random`` has uniform actions; ``medium`` those of a
SAC that was stopped at a third of the way from random to its end; ``medium-replay`` that SAC's replay memory;
``medium-expert`` half medium, half a SAC trained to its end. ``sac`` among the algorithms is CQL without its penalty:
what an online algorithm makes of the same data. Everything is made by the command line; finished parts are kept.

Printed are the final deterministic return (20 episodes; the mean over seeds with a 95 % interval of Student's t), the
mean return of the dataset's episodes, and the critics' mean value of 500 of its actions beside the discounted
returns that followed them (``dataset/q`` and ``dataset/return``, see `rlox.algorithms.offline`).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

import rlox
from rlox.checkpoint import versions
from rlox_cli.bench.machine import provenance


class Task(NamedTuple):
    """How the datasets of an environment are made."""

    medium: float  # evaluation return at which the medium policy is stopped
    behaviour: tuple[str, ...]  # settings of the SAC that makes them
    n_steps: int  # transitions of a dataset, but for the replay memory's
    updates: int  # of an offline training


TASKS = {
    "Pendulum-v1": Task(-800.0, (), 20_000, 10_000),
    "Hopper-v5": Task(1_000.0, ("total_timesteps=400_000",), 200_000, 100_000),
}
SETS = ("random", "medium", "medium-replay", "medium-expert")
# CQL's weight of 5 is the papers' for D4RL's rewards of about 1 a step; so it is here.
ALGOS = {
    "bc": ("algo=bc",),
    "td3_bc": ("algo=td3_bc",),
    "iql": ("algo=iql",),
    "cql": ("algo=cql",),
    "sac": ("algo=cql", "algo.cql_alpha=0.0", "algo.n_random_actions=1"),
}


def command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "rlox_cli.main", *words], check=True, stdout=subprocess.DEVNULL)


def finished(folder: Path) -> bool:
    record = folder / "metrics.jsonl"
    return record.is_file() and '"finished"' in record.read_text()


def train(folder: Path, *overrides: str) -> Path:
    """A run in `folder`, unless it is there."""
    if not finished(folder):
        command("train", *overrides, "logger=none", f"hydra.run.dir={folder}")
    return folder


def datasets(env: str, sets: list[str], runs: Path) -> dict[str, Path]:
    """The files of `sets`, made from two trainings of SAC where they are missing."""
    task, folder = TASKS[env], runs / env
    often = ("eval.n_points=200", "eval.n_episodes=5")
    sac = ("algo=sac", f"env={env}", "seed=0", *task.behaviour)
    paths = {name: folder / f"{name}.arrow" for name in sets}
    for name, path in paths.items():
        if path.is_file():
            continue
        print(f"{env}: making {path}", file=sys.stderr)
        written = ("--steps", str(task.n_steps), "--out", str(path))
        if name == "random":
            command("collect", "--env", env, *written)
            continue
        medium = train(folder / "medium", *sac, *often, f"eval.stop_at={task.medium}")
        checkpoint = f"medium={medium / 'checkpoints' / 'last.safetensors'}"
        if name == "medium":
            command("collect", checkpoint, *written)
        elif name == "medium-replay":
            command("collect", "--replay", str(medium), "--out", str(path))
        else:
            expert = train(folder / "expert", *sac)
            command("collect", checkpoint, f"expert={expert}", "--mix", "medium:0.5,expert:0.5", *written)
    return paths


def outcome(folder: Path) -> dict[str, float]:
    """The last evaluation of a run, and what its last update says of values."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {"return": [row["eval/mean_return"] for row in rows if "eval/mean_return" in row][-1]}
    for key in ("dataset/q", "dataset/return"):
        told = [row[key] for row in rows if key in row]
        found |= {key: told[-1]} if told else {}
    return found


def interval(values: list[float]) -> dict[str, float]:
    """Mean, and half the width of its 95 % interval by Student's t; NaN for a single value."""
    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n) if n > 1 else math.nan
    return {"mean": float(np.mean(values)), "half": float(half)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=["Pendulum-v1"], choices=TASKS)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--algos", nargs="+", default=list(ALGOS), choices=ALGOS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", type=int, help="updates of each training; by default the task's own")
    parser.add_argument("--runs", type=Path, default=Path("outputs/offline"), help="datasets and run folders")
    parser.add_argument("--datasets-only", action="store_true", help="make the datasets and stop")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for env in args.envs:
        paths = datasets(env, args.sets, args.runs)
        for name, path in paths.items():
            described = rlox.open_dataset(path).stats()
            behaviour = {key: described[key] for key in ("n_transitions", "n_episodes", "mean_return", "max_return")}
            print(f"{env} {name}: {behaviour}", file=sys.stderr)
            for algo in () if args.datasets_only else args.algos:
                updates = args.updates or TASKS[env].updates
                chosen = (*ALGOS[algo], f"dataset={path}", f"env={env}", f"total_timesteps={updates}")
                found = {
                    seed: outcome(train(args.runs / env / f"{algo}-{name}-{updates}-s{seed}", *chosen, f"seed={seed}"))
                    for seed in args.seeds
                }
                keys = next(iter(found.values()))
                summary = {key: interval([one[key] for one in found.values()]) for key in keys}
                cells.append(
                    {"env": env, "set": name, "algo": algo, "updates": updates, "behaviour": behaviour}
                    | {"summary": summary, "seeds": {str(seed): one for seed, one in found.items()}}
                )
                shown = ", ".join(f"{key} {x['mean']:.1f} ± {x['half']:.1f}" for key, x in summary.items())
                print(f"{env} {name} {algo}: {shown} (episodes of the data: {behaviour['mean_return']:.1f})")
    if args.out and cells:
        made = provenance(f"python benchmarks/offline.py {' '.join(sys.argv[1:])}")
        args.out.write_text(json.dumps({**made, "versions": versions(), "cells": cells}) + "\n")


if __name__ == "__main__":
    main()
