"""Measure what checkpoints cost a training: the share of its time that they hold it up, and the writing thread's work.

usage: checkpointing.py [--seconds 200] [--every 60] [--out FILE]

It trains PPO on CartPole-v1, DQN on CartPole-v1 and SAC on Pendulum-v1, natively. The replay memories contain a million
transitions from the start: the first checkpoint writes all of them, and each further one only the new ones. Checkpoints
are saved at the default interval, and once at the end, where the training waits for it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from rlox import DQN, PPO, SAC
from rlox.callbacks import Callback, CheckpointCallback, TimeLimitCallback, TimingCallback
from rlox.checkpoint import versions
from rlox_cli.bench.machine import provenance

MILLION = 1_000_000


def filled(algorithm):
    """Return the algorithm with its memory full of random transitions."""
    rng = np.random.default_rng(0)
    spec, n = algorithm.spec, 10_000
    for _ in range(MILLION // n):
        obs = rng.normal(size=(n, spec.obs_dim)).astype(np.float32)
        shape = (n, 1) if spec.discrete else (n, spec.act_dim)
        actions = rng.integers(spec.n_actions, size=shape) if spec.discrete else rng.uniform(-1, 1, shape)
        ends = np.zeros(n, bool)
        algorithm.buffer.push_batch(obs, obs, actions.astype(np.float32), rng.normal(size=n), ends, ends)
    return algorithm


MAKERS = {
    "ppo": lambda: PPO("CartPole-v1", 8, 0),
    "dqn": lambda: filled(DQN("CartPole-v1", 1, 0, buffer_size=MILLION, learning_starts=0)),
    "sac": lambda: filled(SAC("Pendulum-v1", 1, 0, buffer_size=MILLION, learning_starts=0)),
}


class Saves(Callback):
    """Counts the checkpoints."""

    def __init__(self):
        self.n = 0

    def on_checkpoint(self, *, kind, **info):
        self.n += kind == "last"


def measure(name: str, seconds: float, every: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        algorithm = MAKERS[name]()
        timing, saves = TimingCallback(), Saves()
        limit, checkpoints = TimeLimitCallback(seconds), CheckpointCallback(Path(folder), every)
        algorithm.callbacks.extend([timing, saves, limit, checkpoints])
        beside = time.process_time() - time.thread_time()
        algorithm.train(10**9)
        beside = time.process_time() - time.thread_time() - beside
        summary = timing.summary()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
        steps = algorithm.counters.env_steps
        algorithm.close()
    total = summary["total_s"]
    return {
        "steps": steps,
        "seconds": total,
        "saves": saves.n,
        "held_share": summary["checkpoint"],
        "held_s_each": summary["checkpoint"] * total / saves.n,
        "cpu_s_beside_each": beside / saves.n,
        "bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    for name in MAKERS:
        found[name] = measure(name, args.seconds, args.every)
        print(name, json.dumps(found[name]), flush=True)
    if args.out:
        command = f"python benchmarks/checkpointing.py --seconds {args.seconds:g} --every {args.every:g}"
        args.out.write_text(json.dumps({**provenance(command), "versions": versions(), "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
