"""Compare rlox with TRL on the tasks of `tasks.py`: milliseconds per update, interleaved on one core, and learning.

usage: compare.py --peer-python PYTHON [--tasks copy sum dpo large] [--seeds 0 1 2] [--out benchmarks/llm.json]

`rlox bench train grpo grpo-sum dpo` measures the same trainings; this script is the study behind benchmarks/llm.json,
with chosen seeds, all systems pinned to one core, and numbers per update. For every seed, each system trains once, one
after the other; the systems take turns at being first. The number of a training is the median over its updates of the
process's CPU time, and the number of a system the median over its trainings.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import tasks

from rlox_cli.bench.machine import provenance
from rlox_cli.bench.train import post_train_once


def measure(name, seeds, peer_python, start):
    systems = {"rlox": sys.executable, "trl": peer_python}
    if name == "dpo":
        systems["trl precomputed"] = peer_python
    runs = {system: [] for system in systems}
    for k, seed in enumerate(seeds):
        order = list(systems)
        for system in order[k % len(order) :] + order[: k % len(order)]:
            request = {"task": name, "seed": seed, "start": start if name in ("sum", "dpo") else None}
            runs[system].append({"seed": seed, **post_train_once(systems[system], system, request)})
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
