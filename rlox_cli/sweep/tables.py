"""A sweep as a table of its jobs."""

from __future__ import annotations

import shlex
from typing import Any

from rich.console import Console

from rlox_cli.families.imports import import_words
from rlox_cli.families.received import find_doubtful, to_word
from rlox_cli.records.ledger import Progress, Sweep, SweepJob
from rlox_cli.records.runs import unit_of
from rlox_cli.terminal.console import make_table, print_table
from rlox_cli.terminal.paths import shown


def label(sweep: Sweep, job: SweepJob) -> str:
    """Return the job's overrides that not all jobs share."""
    return " ".join(line for line in job.overrides if line not in sweep.shared) or job.folder


def resume_hint(job: SweepJob, progress: Progress) -> str:
    """Return a text such as ``resumes at step 8,192`` for an interrupted job; empty for others."""
    at = progress.resumes_at if progress.state in ("failed", "interrupted", "killed") else None
    if at is None:
        return ""
    return f"resumes at {unit_of(job.config)[:-1]} {at:,}" if at else "starts over"


def find_again(sweep: Sweep) -> list[tuple[str, Any]]:
    """Return the settings of the jobs that must be typed again to resume the sweep, key and value."""
    jobs = ((job.config, sweep.folder / job.folder) for job in sweep.jobs.values())
    return [(key, value) for job in jobs for key, value, _ in find_doubtful(*job)]


def resume_command(sweep: Sweep) -> str:
    """Return the command that resumes the sweep, with the modules and settings that must be typed again."""
    again = dict.fromkeys(to_word(*setting) for setting in find_again(sweep))
    return f"rlox sweep resume {shlex.join([shown(sweep.folder), *import_words(sweep.head.imports), *again])}"


def print_jobs(sweep: Sweep, console: Console, most: int | None = None) -> None:
    """Print the table of all jobs; if there are more than `most`, only those that are not finished."""
    every = most is None or len(sweep.jobs) <= most
    counted = " or ".join(sorted({unit_of(job.config) for job in sweep.jobs.values()}))
    headers = ("job", "state", counted, "last", "best", "seconds", "attempts", "id", "")
    table = make_table(*headers, optional=("id", "attempts", "seconds"))
    for job in sweep.jobs.values():
        p = sweep.progress[job.id]
        if p.state == "finished" and not every:
            continue
        steps = f"{p.step:,}/{job.config['total_timesteps']:,}"
        last = "" if p.last is None else f"{p.last:.1f} ± {p.spread or 0.0:.1f}"
        best = "" if p.best is None else f"{p.best:.1f}"
        note = "; ".join(filter(None, (p.message, resume_hint(job, p))))
        table.add_row(label(sweep, job), p.state, steps, last, best, f"{p.seconds:.1f}", str(p.attempts), job.id, note)
    if table.row_count:
        print_table(console, table)
