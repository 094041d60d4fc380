"""Start, resume and show a sweep."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from rich.console import Console

from rlox import __version__
from rlox.config.run import to_plain
from rlox_cli.config.compose import Job, compose_launcher
from rlox_cli.config.overrides import explain_unparsed, split_args, take_imports
from rlox_cli.config.ranges import is_search
from rlox_cli.config.saved import configuration
from rlox_cli.config.schema import SweeperConfig
from rlox_cli.families.imports import list_needed_modules
from rlox_cli.families.received import KEYS, require_again, to_word
from rlox_cli.records.ledger import FILE, Head, Progress, Sweep, SweepJob, job_id
from rlox_cli.records.runs import EVALUATION
from rlox_cli.run.mirrors import finish_mirrors
from rlox_cli.sweep.launch import Launch, launcher_overrides
from rlox_cli.sweep.tables import find_again, label, print_jobs, resume_command, resume_hint
from rlox_cli.terminal.account import paragraph
from rlox_cli.terminal.console import TextConsole, print_text
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown

# What a file may specify for a launcher: its name and plain values. Anything else could be a command, or name code.
_HARMLESS = re.compile(r"hydra/launcher=[\w-]+|\+*hydra\.launcher\.([a-z]\w*\.)*[a-z]\w*=[\w.-]*")
_MOST_ROWS = 50  # of the table at the end


def start(
    flags: list[str], overrides: list[str], modules: list[str], master: DictConfig, jobs: list[Job], console: Console
) -> None:
    """Write the ledger of a new sweep and run it; `master` and `jobs` are the results of `compose_typed`."""
    settings = sweeper_settings(master)
    todo = plan_jobs(jobs)
    for config in (job.config for job in todo):
        modules = [*modules, *list_needed_modules(config["env"], config), *config["imports"]]
    head = Head(
        *(__version__, flags, overrides, list(dict.fromkeys(modules)), launcher_overrides(master, overrides)),
        **settings,
        created=time.time(),
    )
    sweep = Sweep.create(Path(master.hydra.sweep.dir), head, todo)
    try:
        console.print(f"sweep: {shown(sweep.folder)}")
        _run(sweep, master, head.imports, console, trusted=True)
    finally:
        sweep.release()


def sweeper_settings(master: DictConfig) -> dict[str, Any]:
    """Return the settings for running jobs; for Hydra's own sweeper, rlox's defaults if it has no such setting.

    Raises
    ------
    UsageError
        If a value is out of range.
    """
    defaults = vars(SweeperConfig())
    found = {name: master.hydra.sweeper.get(name, defaults[name]) for name in ("retries", "max_batch_size", "plot")}
    for name, least in (("retries", 0), ("max_batch_size", 1)):
        if found[name] is not None and found[name] < least:
            raise UsageError(f"hydra.sweeper.{name} must be >= {least}, got {found[name]}")
    return found


def plan_jobs(jobs: list[Job]) -> list[SweepJob]:
    """Return composed jobs as the ledger stores them."""
    planned: dict[str, SweepJob] = {}
    for job in jobs:
        name = job_id(job.overrides, planned)
        planned[name] = SweepJob(name, job.subdir, job.overrides, to_plain(job.config, job.algo))
    return list(planned.values())


def resume(folder: Path, args: list[str], retry_failed: bool) -> None:
    """Resume a sweep; `args` are what must be typed again, such as ``--import``, and settings of another launcher."""
    if str(folder).startswith("-"):
        raise UsageError(f"DIR must come before {folder}, got {folder} first; type: rlox sweep resume DIR {folder} …")
    console = TextConsole()
    modules, words = take_imports(args)
    flags, typed = split_args(words)
    again = [_setting(word) for word in typed if _key(word) in KEYS]
    typed = [word for word in typed if _key(word) not in KEYS]
    for word in [*(flag for flag in flags if flag.startswith("-")), *typed]:
        if not re.match(r"\+*hydra[./]launcher|hydra\.sweeper|(-cd|--config-dir)(=|$)", word):
            raise UsageError(
                f"{word} must not be given to resume a sweep, whose jobs cannot change; allowed are --import, -cd, "
                "hydra/launcher=…, hydra.launcher.…=… and hydra.sweeper.…=…"
            )
    sweep = Sweep.read(folder)
    if again and sweep.jobs:
        needed = find_again(sweep)
        if wrong := [setting for setting in again if setting not in needed]:
            raise UsageError(f"{to_word(*wrong[0])} must be as in a job of the sweep, whose jobs cannot change")
    sweep.hold()
    try:
        if sweep.head.version != __version__:
            console.print(
                f"planned by rlox {sweep.head.version}, but this is {__version__}: results from now on may differ in "
                "the last bits, or more"
            )
        searched = ["hydra/sweeper=optuna"] if is_search(sweep.folder) else []
        master = compose_launcher(flags, [*_replayed(sweep, typed), *searched, *typed])
        if searched:
            if retry_failed:
                raise UsageError(
                    "--retry-failed must be left out for a search, which has learned from its failed trials; for more "
                    "trials, add hydra.sweeper.n_trials=N"
                )
            optuna_search().resume(sweep, master, typed, modules, again, console)
            return
        for name, value in sweeper_settings(master).items():
            if any(word.startswith(f"hydra.sweeper.{name}=") for word in typed):
                setattr(sweep.head, name, value)
        for key, progress in sweep.scan().items():
            if progress.state != "finished":
                # As for a new sweep, every job is checked before the first one starts.
                job = sweep.jobs[key]
                configuration(copy.deepcopy(job.config), modules, sweep.folder / FILE)
                require_again(
                    job.config, sweep.folder / job.folder, sweep.folder / FILE, lambda *setting: setting in again
                )
        console.print(sweep.summary())
        _run(sweep, master, modules, console, retry_failed=retry_failed, again=again)
    finally:
        sweep.release()


def _replayed(sweep: Sweep, typed: list[str]) -> list[str]:
    """Return the overrides that chose the sweep's launcher, except for those that are typed again.

    Raises
    ------
    UsageError
        If a setting could be a command: a file must not decide what runs.
    """
    names = {_key(word) for word in typed}
    if "hydra/launcher" in names:
        return []
    kept = [word for word in sweep.head.launcher if _key(word) not in names]
    if doubtful := [word for word in kept if not _HARMLESS.fullmatch(word)]:
        raise UsageError(
            f"{shown(sweep.folder / FILE)} has {' '.join(doubtful)}, which is not used unless you type it; if you "
            "trust it, type it again"
        )
    return kept


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def _setting(word: str) -> tuple[str, Any]:
    """Return the key and the value of a setting of jobs that was typed again."""
    try:
        return _key(word), OverridesParser.create().parse_override(word).value()
    except HydraException as e:
        raise explain_unparsed(word) from e


def _run(
    sweep: Sweep,
    master: DictConfig,
    modules: list[str],
    console: Console,
    trusted: bool = False,
    retry_failed: bool = False,
    again: Sequence[tuple[str, Any]] = (),
) -> None:
    launch = Launch(sweep, master, modules, trusted, console, again=again)
    try:
        with launch.installed():
            launch.run(list(sweep.jobs.values()), retry_failed)
    except BaseException:
        sweep.scan()
        console.print(f"{sweep.summary()}. Resume with: {resume_command(sweep)}")
        raise
    finish(sweep, sweep.head.plot, console)


def finish(sweep: Sweep, plot: bool, console: Console) -> None:
    """Print the tables of a sweep that has ended, draw its plot and wait for its mirrors.

    Raises
    ------
    RuntimeError
        If not all of its jobs are finished.
    """
    print_jobs(sweep, console, _MOST_ROWS)
    console.print(sweep.summary())
    if plot:
        _plot(sweep)
    finish_mirrors([p.folder for p in sweep.progress.values() if p.attempts], console)
    unfinished = [job for job in sweep.jobs.values() if sweep.progress[job.id].state != "finished"]
    for job in unfinished:
        progress = sweep.progress[job.id]
        print_text(f"rlox: {label(sweep, job)}: {progress.state}: {progress.message}", stderr=True)
    if unfinished:
        raise RuntimeError(
            f"{len(unfinished)} of {len(sweep.jobs)} jobs are not finished; the output of each job is in "
            f"{shown(sweep.folder)}/…/out.txt. Retry them with: {resume_command(sweep)} --retry-failed"
        )


def _plot(sweep: Sweep) -> None:
    try:
        from rlox_cli.report.plot import main

        main([sweep.folder], EVALUATION, "steps", [], [], [])
    except (ValueError, ImportError, OSError) as e:
        # Nothing was evaluated, the disk is full, or matplotlib is missing: this does not make the sweep a failure.
        print_text(f"rlox plot: {paragraph(e)}", stderr=True)


def status(folder: Path, as_json: bool) -> None:
    print_status(Sweep.read(folder), TextConsole(), as_json)


def print_status(sweep: Sweep, console: Console, as_json: bool) -> None:
    """Print the progress of every job, and what can be done about those that are not finished."""
    sweep.scan()
    if as_json:
        print(json.dumps([_plain(sweep, job, sweep.progress[job.id]) for job in sweep.jobs.values()], indent=1))
        return
    unfinished = any(progress.state not in ("finished", "running") for progress in sweep.progress.values())
    if is_search(sweep.folder):
        unfinished = optuna_search().print_trials(sweep.folder, console)
        for job in sweep.jobs.values():
            progress = sweep.progress[job.id]
            if note := resume_hint(job, progress):
                console.print(f"{job.folder}: {progress.state}, {note}")
    else:
        print_jobs(sweep, console)
    console.print(sweep.summary())
    if sweep.is_held:
        console.print("the sweep is running now")
    elif unfinished:
        # Jobs whose failure would repeat itself are left out otherwise.
        stuck = any(progress.state == "failed" and not progress.may_pass for progress in sweep.progress.values())
        again = " --retry-failed" if stuck and not is_search(sweep.folder) else ""
        console.print(f"resume with: {resume_command(sweep)}{again}")


def _plain(sweep: Sweep, job: SweepJob, progress: Progress) -> dict[str, Any]:
    kept = ("state", "step", "last", "best", "seconds", "attempts", "message")
    plain = {key: value for key, value in asdict(progress).items() if key in kept}
    total = job.config["total_timesteps"]
    where = {"folder": str(sweep.folder / job.folder), "total": total}
    return {"id": job.id, "overrides": job.overrides, **where, **plain, "resumes_at": progress.resumes_at}


def optuna_search() -> ModuleType:
    """Return the module for searches, which imports Optuna.

    Raises
    ------
    ImportError
        If Optuna is not installed; the message says how to install it.
    """
    try:
        from rlox_cli.sweep import search
    except ModuleNotFoundError as e:
        if e.name != "optuna":
            raise
        raise ImportError(
            'hydra/sweeper=optuna needs Optuna, which is not installed; try: pip install "rlox-cli[optuna]"'
        ) from e
    return search
