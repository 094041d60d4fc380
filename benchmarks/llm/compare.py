"""rlox against TRL on the tasks of `tasks.py`: milliseconds an update, interleaved on one core, and what was learned.

usage: compare.py --peer-python PYTHON [--tasks copy sum dpo large] [--seeds 0 1 2] [--out benchmarks/llm.json]

Every seed is one training by each system, one after the other, the first of them in turn. A training's number is the
median over its updates of the process's CPU time; a system's the median over its trainings.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import tasks

from rlox_cli.bench.machine import provenance
from rlox_cli.bench.peers import environment

HERE = Path(__file__).parent


def run(python, program, request):
    """What a program answers in a process of its own, on one core."""
    done = subprocess.run(
        [python, HERE / program, json.dumps(request)], env=environment(1), cwd="/", capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{program} failed at {request}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def tenths(curve):
    """Its mean over each tenth of the training."""
    return [round(statistics.mean(curve[len(curve) * i // 10 : len(curve) * (i + 1) // 10]), 3) for i in range(10)]


def summary(answer):
    curve = answer.pop("curve")
    cpu, wall = (statistics.median(answer.pop(name)) for name in ("cpu_ms", "wall_ms"))
    shown = tenths(curve) if len(curve) >= 10 else [round(x, 3) for x in curve]
    return {**answer, "cpu_ms": round(cpu, 2), "wall_ms": round(wall, 2), "curve": shown}


def measure(name, seeds, peer_python, start):
    systems = {"rlox": (sys.executable, "ours.py", {}), "trl": (peer_python, "peer.py", {})}
    if name == "dpo":
        systems["trl precomputed"] = (peer_python, "peer.py", {"precompute": True})
    runs = {system: [] for system in systems}
    for k, seed in enumerate(seeds):
        order = list(systems)
        for system in order[k % len(order) :] + order[: k % len(order)]:
            python, program, more = systems[system]
            request = {"task": name, "seed": seed, "start": start if name in ("sum", "dpo") else None, **more}
            runs[system].append({"seed": seed, **summary(run(python, program, request))})
            print(name, system, json.dumps({k: v for k, v in runs[system][-1].items() if k != "versions"}), flush=True)
    median = {
        system: {unit: statistics.median(one[unit] for one in of) for unit in ("cpu_ms", "wall_ms")}
        for system, of in runs.items()
    }
    ratio = {system: round(median["rlox"]["cpu_ms"] / of["cpu_ms"], 3) for system, of in median.items()}
    print(f"{tasks.TASKS[name].title}: {json.dumps(median)}; rlox takes {json.dumps(ratio)}", flush=True)
    return {"task": name, "title": tasks.TASKS[name].title, "median": median, "ratio": ratio, "runs": runs}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--tasks", nargs="+", default=list(tasks.TASKS), choices=list(tasks.TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    with tempfile.TemporaryDirectory() as folder:
        start = f"{folder}/start.pt"
        if {"sum", "dpo"} & {*args.tasks}:
            tasks.save_start(start)
        results, versions = [], {}
        for name in args.tasks:
            results.append(measure(name, args.seeds, args.peer_python, start))
            for one in itertools.chain(*results[-1]["runs"].values()):
                versions |= one.pop("versions")
            if args.out:
                words = f"--tasks {' '.join(args.tasks)} --seeds {' '.join(map(str, args.seeds))}"
                head = provenance(f"python benchmarks/llm/compare.py --peer-python PYTHON {words}")
                args.out.write_text(json.dumps({**head, "versions": versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
