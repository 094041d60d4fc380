"""A sweep as a table of its jobs."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import Any

from rich.console import Console

from rlox_cli.runner import shown
from rlox_cli.runs import unit_of
from rlox_cli.sweep.ledger import STATES, Progress, Sweep, SweepJob
from rlox_cli.sweep.search import is_search, optuna_search
from rlox_cli.terminal import make_table, print_table


def label(sweep: Sweep, job: SweepJob) -> str:
    """What of its overrides the job does not share with all others."""
    return " ".join(line for line in job.overrides if line not in sweep.shared) or job.folder


def going_on(job: SweepJob, progress: Progress) -> str:
    """``goes on at step 8,192``, of a job that was broken off; else nothing."""
    at = progress.resumes_at if progress.state in ("failed", "interrupted", "killed") else None
    if at is None:
        return ""
    return f"goes on at {unit_of(job.config)[:-1]} {at:,}" if at else "starts anew"


def summary(sweep: Sweep) -> str:
    """``12 of 16 jobs are finished; 2 running, 1 waiting, 1 failed``."""
    states = [progress.state for progress in sweep.progress.values()]
    others = [f"{states.count(state)} {state}" for state in STATES if state != "finished" and state in states]
    return (
        f"{states.count('finished')} of {len(states)} jobs are finished" + ("; " if others else "") + ", ".join(others)
    )


def print_status(sweep: Sweep, console: Console, as_json: bool) -> None:
    """Every job with how far it has come, and what can be done about those that are not finished."""
    sweep.scan()
    if as_json:
        print(json.dumps([_plain(sweep, job, sweep.progress[job.id]) for job in sweep.jobs.values()], indent=1))
        return
    unfinished = any(progress.state not in ("finished", "running") for progress in sweep.progress.values())
    if is_search(sweep.folder):
        unfinished = optuna_search().print_trials(sweep.folder, console)
        for job in sweep.jobs.values():
            progress = sweep.progress[job.id]
            if told := going_on(job, progress):
                console.print(f"{job.folder}: {progress.state}, {told}", soft_wrap=True, markup=False)
    else:
        print_jobs(sweep, console)
    console.print(summary(sweep), soft_wrap=True)
    if sweep.is_held:
        console.print("it is being run now")
    elif unfinished:
        console.print(f"go on: {resume_command(sweep)}", soft_wrap=True, markup=False)


def resume_command(sweep: Sweep) -> str:
    """With the modules that have to be typed again."""
    imports = "".join(f" --import {name}" for name in sweep.head.imports)
    return f"rlox sweep resume {shlex.quote(shown(sweep.folder))}{imports}"


def print_jobs(sweep: Sweep, console: Console, most: int | None = None) -> None:
    """The table of all jobs; where there are more than `most`, of those that are not finished."""
    every = most is None or len(sweep.jobs) <= most
    counted = " or ".join(sorted({unit_of(job.config) for job in sweep.jobs.values()}))
    table = make_table("id", "job", "state", counted, "last", "best", "seconds", "attempts", "")
    for job in sweep.jobs.values():
        p = sweep.progress[job.id]
        if p.state == "finished" and not every:
            continue
        steps = f"{p.step:,}/{job.config['total_timesteps']:,}"
        last = "" if p.last is None else f"{p.last:.1f} ± {p.spread or 0.0:.1f}"
        best = "" if p.best is None else f"{p.best:.1f}"
        note = "; ".join(filter(None, (p.message, going_on(job, p))))
        told = (label(sweep, job), p.state, steps, last, best, f"{p.seconds:.1f}", str(p.attempts), note)
        table.add_row(job.id, *told)
    if table.row_count:
        print_table(console, table)


def _plain(sweep: Sweep, job: SweepJob, progress: Progress) -> dict[str, Any]:
    kept = ("state", "step", "last", "best", "seconds", "attempts", "message")
    plain = {key: value for key, value in asdict(progress).items() if key in kept}
    total = job.config["total_timesteps"]
    where = {"folder": str(sweep.folder / job.folder), "total": total}
    return {"id": job.id, "overrides": job.overrides, **where, **plain, "resumes_at": progress.resumes_at}
