"""Measure what an update of DreamerV3 costs on one CPU core, and where its time goes.

    OMP_NUM_THREADS=1 python benchmarks/world_models/updates.py

This writes benchmarks/world_models/updates.json: CPU seconds of an update (median and range of several) and of its
parts.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rlox
from rlox.checkpoint import versions
from rlox_cli.bench.machine import provenance

# For the sizes in the issue: settings, warm-up updates, measured updates.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "200k, 16 x 16": ({"size": "200k", "batch_size": 16, "seq_len": 16}, 10, 60),
    "1m, 16 x 64": ({"size": "1m", "batch_size": 16, "seq_len": 64}, 3, 15),
}


def measure(settings: dict[str, Any], n_warm: int, n: int) -> dict[str, Any]:
    """Return the CPU seconds of `n` updates on CartPole-v1, and of their parts."""
    agent = rlox.DreamerV3("CartPole-v1", seed=0, learning_starts=1500, **settings)
    agent.train(total_timesteps=1500)
    parts: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                parts[name] += time.process_time() - begun

        return wrapped

    for _ in range(n_warm):
        agent.update(agent.sample())
    rssm = agent.policy.rssm
    rssm.observe = timed("observe, forward", rssm.observe)
    agent.imagine = timed("imagine", agent.imagine)
    agent.optimizer.step = timed("backward and LaProp", agent.optimizer.step)
    agent.sample = timed("sample", agent.sample)
    each = []
    for _ in range(n):
        begun = time.process_time()
        agent.update(agent.sample())
        each.append(time.process_time() - begun)
    agent.close()
    found = {name: value / n for name, value in parts.items()}
    found["heads and losses, forward"] = float(np.mean(each)) - sum(found.values())
    n_parameters = sum(p.numel() for p in [*agent.policy.parameters(), *agent.heads.parameters()])
    low, middle, high = np.quantile(each, [0.1, 0.5, 0.9])
    return {"parameters": n_parameters, "median_s": middle, "low_s": low, "high_s": high, "parts_s": found}


def main() -> None:
    torch.set_num_threads(1)
    cases = {}
    for name, (settings, n_warm, n) in CASES.items():
        cases[name] = measure(settings, n_warm, n)
        print(name, json.dumps(cases[name]), flush=True)
    result = {
        **provenance("OMP_NUM_THREADS=1 python benchmarks/world_models/updates.py"),
        "versions": versions(),
        "cases": cases,
    }
    Path(__file__).with_name("updates.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
