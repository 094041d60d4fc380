"""Measure environment steps per second of worker processes: rlox's and gymnasium's AsyncVectorEnv, in turns.

usage: parallel_envs.py [--env HalfCheetah-v5] [--envs 1 2 4 8] [--rounds 3] [--seconds 2] [--out FILE]

N environments run on N workers each, with random actions drawn beforehand and one thread per worker; results are
medians over the rounds. For comparison, the same N environments are stepped in this process: workers pay off only if
they are faster than that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ["OMP_NUM_THREADS"] = "1"

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from rlox.checkpoint import versions
from rlox.envs.gym_vec_env import GymVecEnv
from rlox.envs.parallel_env import ParallelGymVecEnv
from rlox_cli.bench.machine import provenance


def speed(step, actions: np.ndarray, seconds: float) -> float:
    """Return the steps per second of `step(actions)`, over all environments together."""
    done, until, started = 0, time.perf_counter() + seconds, time.perf_counter()
    while time.perf_counter() < until:
        for action in actions:
            step(action)
        done += actions.shape[0] * actions.shape[1]
    return done / (time.perf_counter() - started)


def measure(system: str, env: str, n: int, seconds: float) -> float:
    if system == "gymnasium":
        vec = gymnasium.make_vec(
            env, n, vectorization_mode="async", vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}
        )
        vec.reset(seed=0)
        step, space = vec.step, vec.single_action_space
    else:
        vec = ParallelGymVecEnv(env, n, workers=n) if system == "rlox" else GymVecEnv(env, n)
        vec.reset_all()
        step, space = vec.step_all, gymnasium.make(env).action_space
    actions = np.random.default_rng(0).uniform(space.low, space.high, (64, n, *space.shape)).astype(np.float32)
    try:
        speed(step, actions, 0.3)
        return speed(step, actions, seconds)
    finally:
        vec.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--envs", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out")
    args = parser.parse_args()
    table = {}
    for n in args.envs:
        runs: dict[str, list[float]] = {"rlox": [], "gymnasium": [], "in_process": []}
        for _ in range(args.rounds):
            for system, of in runs.items():
                of.append(measure(system, args.env, n, args.seconds))
        medians = {system: round(statistics.median(of)) for system, of in runs.items()}
        table[n] = {**medians, "ratio": round(medians["rlox"] / medians["gymnasium"], 2)}
        print(n, table[n])
    if args.out:
        result = {
            **provenance(f"python benchmarks/parallel_envs.py --env {args.env} --rounds {args.rounds}"),
            "versions": versions(),
            "steps_per_second": table,
        }
        with open(args.out, "w") as file:
            file.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
