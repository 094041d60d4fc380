"""Twenty trainings whose actors on Ray are killed at random moments, each as IMPALA and on one Ray of this machine.

    python benchmarks/distributed/kills_ray.py [--rounds 20] [--seed 0] [--out FILE.json]

Every round trains CartPole-v1 by IMPALA with three actors, kills up to three of them with SIGKILL, and says whether the
training came to its end with finite weights, how many actors were lost and started anew, and how long the learner took.
At the end no process of the rounds may be left. Ray listens on all interfaces of a machine: run it where none is open,
for example behind ``unshare -rn bash -c 'ip link set lo up; exec "$0" "$@"'``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import threading
import time
import warnings
from pathlib import Path

import numpy as np

import rlox
from rlox.checkpoint import versions
from rlox.config import RayConfig
from rlox_cli.bench.machine import provenance

STEPS = 400_000
ACTORS = {"n_actors": 3, "n_envs": 8, "hidden_sizes": [32]}


class Killer(threading.Thread):
    """Kills an actor of `algorithm` after each of `waits` seconds, once all of them run."""

    def __init__(self, algorithm: rlox.IMPALA, waits: list[float], rng: random.Random):
        super().__init__(daemon=True)
        self.algorithm, self._waits, self._rng = algorithm, waits, rng
        self.killed: list[int] = []
        self.over = threading.Event()

    def run(self) -> None:
        for wait in self._waits:
            while len(found := pids(self.algorithm)) < ACTORS["n_actors"] and not self.over.wait(0.02):
                pass
            if self.over.wait(wait):
                return
            found = pids(self.algorithm)
            victim = self._rng.choice(found) if found else None
            if victim is not None and victim not in self.killed:
                os.kill(victim, signal.SIGKILL)
                self.killed.append(victim)


class Long(rlox.Callback):
    """Trains on until every kill was made and is made good."""

    def __init__(self, killer: Killer):
        self._killer = killer

    def on_step(self, **_) -> bool:
        algorithm = self._killer.algorithm
        missing = len(pids(algorithm)) < ACTORS["n_actors"] or restarts(algorithm) < len(self._killer.killed)
        return self._killer.is_alive() or missing or algorithm.counters.env_steps < STEPS


def pids(algorithm: rlox.IMPALA) -> list[int]:
    """Processes of the actors that have answered since they were started last."""
    return [int(found[1]) for line in algorithm.collector.lines() if (found := re.search(r"pid (\d+)", line))]


def restarts(algorithm: rlox.IMPALA) -> int:
    return sum(int(re.search(r"(\d+) restart", line)[1]) for line in algorithm.collector.lines())


def descendants() -> set[int]:
    """Processes below this one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def one_round(number: int, rng: random.Random) -> dict[str, object]:
    algorithm = rlox.IMPALA("CartPole-v1", seed=number, actors="ray", ray=RayConfig(), max_restarts=50, **ACTORS)
    began = time.perf_counter()
    killer = Killer(algorithm, [rng.uniform(0.05, 2.0) for _ in range(rng.randint(1, 3))], rng)
    algorithm.callbacks.callbacks.append(Long(killer))
    killer.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # one for each loss
            algorithm.train(10**9)
        found = {
            "round": number,
            "killed": len(killer.killed),
            "restarts": restarts(algorithm),
            "steps": algorithm.counters.env_steps,
            "mean_return": round(algorithm.counters.mean_reward, 1),
            "seconds": round(time.perf_counter() - began, 1),
        }
        finite = all(np.isfinite(array).all() for array in algorithm.native.weights().values())
        survivors = set(killer.killed) & set(pids(algorithm))
    finally:
        killer.over.set()
        algorithm.close()
    found["sound"] = finite and not survivors and found["killed"] <= found["restarts"] and found["steps"] >= STEPS
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    before = descendants()
    # One for all rounds: to start it takes as long as a round.
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    rng, rounds = random.Random(options.seed), []
    for number in range(options.rounds):
        rounds.append(one_round(number, rng))
        print(json.dumps(rounds[-1]), flush=True)
    ray.shutdown()
    deadline = time.monotonic() + 15
    while (left := descendants() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    command = f"python benchmarks/distributed/kills_ray.py --rounds {options.rounds} --seed {options.seed}"
    result = {
        **provenance(command),
        "versions": versions(),
        "ray": ray.__version__,
        "rounds": len(rounds),
        "sound": sum(bool(one["sound"]) for one in rounds),
        "killed": sum(one["killed"] for one in rounds),
        "restarts": sum(one["restarts"] for one in rounds),
        "processes_left": len(left),
    }
    print(json.dumps(result))
    if options.out is not None:
        options.out.write_text(json.dumps({**result, "each": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
