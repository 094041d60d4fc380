"""Measure what evaluations cost a run, with whole `rlox train` commands: in place and beside training, in turns.

usage: evaluation.py [--rounds 3] [--only halfcheetah,lunarlander,atari] [--before RLOX] [--scale 1.0] [--out FILE]

Each round trains every task with each system, one after the other: `in place` (eval.workers=0, in the training
process), `beside` (eval.workers=-1, in another process), and with --before the rlox command of another installation. It
measures wall and CPU seconds of the command and everything that it starts, and how busy the machine was before and
during each run. A difference in an evaluation, or in the weights of the best checkpoint, stops the measurement. FILE
keeps the results of tasks that were measured before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlox.checkpoint import load_checkpoint, versions
from rlox.tracking import durable_rows
from rlox_cli.bench.machine import provenance

# Arguments of `rlox train`, and environment steps.
TASKS = {
    "halfcheetah": (["algo=ppo", "env=HalfCheetah-v5"], 60_000),
    "lunarlander": (["algo=ppo", "env=LunarLander-v3"], 200_000),
    "atari": (["experiment=atari-ppo", "eval.n_points=4", "eval.n_episodes=3"], 6_144),
}
SYSTEMS = {"in place": ["eval.workers=0"], "beside": ["eval.workers=-1"]}


def train(command: list[str], words: list[str], folder: Path) -> dict[str, float]:
    """Return the wall and CPU seconds of one run, the load before it, and the CPU seconds of other processes."""
    before, load = os.times(), os.getloadavg()[0]
    idle, started = _idle_s(), time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = [*command, "train", *words, "logger=none", f"hydra.run.dir={folder}"]
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    wall, idle = time.perf_counter() - started, _idle_s() - idle
    if done.returncode:
        raise SystemExit(f"{' '.join(run)} failed:\n{done.stderr}")
    after = os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])
    others = max(0.0, wall * os.cpu_count() - idle - cpu)
    return {"wall_s": wall, "cpu_s": cpu, "load_before": load, "cpu_s_of_others": others}


def _idle_s() -> float:
    """Return how many seconds the cores have been idle, summed over the cores."""
    with open("/proc/stat") as file:
        return sum(map(int, file.readline().split()[4:6])) / os.sysconf("SC_CLK_TCK")


def result(folder: Path) -> tuple[list[tuple[int, float]], dict[str, bytes]]:
    """Return the outcome of a run: its evaluations, and the weights of its best checkpoint."""
    rows = [(row["step"], row["eval/mean_return"]) for row in durable_rows(folder) if "eval/mean_return" in row]
    best = load_checkpoint(folder / "checkpoints" / "best.safetensors").tensors["policy"]
    return rows, {name: array.tobytes() for name, array in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(TASKS))
    parser.add_argument("--before", help="the rlox command of an earlier version")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the steps")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    here = [sys.executable, "-m", "rlox_cli.main"]
    systems = {name: (here, words) for name, words in SYSTEMS.items()}
    if args.before:
        systems = {"before": ([args.before], []), **systems}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name in args.only.split(","):
        words, steps = TASKS[name]
        words = [*words, f"total_timesteps={int(steps * args.scale)}"]
        found[name] = {system: [] for system in systems}
        firsts: dict[bool, tuple[list[tuple[int, float]], dict[str, bytes]]] = {}
        for _ in range(args.rounds):
            for system, (command, more) in systems.items():
                with tempfile.TemporaryDirectory() as scratch:
                    folder = Path(scratch, "run")
                    took = train(command, [*words, *more], folder)
                    outcome = result(folder)
                # An earlier version may learn differently; this version must not, wherever its evaluations run.
                if firsts.setdefault(system == "before", outcome) != outcome:
                    raise SystemExit(f"{name}, {system}: evaluations or best weights differ from the first run")
                found[name][system].append(took)
                print(name, system, json.dumps({k: round(v, 2) for k, v in took.items()}), flush=True)
    medians = {
        name: {
            system: {key: round(statistics.median(one[key] for one in runs), 2) for key in ("wall_s", "cpu_s")}
            for system, runs in of_task.items()
        }
        for name, of_task in found.items()
    }
    print(json.dumps(medians, indent=1))
    if args.out:
        options = [f"--rounds {args.rounds}", f"--only {args.only}", *([f"--scale {args.scale:g}"] * (args.scale != 1))]
        command = f"python benchmarks/evaluation.py {' '.join(options)}{' --before RLOX' if args.before else ''}"
        content = json.loads(args.out.read_text()) if args.out.exists() else {}
        for name, runs in found.items():
            steps = int(TASKS[name][1] * args.scale)
            made_by = {**provenance(command), "versions": versions()}
            content[name] = {"env_steps": steps, "medians": medians[name], "runs": runs, **made_by}
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
