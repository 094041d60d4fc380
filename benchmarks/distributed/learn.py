"""Measure what IMPALA and APPO learn with each kind of actor: tuned settings, evaluated as in `rlox bench learn`.

usage: learn.py [--cells CELL …] [--kinds threads processes ray grpc] [--seeds 100 101 102 103 104] [--runs DIR]
                [--jobs 1] [--out FILE]
       CELL is algo-env, such as impala-CartPole-v1; finished runs in DIR and cells of FILE that are not requested stay

Each run is evaluated on 20 deterministic episodes at ten points and at the end. With ``grpc``, two workers
(`rlox worker`) on this machine are started for all runs of a cell. `cpu_s` of a curve counts only the learner's
process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from workers import workers

from rlox.checkpoint import versions
from rlox_cli.bench import learn
from rlox_cli.bench.machine import provenance
from rlox_cli.report.statistics import iqm

CELLS = ["impala-CartPole-v1", "impala-Acrobot-v1", "impala-LunarLander-v3", "appo-CartPole-v1", "appo-Pendulum-v1"]


def measure(cell: str, kind: str, seeds: list[int], runs: Path, jobs: int, console: Console) -> dict[str, Any]:
    """Run all seeds of one algorithm and environment with one kind of actor."""
    algo, env = cell.split("-", 1)
    with contextlib.ExitStack() as stack:
        words = [f"algo={algo}", f"env={env}", f"algo.actors={kind}"]
        if kind == "grpc":
            words.append(f"algo.worker_addresses=[{','.join(stack.enter_context(workers(env, 2)))}]")
        label = f"{cell}-{kind}"
        (job,) = learn.compose_cells(words).values()
        question = learn.ask({label: job}, seeds, runs, console, None, None)
        found = learn.measure(label, job, seeds, runs, jobs, question, console)
    finals = list(found["final"].values())
    reference = (job.config.reference or {}).get("mean_return")
    return {
        "final": found["final"],
        "iqm": float(iqm(finals)),
        "least": min(finals),
        "must_reach": reference,
        "reached": sum(final >= reference for final in finals) if reference is not None else None,
        "total_timesteps": job.config.total_timesteps,
        "curves": found["curves"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--kinds", nargs="+", default=["threads", "processes", "ray", "grpc"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102, 103, 104])
    parser.add_argument("--runs", type=Path, default=Path("outputs/distributed"))
    parser.add_argument("--jobs", type=int, default=1, help="seeds to run in parallel")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    console = Console(stderr=True, highlight=False)
    before = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    cells = dict(before.get("cells", {}))
    for cell in args.cells:
        for kind in args.kinds:
            cells[f"{cell}-{kind}"] = found = measure(cell, kind, args.seeds, args.runs, args.jobs, console)
            print(f"{cell} {kind}: {found['final']}, {found['reached']} reach {found['must_reach']}", flush=True)
            if args.out:
                result = {
                    **provenance("python benchmarks/distributed/learn.py"),
                    "versions": versions(),
                    "seeds": " ".join(map(str, args.seeds)),
                    **({"note": before["note"]} if "note" in before else {}),
                    "cells": cells,
                }
                args.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
