"""``rlox train``: validate everything, hand over to Hydra, wait for the mirrors."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rich.console import Console

from rlox.config import RunConfig
from rlox.config.run import DISTRIBUTED
from rlox.distributed.ranks import started
from rlox.tracking.store import read_config
from rlox_cli.config.compose import (
    Job,
    compose_jobs,
    compose_sweep,
    expands,
    folder_of,
    run_composed,
    run_hydra,
    searches,
)
from rlox_cli.config.imports import import_modules, take_imports
from rlox_cli.config.overrides import is_multirun, only_select_config, run_folder, split_args
from rlox_cli.config.rules import tuned_steps
from rlox_cli.config.sources import with_env
from rlox_cli.records.folders import require_new
from rlox_cli.run import job
from rlox_cli.run.mirrors import finish_mirrors, require_trackers
from rlox_cli.run.runner import Outcome, resume
from rlox_cli.terminal.account import account
from rlox_cli.terminal.console import make_console, make_table, print_table, print_text
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import output_path, shown, with_home


def main(args: list[str]) -> None:
    """Run the command for `args`, the Hydra overrides and flags as typed."""
    typed, (modules, args) = args, take_imports(args)
    checks, args = "--check" in args, [arg for arg in args if arg != "--check"]
    flags, overrides = split_args(args)
    if modules and not any(override.startswith("resume=") for override in overrides):
        if any(override.lstrip("+").startswith("imports=") for override in overrides):
            raise UsageError("--import must not be combined with imports=[…], which it sets; use only one of them")
        import_modules(modules)
        overrides.append(f"imports=[{','.join(modules)}]")
    console = make_console()
    console.quiet = _n_started() > 1 and os.environ["RANK"] != "0"
    if runs := [override for override in overrides if override.startswith("resume=")]:
        if len(set(runs)) > 1:
            raise UsageError(f"resume must be given once, got {' and '.join(runs)}")
        others = [override for override in overrides if override not in runs]
        _resume(with_home("resume", runs[-1].partition("=")[2]), flags, others, modules, console, checks)
        return
    overrides = run_folder(with_env(overrides))
    # Flags such as --hydra-help and --version train nothing and need no valid configuration.
    prints_info = any(flag in ("--hydra-help", "--version", "--info", "-i") for flag in flags)
    only_prints = prints_info or any(flag.split("=")[0] in ("--cfg", "-c") for flag in flags)
    multirun = is_multirun(flags, overrides)
    if checks and only_prints:
        raise UsageError("--check must not be combined with a flag that only prints")
    sweep = None
    if multirun and not only_prints:
        sweep, jobs = compose_sweep(flags, overrides, lambda line: console.print(line, soft_wrap=True))
    else:
        jobs = [] if prints_info else compose_jobs(flags, overrides)
    is_search = sweep is not None and searches(sweep)
    if not only_prints and not checks:
        _require_ranks([one.config for one in jobs], multirun, typed)
    if not only_prints:
        require_trackers(one.config for one in jobs)
        announce(jobs[:1] if is_search else jobs, console)
    if checks:
        from rlox_cli.preflight.check import check

        check(jobs, multirun, console)
        return
    if jobs and not only_prints and jobs[0].config.distributed is not None:
        outcome = job.train_on_ranks(jobs[0].config, jobs[0].algo, lambda: _new_folder(jobs[0]), console)
        if outcome is not None:
            finish_mirrors([outcome.folder], console)
        return
    if jobs and not only_prints:
        folder = folder_of(jobs[0], multirun)
        output_path("output_dir", folder, folder=True)
        require_new(folder)
    if sweep is not None:
        from rlox_cli.preflight.check import require_buildable

        require_buildable(jobs)
    if is_search:
        from rlox_cli.sweep.control import optuna_search

        optuna_search().start(flags, overrides, modules, sweep, jobs[0], console)
        return
    if sweep is not None and expands(sweep):
        from rlox_cli.sweep.control import start

        start(flags, overrides, modules, sweep, jobs, console)
        return
    job.OUTCOMES, job.FAILURES = [], []
    try:
        if jobs and not multirun and only_select_config(flags):
            run_composed(flags, jobs[0], job.train)
        else:
            run_hydra(flags, overrides, job.train)
    finally:
        if job.OUTCOMES:
            if multirun:
                _table(job.OUTCOMES, console)
            finish_mirrors([outcome.folder for outcome in job.OUTCOMES], console)
    if job.FAILURES:
        *before, last = job.FAILURES
        for e in before:
            print_text(f"rlox train: {account(e)}", stderr=True)
        raise last


def _resume(
    run: str, flags: list[str], overrides: list[str], modules: list[str], console: Console, checks: bool
) -> None:
    from rlox_cli.run.resume import prepare

    if _n_started() and not checks and not flags:
        timeout_s, distributed = _rendezvous(run, overrides)
        outcome = job.resume_on_ranks(run, flags, overrides, modules, timeout_s, distributed, console)
        if outcome is not None:
            finish_mirrors([outcome.folder], console)
        return
    found = prepare(run, flags, overrides, modules, console)
    if found is not None:
        require_trackers([found.config])
    if found is not None and not checks:
        _require_ranks([found.config], False, [f"resume={run}", *overrides])
    if found is not None and checks:
        from rlox_cli.preflight.check import check_resume

        check_resume(found, console)
    elif found is not None:
        finish_mirrors([resume(found, console).folder], console)


def announce(jobs: list[Job], console: Console) -> None:
    """Print how many jobs there are, and which tuned settings they have."""
    if len(jobs) > 1:
        console.print(f"{len(jobs)} jobs, all valid")
    for name in dict.fromkeys(item.tuned for item in jobs if item.tuned):
        console.print(
            f"tuned settings: {name} (`rlox show algo={name.split('/', 1)[0]} env={name.split('/', 1)[1]}`; "
            "tuned=off for the defaults)",
            soft_wrap=True,
        )
        if short := _short_budget(name, [item.config for item in jobs if item.tuned == name]):
            console.print(f"  {short}", soft_wrap=True)


def _short_budget(name: str, runs: list[RunConfig]) -> str | None:
    """Return a sentence if the runs with the tuned settings `name` take fewer steps than these are meant for."""
    run = min(runs, key=lambda one: one.total_timesteps)
    own, full = tuned_steps(name), (run.reference or {}).get("full_steps")
    if own is not None and run.total_timesteps < own:
        return f"total_timesteps={run.total_timesteps:,} is short: the tuned settings are for {own:,}"
    if isinstance(full, int) and run.total_timesteps < full:
        return (
            f"total_timesteps={run.total_timesteps:,} is a short budget: the source of the settings trains for "
            f"{full:,} and reaches more (total_timesteps={full})"
        )
    return None


def _table(outcomes: list[Outcome], console: Console) -> None:
    table = make_table("run", "steps", "seconds", "final", "best")
    for o in outcomes:
        best = "" if o.best is None else f"{o.best:.1f}"
        final = f"{o.final['mean_return']:.1f} ± {o.final['std_return']:.1f}" if o.final else ""
        table.add_row(shown(o.folder), f"{o.steps:,}", f"{o.seconds:.1f}", final, best)
    print_table(console, table)


def _n_started() -> int:
    """Return how many processes torchrun has started, including this one; 0 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if started() and "TORCHELASTIC_RUN_ID" in os.environ else 0


def _require_ranks(configs: list[RunConfig], multirun: bool, typed: list[str]) -> None:
    """Raise a UsageError if torchrun started a run that is not data-parallel, or did not start one that is."""
    n, wanted = _n_started(), next((c.distributed for c in configs if c.distributed is not None), None)
    if wanted is not None and multirun:
        raise UsageError(f"distributed must be null in a sweep, where each job is one process, got {wanted}")
    if wanted is not None and not n:
        raise UsageError(
            f"distributed={wanted} must be started with torchrun, or left out (distributed=null); try: torchrun "
            f"--standalone --nproc-per-node=2 -m rlox train {shlex.join(typed)}"
        )
    if wanted is None and n > 1:
        raise UsageError(
            f"distributed must be ddp or fsdp when torchrun has started {n} processes, got null: each process would "
            "train its own run; add distributed=ddp"
        )


def _new_folder(found: Job) -> Path:
    """Return the folder for a new run's files. Raise a UsageError if it cannot be used."""
    folder = folder_of(found, False)
    output_path("output_dir", folder, folder=True)
    require_new(folder)
    return folder


def _rendezvous(run: str, overrides: list[str]) -> tuple[float, str]:
    """Return how many seconds the ranks of a run wait for each other, and how the run is distributed.

    Both come from the run's configuration; a typed ``distributed=`` takes precedence.
    """
    typed = [override.partition("=")[2] for override in overrides if override.lstrip("+").startswith("distributed=")]
    path = Path(run)
    folder = path if path.is_dir() else path.parent.parent
    try:
        saved = read_config(folder)
        timeout_s, distributed = float(saved["distributed_timeout_s"]), saved["distributed"]
    except (OSError, LookupError, TypeError, ValueError):
        # If this is not a run, the code that reads it raises the error.
        timeout_s, distributed = RunConfig.distributed_timeout_s, None
    distributed = typed[-1] if typed else distributed
    return timeout_s, distributed if distributed in DISTRIBUTED else "ddp"
