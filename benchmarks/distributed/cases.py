"""Measure one training of IMPALA or APPO from within: frames, CPU time of all its processes, waiting, lag.

The other scripts of this folder import this module. Run it by itself to measure one case in a separate process:
`python benchmarks/distributed/cases.py '{"env": "CartPole-v1", "frames": 200000}'`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import gymnasium
import numpy as np

import rlox

_TICKS = os.sysconf("SC_CLK_TCK")


class Slow(gymnasium.Env):
    """An environment whose step takes `step_s` seconds and no CPU time, like a simulator on another machine."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, step_s: float):
        self.step_s = step_s
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(self.step_s)
        self.steps += 1
        return np.full(4, self.steps % 7 / 7, np.float32), float(action), False, self.steps >= 200, {}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all of its living descendants."""
    parents, spent = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry)] = int(words[1])
            spent[int(entry)] = (int(words[11]) + int(words[12])) / _TICKS
    mine, found = {os.getpid()}, {os.getpid()}
    while found:
        found = {pid for pid, parent in parents.items() if parent in found} - mine
        mine |= found
    return sum(spent.get(pid, 0.0) for pid in mine - {os.getpid()}) + time.process_time()


class Meter(rlox.Callback):
    """Reads the clocks after each update; the first `warm` frames are left out."""

    def __init__(self, warm: int):
        self.warm = warm
        self.rows: list[dict[str, float]] = []
        self.first: tuple[float, ...] | None = None
        self.last: tuple[float, ...] = ()

    def on_step(self, step: int, metrics: dict[str, float], **info: Any) -> bool:
        if self.first is None:
            if step >= self.warm:
                # The learner is this thread; its actors may be other threads of this process.
                self.first = (step, time.perf_counter(), cpu_seconds(), time.thread_time())
            return True
        self.rows.append(metrics)
        self.last = (step, time.perf_counter(), 0.0, time.thread_time())
        return True

    def on_training_end(self, **info: Any) -> None:
        self.last = (*self.last[:2], cpu_seconds(), self.last[3])


def measure(
    env: str,
    frames: int,
    *,
    algo: str = "IMPALA",
    n_actors: int = 2,
    n_envs: int = 16,
    seed: int = 0,
    slow_s: float = 0.0,
    warm: int | None = None,
    remote: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Return what one training takes; `slow_s` > 0 replaces the environment by `Slow`. Times are in seconds.

    `remote` has the fields of `rlox.RemoteConfig`.
    """
    if remote is not None:
        arguments["remote"] = rlox.RemoteConfig(**remote)
    meter = Meter(frames // 5 if warm is None else warm)
    make: Any = (lambda: Slow(slow_s)) if slow_s else env
    load = os.getloadavg()[0]
    agent = getattr(rlox, algo)(make, n_actors=n_actors, n_envs=n_envs, seed=seed, callbacks=[meter], **arguments)
    try:
        agent.train(total_timesteps=frames)
    finally:
        agent.close()
    assert meter.first is not None
    steps, wall, cpu, learner = (after - before for after, before in zip(meter.last, meter.first, strict=True))
    rows = meter.rows
    per_rollout = agent.config.n_steps * n_envs
    collect = [per_rollout / row[f"time/actor{i}_steps_per_second"] for row in rows for i in range(n_actors)]
    return {
        "frames": int(steps),
        "updates": len(rows),
        "wall_s": wall,
        "cpu_s": cpu,
        "frames_per_s": steps / wall,
        "frames_per_cpu_s": steps / cpu,
        "learner_cpu_s": learner,
        "learner_cpu_per_update_s": learner / len(rows),
        "learner_busy_per_update_s": statistics.fmean(
            row["time/collect_s"] - row["time/learner_waits_s"] + row["time/update_s"] for row in rows
        ),
        "learner_idle": sum(row["time/learner_waits_s"] for row in rows) / wall,
        "lag_mean": statistics.fmean(row["actors/lag_mean"] for row in rows),
        "lag_max": max(row["actors/lag_max"] for row in rows),
        "collect_s": statistics.fmean(collect),
        "collect_cv": statistics.pstdev(collect) / statistics.fmean(collect),
        "load_before": load,
        "load_after": os.getloadavg()[0],
    }


def alone(before: Sequence[str] = (), **case: Any) -> dict[str, Any]:
    """Run `measure` in a separate process, so that nothing of another case is counted; `before` precedes its
    command."""
    done = subprocess.run(
        [*before, sys.executable, __file__, json.dumps(case)], capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        raise RuntimeError(f"cases.py: {case} must run, got exit code {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
