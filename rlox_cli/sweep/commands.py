"""``rlox train -m``, ``rlox sweep status`` and ``rlox sweep resume``."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from rlox import __version__
from rlox_cli.compose import Job as ComposedJob
from rlox_cli.compose import SweeperConfig, compose_launcher, split_args
from rlox_cli.errors import UsageError
from rlox_cli.imports import import_modules, take_imports
from rlox_cli.runner import resolved, shown
from rlox_cli.sweep.ledger import FILE, Head, Sweep, SweepJob, job_id
from rlox_cli.sweep.search import is_search, optuna_search
from rlox_cli.sweep.show import label, print_jobs, print_status, resume_command, summary
from rlox_cli.terminal import make_console

# What a file may say of a launcher: its name and plain values. Anything else could be a command, or name code.
_HARMLESS = re.compile(r"hydra/launcher=[\w-]+|hydra\.(launcher|sweeper)\.([a-z]\w*\.)*[a-z]\w*=[\w.-]*")


def start(
    flags: list[str],
    overrides: list[str],
    modules: list[str],
    master: DictConfig,
    jobs: list[ComposedJob],
    console: Console,
) -> None:
    """Write the ledger of a new sweep and run it; `master` and `jobs` are `compose_sweep`'s of what was typed."""
    settings = {name: master.hydra.sweeper.get(name, default) for name, default in vars(SweeperConfig()).items()}
    sweep = Sweep.create(
        Path(master.hydra.sweep.dir),
        Head(
            *(__version__, flags, overrides, modules),
            retries=settings["retries"],
            max_batch_size=settings["max_batch_size"],
            created=time.time(),
        ),
        planned(jobs),
    )
    console.print(f"sweep: {shown(sweep.folder)}", soft_wrap=True, markup=False)
    _run(sweep, master, modules, True, settings["plot"], console)


def planned(jobs: list[ComposedJob]) -> list[SweepJob]:
    """Composed jobs as the ledger keeps them."""
    found: dict[str, SweepJob] = {}
    for job in jobs:
        name = job_id(job.overrides, found)
        found[name] = SweepJob(name, job.subdir, job.overrides, resolved(job.config, job.algo))
    return list(found.values())


def status(folder: Path, as_json: bool) -> None:
    print_status(Sweep.read(folder), make_console(), as_json)


def resume(folder: Path, args: list[str], retry_failed: bool) -> None:
    """Go on with a sweep; `args` are ``--import`` again, and what is to be another launcher."""
    console = make_console()
    modules, words = take_imports(args)
    flags, typed = split_args(words)
    for word in [*flags, *typed]:
        if not re.match(r"hydra[./](launcher|sweeper)", word):
            raise UsageError(
                f"{word} must not stand beside a sweep that is resumed, whose jobs are what they were; only --import "
                "and hydra/launcher=…, hydra.launcher.…=… and hydra.sweeper.…=… may"
            )
    sweep = Sweep.read(folder)
    sweep.hold()
    try:
        if sweep.head.version != __version__:
            console.print(
                f"planned by rlox {sweep.head.version}, and this is {__version__}: what is trained from now on may "
                "differ in its last bits, or more"
            )
        searched = is_search(sweep.folder)
        parts = "launcher" if searched else "(launcher|sweeper)"  # a search keeps its own settings
        kept = [word for word in sweep.head.overrides if re.match(rf"hydra[./]{parts}", word)]
        again = [word for word in kept if not _HARMLESS.fullmatch(word) and not word.startswith("hydra.sweeper.params")]
        same = {word.partition("=")[0] for word in typed}
        if missing := [word for word in again if word.partition("=")[0] not in same]:
            raise UsageError(
                f"{shown(sweep.folder / FILE)} has {' '.join(missing)}, which a file may not decide by itself; type it "
                "again if you trust it"
            )
        replayed = [word for word in kept if _HARMLESS.fullmatch(word) and word.partition("=")[0] not in same]
        import_modules(modules)
        master = compose_launcher([], [*replayed, *(["hydra/sweeper=optuna"] if searched else []), *typed])
        sweep.head.retries = master.hydra.sweeper.get("retries", sweep.head.retries)
        sweep.scan()
        console.print(summary(sweep), soft_wrap=True)
        if searched:
            optuna_search().resume(sweep, master, typed, modules, console)
            return
        _run(sweep, master, modules, False, master.hydra.sweeper.get("plot", True), console, retry_failed)
    finally:
        sweep.release()


def _run(
    sweep: Sweep,
    master: DictConfig,
    modules: list[str],
    trusted: bool,
    plot: bool,
    console: Console,
    retry_failed: bool = False,
) -> None:
    from rlox_cli.sweep.launch import Launch

    launch = Launch(sweep, master, modules, trusted, console)
    try:
        with launch.installed():
            launch.run(list(sweep.jobs.values()), retry_failed)
    except BaseException:
        console.print(f"{summary(sweep)}. Go on: {resume_command(sweep)}", soft_wrap=True, markup=False)
        raise
    finish(sweep, plot, console)


def finish(sweep: Sweep, plot: bool, console: Console) -> None:
    """Tables, picture and mirrors of a sweep that has come to its end.

    Raises
    ------
    RuntimeError
        If not all of its jobs are finished.
    """
    from rlox_cli.train import finish_mirrors

    print_jobs(sweep, console)
    console.print(summary(sweep), soft_wrap=True)
    if plot:
        _plot(sweep)
    finish_mirrors([p.folder for p in sweep.progress.values() if p.attempts], console)
    unfinished = [job for job in sweep.jobs.values() if sweep.progress[job.id].state != "finished"]
    for job in unfinished:
        progress = sweep.progress[job.id]
        print(f"rlox: {label(sweep, job)}: {progress.state}: {progress.message}", file=sys.stderr)
    if unfinished:
        raise RuntimeError(
            f"{len(unfinished)} of {len(sweep.jobs)} jobs are not finished; each has its account in "
            f"{shown(sweep.folder)}/…/out.txt. Try them again: {resume_command(sweep)} --retry-failed"
        )


def _plot(sweep: Sweep) -> None:
    from rlox_cli.plot import main
    from rlox_cli.runs import EVALUATION

    try:
        main([sweep.folder], EVALUATION, "steps", [], [], [])
    except (ValueError, ImportError, OSError) as e:
        # Nothing was evaluated, or the disk is full: no reason to call the sweep a failure.
        print(f"rlox plot: {e}", file=sys.stderr)
