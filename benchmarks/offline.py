"""Measure what BC, TD3+BC, IQL and CQL learn from datasets of rlox's own policies, four datasets for each task.

usage: offline.py [--envs ENV ...] [--sets SET ...] [--algos ALGO ...] [--seeds 100 101 102] [--updates N] [--runs DIR]
                  [--datasets-only] [--out FILE]

The datasets are named like D4RL's (Fu et al. 2020, arXiv:2004.07219): ``random`` has uniform actions; ``medium`` the
actions of a SAC that was stopped a third of the way from random to good, or after its steps; ``medium-replay`` is the
replay memory of that SAC; ``medium-expert`` is half medium, half from a SAC trained to its end. The algorithm ``sac``
is CQL without its penalty: it shows what an online algorithm learns from the same data. Everything is made with the
command line; finished parts are kept.

The script prints the final deterministic return (20 episodes; the mean over seeds with a 95 % interval of Student's t),
the mean return of the dataset's episodes, and the critics' mean value of 500 of the dataset's actions with the
discounted returns that followed them (``dataset/q`` and ``dataset/return``, see `rlox.training.offline`). If the
simulator can be put into a state of the dataset, it also prints the critics' value of the learned policy's own actions
in 200 such states (``policy/q``), and the discounted sum of the 500 rewards that the policy then gets
(``policy/return``).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from scipy import stats

import rlox
from rlox import algorithms
from rlox.checkpoint import load_checkpoint, versions
from rlox_cli.bench.machine import provenance


class Task(NamedTuple):
    """How the datasets of an environment are made, and how its simulator is put into a state."""

    medium: float  # evaluation return at which the medium policy is stopped, if it is reached
    behaviour: tuple[str, ...]  # settings of the SAC that makes the datasets
    n_steps: int  # transitions of a dataset, except medium-replay
    place: Callable[[gymnasium.Env, np.ndarray], None] | None = None  # puts the environment into the state


def place_pendulum(env: gymnasium.Env, obs: np.ndarray) -> None:
    env.unwrapped.state = np.array([math.atan2(obs[1], obs[0]), obs[2]])


TASKS = {
    "Pendulum-v1": Task(-800.0, ("algo.learning_rate=0.0001", "total_timesteps=20_000"), 20_000, place_pendulum),
    "Hopper-v5": Task(1_000.0, ("total_timesteps=200_000",), 200_000),
}
SETS = ("random", "medium", "medium-replay", "medium-expert")
# CQL's weight is 5, as in the papers for D4RL, where rewards are about 1 per step.
ALGOS = {
    "bc": ("algo=bc",),
    "td3_bc": ("algo=td3_bc",),
    "iql": ("algo=iql",),
    "cql": ("algo=cql",),
    "sac": ("algo=cql", "algo.cql_alpha=0.0", "algo.n_random_actions=1"),
}
LEARNERS = {x.name: x for x in (algorithms.BC, algorithms.TD3BC, algorithms.IQL, algorithms.CQL)}


def command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "rlox_cli.main", *words], check=True, stdout=subprocess.DEVNULL)


def finished(folder: Path) -> bool:
    record = folder / "metrics.jsonl"
    return record.is_file() and '"finished"' in record.read_text()


def train(folder: Path, *overrides: str) -> Path:
    """Train a run in `folder`, unless it is finished, and return the folder."""
    if not finished(folder):
        command("train", *overrides, "logger=none", f"hydra.run.dir={folder}")
    return folder


def datasets(env: str, sets: list[str], runs: Path) -> dict[str, Path]:
    """Return the files of `sets`; missing ones are made from two trainings of SAC."""
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
    """Return the last evaluation of a run, its updates until then, and the values in its last report."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "eval/mean_return" in row][-1]
    found = {"updates": evaluated["step"], "return": evaluated["eval/mean_return"]}
    for key in ("dataset/q", "dataset/return"):
        reported = [row[key] for row in rows if key in row]
        found |= {key: reported[-1]} if reported else {}
    return found


def judged(folder: Path, env: str, dataset: Path, place: Callable[..., None]) -> dict[str, float]:
    """Return the critics' values of a run's policy in states of the dataset, and the returns of the policy there."""
    n_states, n_steps = 200, 500
    path = folder / "checkpoints" / "last.safetensors"
    algorithm = LEARNERS[load_checkpoint(path).header["algorithm"]].from_checkpoint(path)
    if algorithm.critics is None:
        return {}
    torch.manual_seed(0)
    everything = rlox.open_dataset(dataset).get_state()["obs"]
    obs = np.array(everything[np.linspace(0, len(everything) - 1, n_states).astype(np.int64)], np.float32)
    envs = [gymnasium.make(env, max_episode_steps=n_steps + 1) for _ in range(n_states)]
    for one, seen in zip(envs, obs, strict=True):
        one.reset()
        place(one, seen)
    actions = algorithm.predict(obs, deterministic=False)
    with torch.no_grad():
        q = algorithm.critics(torch.from_numpy(obs), algorithm.policy.to_unit(torch.from_numpy(actions))).mean()
    returns, discount = np.zeros(n_states), 1.0
    for _ in range(n_steps):
        steps = [one.step(action) for one, action in zip(envs, actions, strict=True)]
        returns += discount * np.array([step[1] for step in steps], np.float64)
        discount *= algorithm.config.gamma
        actions = algorithm.predict(np.stack([step[0] for step in steps]), deterministic=False)
    return {"policy/q": float(q), "policy/return": float(returns.mean())}


def interval(values: list[float]) -> dict[str, float]:
    """Return the mean, and half the width of its 95 % interval of Student's t; NaN for a single value."""
    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n) if n > 1 else math.nan
    return {"mean": float(np.mean(values)), "half": float(half)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=["Pendulum-v1"], choices=TASKS)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--algos", nargs="+", default=list(ALGOS), choices=ALGOS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102])
    parser.add_argument("--updates", type=int, help="updates of each training; by default as tuned")
    parser.add_argument("--runs", type=Path, default=Path("outputs/offline"), help="datasets and run folders")
    parser.add_argument("--datasets-only", action="store_true", help="make the datasets and stop")
    parser.add_argument("--out", type=Path, help="JSON file; its results of other environments are kept")
    args = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for env in args.envs:
        paths = datasets(env, args.sets, args.runs)
        for name, path in paths.items():
            described = rlox.open_dataset(path).stats()
            behaviour = {key: described[key] for key in ("n_transitions", "n_episodes", "mean_return", "max_return")}
            print(f"{env} {name}: {behaviour}", file=sys.stderr)
            for algo in () if args.datasets_only else args.algos:
                task = TASKS[env]
                chosen = (*ALGOS[algo], f"dataset={path}", f"env={env}")
                chosen += (f"total_timesteps={args.updates}",) if args.updates else ()
                found = {}
                for seed in args.seeds:
                    folder = train(args.runs / env / f"{algo}-{name}-s{seed}", *chosen, f"seed={seed}")
                    found[seed] = outcome(folder)
                    updates = int(found[seed].pop("updates"))
                    if task.place:
                        found[seed] |= judged(folder, env, path, task.place)
                keys = next(iter(found.values()))
                summary = {key: interval([one[key] for one in found.values()]) for key in keys}
                cells.append(
                    {"env": env, "set": name, "algo": algo, "updates": updates, "behaviour": behaviour}
                    | {"summary": summary, "seeds": {str(seed): one for seed, one in found.items()}}
                )
                shown = ", ".join(f"{key} {x['mean']:.1f} ± {x['half']:.1f}" for key, x in summary.items())
                data = f"episodes of the data: {behaviour['mean_return']:.1f}"
                print(f"{env} {name} {algo}, {updates} updates: {shown} ({data})")
    if args.out and cells:
        reported = json.loads(args.out.read_text()) if args.out.is_file() else {}
        made = provenance(f"python benchmarks/offline.py {' '.join(sys.argv[1:])}")
        for env in args.envs:
            reported[env] = {**made, "versions": versions(), "cells": [cell for cell in cells if cell["env"] == env]}
        args.out.write_text(json.dumps(reported) + "\n")


if __name__ == "__main__":
    main()
