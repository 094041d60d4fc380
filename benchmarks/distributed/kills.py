"""Kill the actors of twenty trainings at random moments.

    python benchmarks/distributed/kills.py processes|grpc|ray [--rounds 20] [--seed 0] [--out FILE.json]

Every round trains IMPALA on CartPole-v1 with three actors and kills up to three of them with SIGKILL (``grpc``: the
workers that they are on, each of which restarts after a second). It reports whether the training finished with finite
weights, how many actors were lost and restarted, and how long it took. At the end no process of the rounds may be left.
Ray listens on all interfaces of a machine: run it where none is open, for example behind
``unshare -rn bash -c 'ip link set lo up; exec "$0" "$@"'``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import rlox
from rlox.checkpoint import versions
from rlox_cli.bench.machine import provenance

STEPS = 400_000
ACTORS = {"n_actors": 3, "n_envs": 8, "hidden_sizes": [32]}


class Actors:
    """The processes to kill: those of the actors themselves."""

    n_lost = 1  # actors lost by a kill, at least

    def settings(self) -> dict[str, Any]:
        return {}

    def alive(self, algorithm: rlox.IMPALA) -> list[int]:
        """Return the processes of the actors that have answered since their last start."""
        return [int(found[1]) for line in algorithm.collector.lines() if (found := re.search(r"pid (\d+)", line))]

    def kill(self, victim: int) -> None:
        os.kill(victim, signal.SIGKILL)


class Workers(Actors):
    """Three workers, one for each actor."""

    n_lost = 0  # the killed worker may have no actor

    def __init__(self) -> None:
        self._ports = [_free_port() for _ in range(ACTORS["n_actors"])]
        self._started = {port: self._start(port) for port in self._ports}
        for port in self._ports:
            _wait_for(port)

    def _start(self, port: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "rlox", "worker", "--env", "CartPole-v1", "--port", str(port)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def settings(self) -> dict[str, Any]:
        return {"worker_addresses": [f"127.0.0.1:{port}" for port in self._ports]}

    def alive(self, algorithm: rlox.IMPALA) -> list[int]:
        running = algorithm.counters.updates > 0  # a worker that is missing at the start is an error
        return [process.pid for process in self._started.values() if running and process.poll() is None]

    def kill(self, victim: int) -> None:
        port = next(port for port, process in self._started.items() if process.pid == victim)
        os.kill(victim, signal.SIGKILL)
        self._started[port].wait()
        time.sleep(1.0)
        self._started[port] = self._start(port)

    def close(self) -> None:
        for process in self._started.values():
            process.terminate()
        for process in self._started.values():
            process.wait(60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        time.sleep(0.1)
    raise TimeoutError(f"the worker at port {port} did not start")


class Killer(threading.Thread):
    """Kills one of `actors` after each of `waits` seconds, once all of them run."""

    def __init__(self, algorithm: rlox.IMPALA, actors: Actors, waits: list[float], rng: random.Random):
        super().__init__(daemon=True)
        self.algorithm, self.actors, self._waits, self._rng = algorithm, actors, waits, rng
        self.killed: list[int] = []
        self.over = threading.Event()

    def run(self) -> None:
        for wait in self._waits:
            while len(self.actors.alive(self.algorithm)) < ACTORS["n_actors"] and not self.over.wait(0.02):
                pass
            if self.over.wait(wait):
                return
            found = self.actors.alive(self.algorithm)
            victim = self._rng.choice(found) if found else None
            if victim is not None and victim not in self.killed:
                self.actors.kill(victim)
                self.killed.append(victim)


class Long(rlox.Callback):
    """Continues the training until every kill was made and all actors are back."""

    def __init__(self, killer: Killer):
        self._killer = killer

    def on_step(self, **_) -> bool:
        killer = self._killer
        missing = len(killer.actors.alive(killer.algorithm)) < ACTORS["n_actors"]
        missing |= restarts(killer.algorithm) < killer.actors.n_lost * len(killer.killed)
        return killer.is_alive() or missing or killer.algorithm.counters.env_steps < STEPS


def restarts(algorithm: rlox.IMPALA) -> int:
    return sum(int(re.search(r"(\d+) restart", line)[1]) for line in algorithm.collector.lines())


def descendants() -> set[int]:
    """Return the processes below this one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def one_round(kind: str, actors: Actors, number: int, rng: random.Random) -> dict[str, object]:
    settings = {**ACTORS, **actors.settings()}
    algorithm = rlox.IMPALA("CartPole-v1", seed=number, actors=kind, max_restarts=50, **settings)
    began = time.perf_counter()
    killer = Killer(algorithm, actors, [rng.uniform(0.05, 2.0) for _ in range(rng.randint(1, 3))], rng)
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
        survivors = set(killer.killed) & set(actors.alive(algorithm))
    finally:
        killer.over.set()
        algorithm.close()
    enough = found["killed"] * actors.n_lost <= found["restarts"]
    found["sound"] = finite and not survivors and enough and found["steps"] >= STEPS
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("processes", "grpc", "ray"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    before = descendants()
    actors = Workers() if options.kind == "grpc" else Actors()
    if options.kind == "ray":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        # One Ray for all rounds: starting it takes as long as a round.
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    rng, rounds = random.Random(options.seed), []
    try:
        for number in range(options.rounds):
            rounds.append(one_round(options.kind, actors, number, rng))
            print(json.dumps(rounds[-1]), flush=True)
    finally:
        if options.kind == "ray":
            ray.shutdown()
        if isinstance(actors, Workers):
            actors.close()
    deadline = time.monotonic() + 15
    while (left := descendants() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    command = f"python benchmarks/distributed/kills.py {options.kind} --rounds {options.rounds} --seed {options.seed}"
    result = {
        **provenance(command),
        "versions": versions(),
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
