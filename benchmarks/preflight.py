"""Compare what `rlox train … --check` predicts with what the run then takes, in pairs, one right after the other.

usage: preflight.py [CASE …] [--rounds 1] [--out FILE]

Each command runs in its own process. CPU seconds are those of the command and everything that it starts, including the
mirrors that outlive it; memory is the peak resident set of the training process, as in ``/usr/bin/time -v``. Linux
only. `--out` adds to the results in the file. The case `refusals` is the CPU time in which --check rejects each bad
configuration of tests/test_check.py.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PPO_CARTPOLE, DQN_CARTPOLE = ["algo=ppo", "env=CartPole-v1"], ["algo=dqn", "env=CartPole-v1"]
PPO_PENDULUM, SAC_PENDULUM = ["algo=ppo", "env=Pendulum-v1"], ["algo=sac", "env=Pendulum-v1"]
PPO_LANDER = ["algo=ppo", "env=LunarLander-v3"]
NONE, TORCH = "logger=none", "backend=torch"
CASES = {
    "ppo-cartpole": [*PPO_CARTPOLE, NONE],
    "ppo-cartpole-mlflow": PPO_CARTPOLE,
    "ppo-cartpole-torch": [*PPO_CARTPOLE, NONE, TORCH],
    "ppo-pendulum": [*PPO_PENDULUM, NONE],
    "ppo-pendulum-mlflow": PPO_PENDULUM,
    "ppo-lander": [*PPO_LANDER, NONE],
    "ppo-lander-mlflow": PPO_LANDER,
    "dqn-cartpole": [*DQN_CARTPOLE, NONE],
    "dqn-cartpole-mlflow": DQN_CARTPOLE,
    "dqn-cartpole-torch": [*DQN_CARTPOLE, NONE, TORCH],
    "sac-pendulum": [*SAC_PENDULUM, NONE],
    "sac-pendulum-mlflow": SAC_PENDULUM,
}
RLOX = [sys.executable, "-m", "rlox_cli.main", "train"]
MIB = {"MiB": 1.0, "GiB": 1024.0}


def run(args: list[str], cwd: str) -> dict[str, float | str]:
    """Return CPU seconds of a command and of what outlives it, its peak memory in MiB, its exit code and its output."""
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen([*RLOX, *args], cwd=cwd, stdout=out, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        beside = 0.0
        while True:
            try:
                _, _, orphan = os.wait3(0)
            except ChildProcessError:
                break
            beside += orphan.ru_utime + orphan.ru_stime
        out.seek(0)
        text = out.read()
    own = used.ru_utime + used.ru_stime
    return {"cpu_s": own + beside, "rss_mib": used.ru_maxrss / 1024, "code": child.returncode, "text": text}


def pair(args: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cwd:
        printed = run([*args, "--check"], cwd)
        memory = re.search(r"memory +([\d.,]+) (\wiB)", printed["text"])
        cpu = re.search(r"([\d.,]+) s of CPU", printed["text"])
        if memory is None or cpu is None:
            raise RuntimeError(printed["text"])
        measured = run(args, cwd)
    if measured["code"]:
        raise RuntimeError(measured["text"])
    found = {
        "predicted_cpu_s": float(cpu[1].replace(",", "")),
        "cpu_s": measured["cpu_s"],
        "predicted_mib": float(memory[1].replace(",", "")) * MIB[memory[2]],
        "rss_mib": measured["rss_mib"],
        "check_cpu_s": printed["cpu_s"],
    }
    found["cpu_error"] = found["predicted_cpu_s"] / found["cpu_s"] - 1
    found["memory_error"] = found["predicted_mib"] / found["rss_mib"] - 1
    return {name: round(value, 4) for name, value in found.items()}


def refusals() -> dict[str, float | int]:
    """Return the CPU seconds of the commands in the test's table, each in its own process."""
    tests = Path(__file__).parent.parent / "tests"
    sys.path.insert(0, str(tests))
    from test_check import BAD, prepare

    os.environ["PYTHONPATH"] = str(tests)
    seconds = []
    for args, *_ in BAD:
        with tempfile.TemporaryDirectory() as cwd:
            prepare(Path(cwd))
            seconds.append(run([*args, "--check"], cwd)["cpu_s"])
            print(f"{seconds[-1]:.2f} s  {' '.join(args)}", flush=True)
    return {"n": len(seconds), "median_cpu_s": statistics.median(seconds), "longest_cpu_s": max(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, "refusals", []], metavar="CASE")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # Mirrors that outlive a run become children of this process, which then sees their CPU time.
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = args.cases or [*CASES, "refusals"]
    pairs: dict[str, list[dict[str, float]]] = {name: [] for name in names if name in CASES}
    for _ in range(args.rounds):
        for name, rows in pairs.items():
            rows.append(pair(CASES[name]))
            print(name, json.dumps(rows[-1]), flush=True)
    found = {"pairs": pairs} | ({"refusals": refusals()} if "refusals" in names else {})
    if args.out:
        # Imported last, because the measured memory of a child starts at the memory of this process.
        from rlox.checkpoint import versions
        from rlox_cli.bench.machine import provenance

        command = f"python benchmarks/preflight.py {' '.join([*args.cases, '--rounds', str(args.rounds)])}"
        load = {"load_average": round(os.getloadavg()[1], 1)}
        reported = json.loads(args.out.read_text()) if args.out.exists() else []
        reported.append({**provenance(command), **load, "versions": versions(), **found})
        args.out.write_text(json.dumps(reported, indent=1) + "\n")


if __name__ == "__main__":
    main()
