"""Compare an older rlox with this one: every operation of `rlox bench data`, and trainings of `rlox bench train`.

usage: versions.py BEFORE [--only REGEX] [--cases ppo a2c dqn sac custom] [--pairs 3] [--again 9] [--out FILE]

BEFORE is an interpreter that has the older version. Both run the programs of this checkout (benchmarks/peers), each in
its own process with one thread. A figure is the older version's time over this version's: below 1, this version is
slower. It is the median over ``--pairs`` pairs of new processes, each with its own order of operations, because the
place of an operation's arrays in memory moves a figure by more than its noise. Figures below 0.97 are measured again
with ``--again`` pairs, and the second measurement counts; both are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from rlox_cli.bench.data import OPERATIONS, Operation, Size, Worker
from rlox_cli.bench.machine import provenance
from rlox_cli.bench.train import train_once

LEAST = 0.97
SECONDS, SAMPLES, SAMPLE_S = 0.15, 60, 1e-5  # for one turn of one version
STEPS = {"ppo": 400_000, "a2c": 400_000, "dqn": 20_000, "sac": 5_000, "custom": 50_000}


def quotient(before: Worker, after: Worker, operation: Operation, size: Size) -> float | None:
    """Return the older version's median time over this version's, in turns A B B A; None if one lacks the operation."""
    first = [one.ask(operation, size, 3) for one in (before, after)]
    if any("absent" in answer or "error" in answer for answer in first):
        return None
    a_sample = max(SAMPLE_S, *(statistics.median(answer["ns"]) / 1e9 for answer in first))
    samples = max(3, min(SAMPLES, int(SECONDS / a_sample)))
    times: dict[Worker, list[float]] = {before: [], after: []}
    for one in (before, after, after, before):
        times[one].extend(one.ask(operation, size, samples)["ns"])
    return statistics.median(times[before]) / statistics.median(times[after])


def operations(python: str, wanted: list[tuple[Operation, Size]], pairs: int) -> dict[tuple[str, Size], list[float]]:
    """Return the quotients of each operation and size, one for every pair of new processes."""
    found: dict[tuple[str, Size], list[float]] = {}
    for k in range(pairs):
        before, after = Worker("rlox", python), Worker("rlox", sys.executable)
        try:
            for operation, size in random.Random(k).sample(wanted, len(wanted)):
                one = quotient(before, after, operation, size)
                if one is not None:
                    found.setdefault((operation.name, size), []).append(one)
        finally:
            before.close()
            after.close()
        print(f"operations, pair {k + 1} of {pairs}", flush=True)
    return found


def training(python: str, case: str, seeds: range) -> list[float]:
    """Return the quotients of the CPU seconds of whole trainings, one per seed; the order alternates."""
    system, found = "rlox torch" if case == "custom" else "rlox", []
    for seed in seeds:
        cpu = {}
        for one in (python, sys.executable)[:: 1 if seed % 2 else -1]:
            cpu[one] = train_once(one, system, case, STEPS[case], seed, 1)["cpu_s"]
        found.append(cpu[python] / cpu[sys.executable])
        print(f"{case}, seed {seed}: {found[-1]:.3f}", flush=True)
    return found


def summary(quotients: list[float]) -> dict[str, Any]:
    """Return median, least and largest."""
    digits = (round(f(quotients), 3) for f in (statistics.median, min, max))
    return dict(zip(("median", "least", "largest"), digits, strict=True)) | {"pairs": len(quotients)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="an interpreter that has the older rlox")
    parser.add_argument("--only", default="", help="operations to compare, a regular expression")
    parser.add_argument("--cases", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--again", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    by_name = {one.name: one for one in OPERATIONS}
    wanted = [(one, size) for one in OPERATIONS if re.search(args.only, one.name) for size in dict.fromkeys(one.sizes)]
    first = operations(args.before, wanted, args.pairs)
    low = [key for key, of in first.items() if statistics.median(of) < LEAST]
    second = operations(args.before, [(by_name[name], size) for name, size in low], args.again) if low else {}
    rows = []
    for (name, size), of in first.items():
        row = {"operation": name, "size": size, "first": summary(of)}
        if (name, size) in second:
            row["again"] = summary(second[name, size])
        rows.append(row)
    cases = {}
    for case in args.cases:
        cases[case] = {"steps": STEPS[case], "first": summary(of := training(args.before, case, range(args.pairs)))}
        if statistics.median(of) < LEAST:
            cases[case]["again"] = summary(training(args.before, case, range(args.pairs, args.pairs + args.again)))

    def final(row: dict[str, Any]) -> float:
        return row.get("again", row["first"])["median"]

    versions = {}
    for name, python in (("before", args.before), ("after", sys.executable)):
        one = Worker("rlox", python)
        versions[name] = one.versions
        one.close()
    result = {
        **provenance("python benchmarks/versions.py BEFORE"),
        "versions": versions,
        "operations": {
            "figures": len(rows),
            "median": round(statistics.median(map(final, rows)), 3) if rows else math.nan,
            "below": [f"{row['operation']} {row['size']}: {final(row)}" for row in rows if final(row) < LEAST],
            "rows": rows,
        },
        "trainings": cases,
    }
    for row in rows:
        if "again" in row:
            print(row["operation"], row["size"], row["first"], row["again"])
    print(json.dumps({**result["operations"], "rows": "…"}), json.dumps(cases), sep="\n")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
