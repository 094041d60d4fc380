"""``hydra/sweeper=optuna``: a sweep whose jobs are the trials of a study, and which can always be resumed.

The study chooses values and stores their results. As with any sweep, the runs and their progress are stored in the
sweep's ledger and the runs' own records. A trial that was running when everything was killed is still RUNNING in the
study: its runs continue from their checkpoints, in their folders, and report their values to the study when they end.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from omegaconf import DictConfig
from optuna.trial import Trial, TrialState
from rich.console import Console

from rlox import __version__
from rlox.config.run import to_plain
from rlox_cli.config.compose import Job
from rlox_cli.config.ranges import FILE, Search, optuna_config, read_search
from rlox_cli.config.saved import configuration
from rlox_cli.config.schema import run_name
from rlox_cli.families.received import require_again
from rlox_cli.records.ledger import FILE as LEDGER
from rlox_cli.records.ledger import Head, Progress, Sweep, SweepJob, job_id
from rlox_cli.run.mirrors import finish_mirrors
from rlox_cli.sweep.launch import Launch, launcher_overrides
from rlox_cli.sweep.study import (
    best_trial,
    format_value,
    lock_study,
    make_pruner,
    make_study,
    open_study,
    storage_errors,
    study_file,
)
from rlox_cli.sweep.study_report import report, trials_table
from rlox_cli.sweep.tables import resume_command
from rlox_cli.terminal.console import print_table
from rlox_cli.terminal.errors import UsageError
from rlox_cli.terminal.paths import shown

_CHANGEABLE = ("n_trials", "n_jobs", "retries")  # when a search is resumed
_SAME_ERRORS = 3  # trials in a row that failed with one error, after which a search stops
_PRINTED = ("interrupted", "killed")  # states of runs that are printed in addition to the lines of trials


class Trials:
    """The study of a search, in the process that launches its runs."""

    def __init__(self, search: Search, folder: Path, n_points: int):
        self.settings, self.search = search.settings, search
        # The sweep that a trial belongs to, if several sweeps share a study; a folder with its own study may be moved.
        self.sweep = "." if self.settings.storage is None else str(folder.absolute())
        self.file = study_file(self.settings, folder)
        make_study(self.file, self.settings.study)
        self.study = open_study(self.file, self.settings.study, make_pruner(self.settings, n_points))
        self._identify()

    def _identify(self) -> None:
        """Store what is searched in the study, or check that the study has searched the same before.

        Raises
        ------
        UsageError
            If the study's trials have other ranges, or other fixed settings.
        """
        mine = {
            "overrides": sorted(line for line in self.search.fixed if not line.startswith("logger")),
            "ranges": {space.key: space.text for space in self.search.spaces},
            "n_seeds": self.settings.n_seeds,
            "objective": self.settings.objective,
        }
        known = self.study.user_attrs.get("search")
        if known is None:
            self.study.set_user_attr("search", mine)
            return
        for key, value in mine.items():
            if known.get(key) != value:
                raise UsageError(
                    f"{key} of the search must stay {known.get(key)}, as in the study {self.settings.study!r} in "
                    f"{shown(self.file)}, got {value}; for another study, add hydra.sweeper.study=NAME"
                )

    def next(self) -> list[Trial]:
        """Return at most n_jobs trials, none at the end: first those that were running when the sweep was stopped."""
        with lock_study(self.file):
            known = self.study.get_trials(deepcopy=False)
            mine = [
                t
                for t in known
                if t.state is TrialState.RUNNING and t.user_attrs.get("sweep", self.sweep) == self.sweep
            ]
            trials = [Trial(self.study, t._trial_id) for t in mine[: self.settings.n_jobs]]
            n_new = min(self.settings.n_jobs - len(trials), self.settings.n_trials - len(known))
            trials += [self.study.ask() for _ in range(n_new)]
            for trial in trials:
                trial.set_user_attr("sweep", self.sweep)
        for trial in trials:
            self._suggest(trial)
        return trials

    def _suggest(self, trial: Trial) -> None:
        """Give the trial a value for every searched key. Values that it already has are kept."""
        # Seeded again for each trial, so that a resumed study draws the same values as one that was not stopped.
        seed = np.random.SeedSequence([self.settings.seed, trial.number]).generate_state(1)[0]
        self.study.sampler = optuna.samplers.TPESampler(
            seed=int(seed), multivariate=True, constant_liar=True, n_startup_trials=self.settings.n_startup_trials
        )
        drawn_together, known = trial.relative_params, trial.distributions
        for space in self.search.spaces:
            if space.key in known and space.key not in drawn_together:
                # The process was killed between two values: draw this one again, so that the next ones stay the same.
                frozen = self.study.get_trials(deepcopy=False)[trial.number]
                self.study.sampler.sample_independent(self.study, frozen, space.key, known[space.key])
            space.suggest(trial)

    def finish(self, trial: Trial, runs: Sequence[Progress], stopped: bool) -> bool:
        """Report to the study how the trial's runs ended. Return whether they have all ended.

        A run that failed and may succeed when it is tried again was tried `retries` times, unless the search was
        `stopped` before.
        """
        pruned = self.study.get_trials(deepcopy=False)[trial.number].user_attrs.get("pruned")
        failed = next((run for run in runs if run.state == "failed" and not (run.may_pass and stopped)), None)
        scores = [run.best if self.settings.objective == "best" else run.last for run in runs]
        finite = [score for score in scores if score is not None]
        if failed is not None:
            trial.set_user_attr("error", failed.message)
            self.study.tell(trial, state=TrialState.FAIL)
        elif any(run.state != "finished" for run in runs):
            return False
        elif pruned is not None:
            self.study.tell(trial, state=TrialState.PRUNED)
        elif len(finite) < len(scores):
            trial.set_user_attr("error", "the mean return of an evaluation is not a finite number")
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            self.study.tell(trial, sum(finite) / len(finite))
        return True

    def run_trials(self, sweep: Sweep, config: dict[str, Any], launch: Launch, console: Console) -> list[int]:
        """Launch trials until there are no more. Return the numbers of the trials that did not end.

        Raises
        ------
        RuntimeError
            If trials in a row failed with one error that has nothing to do with their values, such as a full disk.
        """
        errors: list[str] = []
        while not launch.stopped and (trials := self.next()):
            runs = [self._jobs(sweep, config, trial) for trial in trials]
            launch.run([job for jobs in runs for job in jobs])
            open_ = []
            for trial, jobs in zip(trials, runs, strict=True):
                progress = [sweep.progress[job.id].scan() for job in jobs]
                if self.finish(trial, progress, launch.stopped):
                    console.print(describe(self.study, trial.number, self.settings.n_trials))
                    errors.append(next((run.message for run in progress if run.state == "failed" and run.may_pass), ""))
                else:
                    open_.append(trial.number)
            if open_:
                return open_
            if len(errors) >= _SAME_ERRORS and errors[-1] and len(set(errors[-_SAME_ERRORS:])) == 1:
                raise RuntimeError(f"the last {_SAME_ERRORS} trials failed with the same error: {errors[-1]}")
        return []

    def _jobs(self, sweep: Sweep, config: dict[str, Any], trial: Trial) -> list[SweepJob]:
        """Return the trial's runs. Runs that are not in the ledger are added to it."""
        known = {job.extra.get("run"): job for job in sweep.jobs.values() if job.extra.get("trial") == trial.number}
        for run in range(self.settings.n_seeds):
            plain = self.search.configured(config, trial.params, run)
            overrides = self.search.overrides(trial.params, plain["seed"] if self.settings.n_seeds > 1 else None)
            if run not in known:
                name = plain.get("preset") or plain["algo"]["name"]
                folder = f"{trial.number}-{run_name(name, plain['env']['id'], plain['seed'])}"
                extra = {"trial": trial.number, "run": run}
                known[run] = SweepJob(job_id(overrides, sweep.jobs), folder, overrides, plain, extra)
                sweep.add([known[run]])
            elif known[run].overrides != overrides:
                raise UsageError(
                    f"trial {trial.number} of the study in {shown(self.file)} must be the same as in the ledger, "
                    f"{' '.join(known[run].overrides)}, got {' '.join(overrides)}; restore the study"
                )
        return [known[run] for run in range(self.settings.n_seeds)]


def start(
    flags: list[str], overrides: list[str], modules: list[str], master: DictConfig, job: Job, console: Console
) -> None:
    """Start a search; `master` and `job` are results of `compose_typed`, which returns several jobs of the search."""
    search = read_search(overrides, master)
    launcher = launcher_overrides(master, overrides)
    head = Head(__version__, flags, overrides, modules, launcher, retries=search.settings.retries, created=time.time())
    folder, config = Path(master.hydra.sweep.dir), to_plain(job.config, job.algo)
    if not (folder / LEDGER).exists():
        # Written before the ledger, so that a kill cannot leave a ledger that does not look like a search.
        search.write(folder, config)
    sweep = Sweep.create(folder, head, [])
    try:
        console.print(f"search: {shown(sweep.folder)}")
        for space in search.spaces:
            console.print(f"  {space.key} in {space.text}")
        run_to_end(sweep, search, config, Launch(sweep, master, modules, True, console, _PRINTED), console)
    finally:
        sweep.release()


def resume(
    sweep: Sweep,
    master: DictConfig,
    typed: list[str],
    modules: list[str],
    again: list[tuple[str, Any]],
    console: Console,
) -> None:
    """Resume a search; `master` has the launcher, and the settings that were `typed` again, `again` those of the runs.

    Raises
    ------
    UsageError
        If a setting cannot change, or modules or settings that must be typed again were not.
    """
    search, config = Search.read(sweep.folder)
    # Checked once here: a trial whose runs cannot start would count as failed.
    configuration(copy.deepcopy(config), modules, sweep.folder / FILE)
    run = sweep.folder / "0"  # stands for the folders of all runs
    require_again(config, run, sweep.folder / FILE, lambda *setting: setting in again)
    now = optuna_config(master)
    names = [re.split(r"[=.]", word)[2] for word in typed if word.startswith("hydra.sweeper.")]
    if fixed := [name for name in names if name not in _CHANGEABLE]:
        raise UsageError(
            f"hydra.sweeper.{fixed[0]} must not change when a search is resumed; of its settings, only "
            f"{', '.join(_CHANGEABLE)} may change"
        )
    search = replace(search, settings=replace(search.settings, **{name: getattr(now, name) for name in names}))
    search.write(sweep.folder, config)
    sweep.head.retries = search.settings.retries
    launch = Launch(sweep, master, modules, False, console, _PRINTED, again)
    run_to_end(sweep, search, config, launch, console)


def print_trials(folder: Path, console: Console) -> bool:
    """Print the trials of the search in `folder`, the best first. Return whether there are more trials to run."""
    settings = Search.read(folder)[0].settings
    if not study_file(settings, folder).is_file():
        return True
    study = open_study(study_file(settings, folder), settings.study)
    done = sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
    print_table(console, trials_table(study))
    console.print(f"{done} of {settings.n_trials} trials have ended")
    return done < settings.n_trials


def run_to_end(sweep: Sweep, search: Search, config: dict[str, Any], launch: Launch, console: Console) -> None:
    """Run the search to its last trial, and report.

    Raises
    ------
    RuntimeError
        If runs died too often and were given up for now, or if no trial has a value.
    """
    trials = Trials(search, sweep.folder, config["eval"]["n_points"])
    if known := len(trials.study.trials):
        console.print(f"the study has {known} of {search.settings.n_trials} trials")
    try:
        with launch.installed(), storage_errors(trials.file):
            open_ = trials.run_trials(sweep, config, launch, console)
    except BaseException:
        console.print(f"resume with: {resume_command(sweep)}")
        raise

    has_best = report(trials.study, search, sweep, console)
    finish_mirrors([p.folder for p in sweep.progress.values() if p.attempts], console)
    if open_:
        raise RuntimeError(
            f"trials {', '.join(map(str, open_))} are not finished, because their runs died too often; resume with: "
            f"{resume_command(sweep)}"
        )
    if not has_best:
        raise RuntimeError(f"no trial has a value; the output of each run is in {shown(sweep.folder)}/…/out.txt")


def describe(study: optuna.Study, number: int, n_trials: int) -> str:
    """Return a line about a trial that has ended."""
    trial, best = study.get_trials(deepcopy=False)[number], best_trial(study)
    if trial.state is TrialState.COMPLETE:
        outcome = f"{trial.value:.1f}"
    else:
        outcome = (
            trial.user_attrs["pruned"] if trial.state is TrialState.PRUNED else f"failed: {trial.user_attrs['error']}"
        )
    so_far = "" if best is None else f" (best {best.value:.1f}, trial {best.number})"
    values = " ".join(f"{key.removeprefix('algo.')}={format_value(value)}" for key, value in trial.params.items())
    return f"trial {number} of {n_trials}: {outcome}{so_far}  {values}"
