"""Does HybridPPO, which learns from rollouts that are one update old, reach the scores of PPO with PyTorch?

usage: hybrid.py [--seeds 100 101 102 103 104] [--out FILE]

Both use the tuned settings of PPO (without the normalisation of observations and rewards, which HybridPPO does not
have), and are scored as in benchmarks/learning.py: deterministic evaluation after training, 20 episodes, IQM over
seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

import rlox
from rlox.algorithms import PPO
from rlox.checkpoint import versions
from rlox_cli.bench.machine import provenance
from rlox_cli.report.statistics import difference

TUNED = Path(__file__).parent.parent / "conf" / "tuned" / "ppo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102, 103, 104])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cells = {}
    for env in ("CartPole-v1", "Acrobot-v1"):
        tuned = yaml.safe_load((TUNED / f"{env}.yaml").read_text())
        settings = {k: v for k, v in tuned["algo"].items() if k not in ("normalize_obs", "normalize_rewards")}
        n_envs, steps = tuned["env"]["n_envs"], tuned["total_timesteps"]
        scores: dict[str, list[float]] = {"hybrid": [], "torch": []}
        for seed in args.seeds:
            hybrid = rlox.HybridPPO(env, n_envs, seed, hidden=64, **settings)
            plain = PPO(env, n_envs, seed, backend="torch", **settings)
            for name, algorithm in (("hybrid", hybrid), ("torch", plain)):
                algorithm.train(steps)
                scores[name].append(float(algorithm.evaluate(20, seed=10_000 + seed).returns.mean()))
            hybrid.close()
        gap = difference([scores["hybrid"]], [scores["torch"]])
        cells[env] = {**scores, "difference": gap.value, "low": gap.low, "high": gap.high}
        print(env, json.dumps(cells[env]))
    if args.out:
        result = {**provenance("python benchmarks/hybrid.py"), "versions": versions(), "cells": cells}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
