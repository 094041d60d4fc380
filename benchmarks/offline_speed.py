"""Measure updates per CPU second of offline algorithms: rlox, the original of that name, and SB3's TD3 and SAC.

usage: offline_speed.py --original PYTHON --sb3 PYTHON [--rounds N] [--out FILE]
       offline_speed.py --one SYSTEM CASE UPDATES     (how the interpreters are called)

The systems are called in turn, each in its own process with one thread, on the same 20,000 random transitions (11
numbers per observation, 3 per action), with two layers of 256 units and batches of 256. SB3 has no offline algorithms.
Its TD3 and SAC do the half of the work of TD3+BC and IQL that they share, and a twentieth of CQL's: for every pair of
state and action that SAC's critics learn from, CQL's penalty evaluates 20 more, so no CQL can come near. For rlox, only
the updates are timed, without the hundred reports of a training, with the backend that ``auto`` chooses and also with
PyTorch (``pytorch``). The medians of the rounds are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

# Timed updates per round.
CASES = {"bc": 1500, "td3_bc": 600, "iql": 500, "cql": 60}
SB3 = {"td3_bc": "td3", "cql": "sac", "iql": "sac"}
N, OBS_DIM, ACT_DIM, BATCH = 20_000, 11, 3, 256


def transitions():
    import numpy as np

    rng = np.random.default_rng(0)
    obs = rng.normal(size=(N, OBS_DIM)).astype(np.float32)
    actions = rng.uniform(-1, 1, (N, ACT_DIM)).astype(np.float32)
    over = np.arange(N) % 100 == 99
    return obs, actions, rng.normal(size=N).astype(np.float32), over.astype(np.uint8)


def offline(system, case):
    """Return a function that runs a number of updates, in rlox or in the original."""
    import numpy as np

    import rlox
    from rlox.algorithms.bc import BC
    from rlox.algorithms.cql import CQL
    from rlox.algorithms.iql import IQL
    from rlox.algorithms.td3_bc import TD3BC

    obs, actions, rewards, over = transitions()
    data = rlox.OfflineDatasetBuffer(
        obs.ravel(), obs.ravel(), actions.ravel(), rewards, over, np.zeros(N, np.uint8), normalize=True
    )
    options = {"backend": "torch"} if system == "pytorch" else {}
    algorithm = {"bc": BC, "td3_bc": TD3BC, "iql": IQL, "cql": CQL}[case](data, OBS_DIM, ACT_DIM, **options)
    if system == "original":
        return algorithm.train
    update = algorithm.update_native if algorithm.backend == "native" else algorithm.update

    def run(n):
        for _ in range(n):
            update(algorithm.sample())
            algorithm.counters.updates += 1

    return run


def sb3(case):
    import gymnasium
    import numpy as np
    import stable_baselines3
    from stable_baselines3.common.logger import configure

    class Shapes(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-10, 10, (OBS_DIM,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 1, (ACT_DIM,), np.float32)

    kind = {"td3": stable_baselines3.TD3, "sac": stable_baselines3.SAC}[case]
    nets = {"net_arch": [256, 256]}
    model = kind("MlpPolicy", Shapes(), 3e-4, N, batch_size=BATCH, policy_kwargs=nets, device="cpu")
    model.set_logger(configure(None, []))
    obs, actions, rewards, over = transitions()
    for i in range(N):
        row = slice(i, i + 1)
        model.replay_buffer.add(obs[row], obs[row], actions[row], rewards[row], over[row], [{}])
    return lambda n: model.train(n, BATCH)


def one(system, case, n):
    import torch

    torch.set_num_threads(1)
    run = sb3(case) if system == "sb3" else offline(system, case)
    run(n // 10)
    began = time.process_time()
    run(n)
    print(json.dumps(n / (time.process_time() - began)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--original", help="interpreter that has rlox 1.2.0, the original")
    parser.add_argument("--sb3", help="interpreter that has Stable-Baselines3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one[0], args.one[1], int(args.one[2]))
        return
    calls = [("rlox", sys.executable, case, case) for case in CASES]
    calls += [("pytorch", sys.executable, case, case) for case in CASES]
    calls += [("original", args.original, case, case) for case in CASES if args.original]
    calls += [("sb3", args.sb3, case, theirs) for case, theirs in SB3.items() if args.sb3]
    calls.sort(key=lambda call: list(CASES).index(call[2]))
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    found = {(case, system): [] for system, _, case, _ in calls}
    script = str(Path(__file__).resolve())
    for _ in range(args.rounds):
        for system, python, case, theirs in calls:
            words = [python, script, "--one", system, theirs, str(CASES[case])]
            # Run elsewhere: a checkout in the working folder would hide the interpreter's own rlox.
            done = subprocess.run(words, check=True, capture_output=True, text=True, env=quiet, cwd="/")
            found[case, system].append(json.loads(done.stdout.splitlines()[-1]))
    result = {}
    for (case, system), speeds in found.items():
        result.setdefault(case, {})[system] = {"updates_per_cpu_s": statistics.median(speeds), "rounds": speeds}
    for case, systems in result.items():
        ours = systems["rlox"]["updates_per_cpu_s"]
        ratios = [f"{name} {x['updates_per_cpu_s']:.0f} ({ours / x['updates_per_cpu_s']:.2f}x)" for name, x in
                  systems.items() if name != "rlox"]  # fmt: skip
        print(f"{case}: rlox {ours:.0f} updates per CPU second; {', '.join(ratios)}")
    if args.out:
        from rlox.checkpoint import versions
        from rlox_cli.bench.machine import provenance

        made = provenance(f"python benchmarks/offline_speed.py --original PYTHON --sb3 PYTHON --rounds {args.rounds}")
        args.out.write_text(json.dumps({**made, "versions": versions(), "cases": result}) + "\n")


if __name__ == "__main__":
    main()
