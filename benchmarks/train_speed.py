"""CPU seconds of training PPO on CartPole-v1 (8 environments x 128 steps), ours against peers, in alternation.

usage: train_speed.py [--steps N] [--rounds R] [--out FILE] [--peer NAME=PYTHON ...]
       NAME is sb3 or original; PYTHON is an interpreter that has Stable-Baselines3, or the Rust rlox 1.2.0, installed
       (the original needs an environment of its own: it has our import name)

Every system gets the same settings, one thread, and a process of its own for each round; counted is process CPU time
of the
training call alone (imports and construction excluded), and wall time beside it. The learning each speed bought
stands next to it: the mean return of the last 100 training episodes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import datetime, timezone

COMMON = """
import json, os, sys, time, warnings
warnings.filterwarnings("ignore")
steps, seed = int(sys.argv[1]), int(sys.argv[2])
import torch
torch.set_num_threads(1)
def report(train, mean_return, **more):
    cpu, wall = time.process_time(), time.perf_counter()
    train()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(json.dumps({"cpu_s": cpu, "wall_s": wall, "mean_return": mean_return(), "torch": torch.__version__, **more}))
"""
# Settings of the seeds' PPO; a different name for the same thing in each system.
SYSTEMS = {
    "rlox": """
import rlox
from rlox.algorithms import PPO
from rlox.kernels import CPU_LEVEL
ppo = PPO("CartPole-v1", n_envs=8, seed=seed, n_steps=128, n_epochs=4, batch_size=256, learning_rate=2.5e-4,
          learning_rate_schedule="linear", clip_eps=0.2, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5)
result = {}
report(lambda: result.update(ppo.train(steps)), lambda: result["mean_reward"],
       version=rlox.__version__, cpu_level=CPU_LEVEL)
""",
    "sb3": """
import stable_baselines3 as sb3
from stable_baselines3.common.env_util import make_vec_env
ppo = sb3.PPO("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), seed=seed, device="cpu", n_steps=128, n_epochs=4,
              batch_size=256, learning_rate=lambda left: left * 2.5e-4, clip_range=0.2, ent_coef=0.01, vf_coef=0.5,
              max_grad_norm=0.5)
report(lambda: ppo.learn(steps), lambda: sum(e["r"] for e in ppo.ep_info_buffer) / len(ppo.ep_info_buffer),
       version=sb3.__version__)
""",
    # The original's metric is no episode return (its mean_reward is the reward of a rollout per environment): null.
    "original": """
from importlib.metadata import version
from rlox.algorithms.ppo import PPO
ppo = PPO("CartPole-v1", n_envs=8, seed=seed, n_steps=128, n_epochs=4, batch_size=256, learning_rate=2.5e-4,
          clip_eps=0.2, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5)
report(lambda: ppo.train(steps), lambda: None, version=version("rlox"))
""",
}


def measure(python: str, system: str, steps: int, seed: int) -> dict:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [python, "-c", COMMON + SYSTEMS[system], str(steps), str(seed)]
    # Not from the checkout: its ./rlox would stand before the original's package of the same name.
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"train_speed: {system} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--out")
    args = parser.parse_args()
    pythons = {"rlox": sys.executable, **dict(peer.split("=", 1) for peer in args.peer)}
    runs: dict[str, list[dict]] = {name: [] for name in pythons}
    for seed in range(args.rounds):
        for name, python in pythons.items():
            runs[name].append(measure(python, name, args.steps, seed))
            print(f"round {seed + 1} {name:9} {json.dumps(runs[name][-1])}", file=sys.stderr)
    medians = {name: statistics.median(run["cpu_s"] for run in of) for name, of in runs.items()}
    result = {
        "command": " ".join(
            ["python benchmarks/train_speed.py", f"--steps {args.steps} --rounds {args.rounds}"]
            + [f"--peer {name}=PYTHON" for name in pythons if name != "rlox"]
        ),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "median_cpu_s": medians,
        "ratio_to_rlox": {name: round(medians[name] / medians["rlox"], 2) for name in medians if name != "rlox"},
        "runs": runs,
    }
    text = json.dumps(result, indent=1)
    if args.out:
        with open(args.out, "w") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
