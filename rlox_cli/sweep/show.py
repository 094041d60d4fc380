"""A sweep as tables: its jobs, and what they say together over their seeds."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from rlox_cli.runner import shown
from rlox_cli.sweep.ledger import STATES, Sweep, SweepJob
from rlox_cli.terminal import make_console, make_table


def label(sweep: Sweep, job: SweepJob, seed: bool = True) -> str:
    """What of its overrides the job does not share with all others; without a seed of its own where `seed` is False."""
    shared = shared_overrides(sweep)
    own = [line for line in job.overrides if line not in shared]
    return " ".join(line for line in own if seed or not line.startswith("seed=")) or (job.folder if seed else "all")


def shared_overrides(sweep: Sweep) -> set[str]:
    lists = [set(job.overrides) for job in sweep.jobs.values()]
    return set.intersection(*lists) if len(lists) > 1 else set()
