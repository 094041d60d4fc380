"""``hydra/sweeper=optuna``: a sweep whose jobs are the trials of a study, and which goes on after whatever stopped it.

The study chooses values and remembers what came of them; that there are runs, and how far they have come, stands in the
sweep's ledger and the runs' own records, as with any sweep. A trial that was under way when everything was killed is
still RUNNING in the study: its runs go on from their checkpoints, in their folders, and it is told when they end.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from omegaconf import DictConfig
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from rlox import __version__
from rlox.callbacks import Callback
from rlox.tracking import lock
from rlox_cli.compose import Job, run_name
from rlox_cli.errors import UsageError
from rlox_cli.resume import configuration
from rlox_cli.runner import resolved, shown
from rlox_cli.sweep.commands import launcher_overrides
from rlox_cli.sweep.launch import Launch
from rlox_cli.sweep.ledger import FILE as LEDGER
from rlox_cli.sweep.ledger import Head, Progress, Sweep, SweepJob, job_id
from rlox_cli.sweep.search import FILE, OptunaConfig, Search, optuna_config, read_search
from rlox_cli.sweep.show import resume_command
from rlox_cli.terminal import print_table

STUDY_FILE = "study.db"
_CHANGEABLE = ("n_trials", "n_jobs", "retries")  # when a search goes on
_TOLD = ("interrupted", "killed")  # states of runs that are told beside the lines of trials
_MEDIAN_OF = 5  # finished trials: a median of fewer says little
_BUSY_S = 60  # how long a process waits for others that write to the study


def study_file(settings: OptunaConfig, folder: Path) -> Path:
    """The SQLite file that holds the study of a sweep in `folder`."""
    if settings.storage is None:
        return (folder / STUDY_FILE).absolute()
    return Path(settings.storage.removeprefix("sqlite:///")).absolute()


def make_study(path: Path, name: str) -> None:
    """Make sure that the SQLite file `path` has the study of that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path), _stored(path):
        if not path.exists():
            # Its tables come one by one; a kill between two would leave a file that Optuna takes for a whole one.
            for left in path.parent.glob(f".{path.name}.*.partial"):
                left.unlink()
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            _storage(partial).engine.dispose()
            os.replace(partial, path)
        optuna.create_study(storage=_storage(path), study_name=name, direction="maximize", load_if_exists=True)


def open_study(path: Path, name: str, pruner: optuna.pruners.BasePruner | None = None) -> optuna.Study:
    """The study of that name in the SQLite file `path`."""
    with _stored(path):
        try:
            return optuna.load_study(storage=_storage(path), study_name=name, pruner=pruner)
        except KeyError as e:
            raise ValueError(f"{shown(path)} must hold a study of the name {name}; restore the file") from e


def _storage(path: Path) -> optuna.storages.RDBStorage:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": _BUSY_S}})


@contextmanager
def _stored(path: Path) -> Iterator[None]:
    """What a database raises becomes an OSError, which may pass, as a full disk does, and says which file it is."""
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as e:
        raise OSError(
            f"{shown(path)} must be a database that holds the study and can be written: {e.__cause__ or e}"
        ) from e


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Alone with a study: another sweep that adds to it must neither count past its end nor take our trials."""
    held = lock.acquire(path.with_name(f"{path.name}.lock"), _BUSY_S)
    if held is None:
        raise OSError(f"{shown(path)} is held by another process; stop it, and go on")
    try:
        yield
    finally:
        os.close(held)


def make_pruner(settings: OptunaConfig, n_points: int) -> optuna.pruners.BasePruner:
    """The pruner for runs of `n_points` evaluations."""
    if settings.pruner == "none" or n_points == 0:
        return optuna.pruners.NopPruner()
    if settings.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(1, n_points)
    # Before a third of its evaluations a run says little about where it will end.
    return optuna.pruners.MedianPruner(min(_MEDIAN_OF, settings.n_startup_trials), math.ceil(n_points / 3))


class TrialCallback(Callback):
    """Reports a run's evaluations to its trial, and stops the run where the pruner says so.

    Only a trial's first run reports, since the runs of other seeds are no later steps of it; they stop with it.

    Parameters
    ----------
    job : SweepJob
        The run, which is one of a trial's.
    folder : path
        The sweep's.

    Attributes
    ----------
    stopped : str or None
        Why this callback stopped the training, if it did.
    """

    def __init__(self, job: SweepJob, folder: Path):
        settings = Search.read(folder)[0].settings
        self.n_points, self.total = job.config["eval"]["n_points"], job.config["total_timesteps"]
        self.stopped: str | None = None
        self._file = study_file(settings, folder)
        self._study = open_study(self._file, settings.study, make_pruner(settings, self.n_points))
        self._number, self._reports = job.extra["trial"], job.extra["run"] == 0

    def on_training_start(self, *, algorithm: Any, **info: Any) -> bool:
        # It may have been killed between the pruner's word and its end.
        self._obey(self._point(algorithm.counters.steps))
        return self.stopped is None

    def on_evaluation(self, *, step: int, evaluation, **info: Any) -> None:
        point = self._point(step)
        if self._reports and step < self.total:
            with _stored(self._file):
                self._report(evaluation.summary()["mean_return"], point)
        self._obey(point)

    def _point(self, step: int) -> int:
        """How many evaluations are done. Pruners compare by these: rollouts of other lengths reach other steps."""
        return min(step * self.n_points // self.total, self.n_points) if self.n_points else 0

    def _report(self, value: float, point: int) -> None:
        known = self._frozen()
        trial = Trial(self._study, known._trial_id)
        # A run that goes on from a checkpoint comes once more to what it has reported already.
        if point not in known.intermediate_values:
            trial.report(value, point)
        if point >= max(known.intermediate_values, default=0) and trial.should_prune():
            trial.set_user_attr("pruned", f"pruned at evaluation {point} of {self.n_points}")

    def on_step(self, **info: Any) -> bool:
        return self.stopped is None

    def _obey(self, point: int) -> None:
        """Stop if the trial is pruned; its own run where that was said, though it was killed and has to come back."""
        with _stored(self._file):
            known = self._frozen()
        # The evaluation that had it pruned is the last that was reported.
        if not self._reports or point >= max(known.intermediate_values, default=0):
            self.stopped = known.user_attrs.get("pruned")

    def _frozen(self) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[self._number]


class Trials:
    """The study of a search, as the process that launches its runs sees it."""

    def __init__(self, search: Search, folder: Path, n_points: int):
        self.settings, self.search = search.settings, search
        # Whose a trial is, where several sweeps add to one study; a folder that holds its study may be moved.
        self.sweep = "." if self.settings.storage is None else str(folder.absolute())
        self.file = study_file(self.settings, folder)
        make_study(self.file, self.settings.study)
        self.study = open_study(self.file, self.settings.study, make_pruner(self.settings, n_points))
        self._identify()

    def _identify(self) -> None:
        """Write down what is searched, or see that it is what was searched before.

        Raises
        ------
        UsageError
            Where the study's trials have other ranges, or other settings beside them.
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
                    f"{key} of the search must stay {known.get(key)}, with which the study {self.settings.study!r} in "
                    f"{shown(self.file)} was begun, got {value}; another study: hydra.sweeper.study=NAME"
                )

    def next(self) -> list[Trial]:
        """Those that were under way when the sweep was stopped, then new ones; at most n_jobs, none at the end."""
        with _alone(self.file):
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
        """Give the trial a value of every searched key; what it has it keeps."""
        # Seeded anew for each trial, so that a study that was stopped draws what it would have drawn.
        seed = np.random.SeedSequence([self.settings.seed, trial.number]).generate_state(1)[0]
        self.study.sampler = optuna.samplers.TPESampler(
            seed=int(seed), multivariate=True, constant_liar=True, n_startup_trials=self.settings.n_startup_trials
        )
        for space in self.search.spaces:
            space.suggest(trial)

    def tell(self, trial: Trial, runs: Sequence[Progress]) -> bool:
        """Tell the study how the trial's runs ended; whether they have."""
        pruned = self.study.get_trials(deepcopy=False)[trial.number].user_attrs.get("pruned")
        failed = next((run for run in runs if run.state == "failed" and not run.may_pass), None)
        scores = [run.best if self.settings.objective == "best" else run.last for run in runs]
        if failed is not None:
            trial.set_user_attr("error", failed.message)
            self.study.tell(trial, state=TrialState.FAIL)
        elif any(run.state != "finished" for run in runs):
            return False
        elif pruned is not None:
            self.study.tell(trial, state=TrialState.PRUNED)
        elif None in scores:
            trial.set_user_attr("error", "the mean return of an evaluation is no finite number")
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            self.study.tell(trial, sum(scores) / len(scores))
        return True

    def carry_out(self, sweep: Sweep, config: dict[str, Any], launch: Launch, console: Console) -> list[int]:
        """Launch trials until there are no more; the numbers of those that are left open."""
        while not launch.stopped and (trials := self.next()):
            runs = [self._jobs(sweep, config, trial) for trial in trials]
            launch.run([job for jobs in runs for job in jobs])
            open_ = []
            for trial, jobs in zip(trials, runs, strict=True):
                if self.tell(trial, [sweep.progress[job.id].scan() for job in jobs]):
                    console.print(
                        describe(self.study, trial.number, self.settings.n_trials), soft_wrap=True, markup=False
                    )
                else:
                    open_.append(trial.number)
            if open_:
                return open_
        return []

    def _jobs(self, sweep: Sweep, config: dict[str, Any], trial: Trial) -> list[SweepJob]:
        """The trial's runs, which the ledger has or is given now."""
        known = {job.extra.get("run"): job for job in sweep.jobs.values() if job.extra.get("trial") == trial.number}
        for run in range(self.settings.n_seeds):
            plain = self.search.configured(config, trial.params, run)
            overrides = self.search.overrides(trial.params)
            if self.settings.n_seeds > 1:
                overrides = [line for line in overrides if not line.startswith("seed=")] + [f"seed={plain['seed']}"]
            if run not in known:
                folder = f"{trial.number}-{run_name(plain['algo']['name'], plain['env']['id'], plain['seed'])}"
                extra = {"trial": trial.number, "run": run}
                known[run] = SweepJob(job_id(overrides, sweep.jobs), folder, overrides, plain, extra)
                sweep.add([known[run]])
            elif known[run].overrides != overrides:
                raise UsageError(
                    f"trial {trial.number} of the study in {shown(self.file)} must be that of the ledger, "
                    f"{' '.join(known[run].overrides)}, got {' '.join(overrides)}; restore the study"
                )
        return [known[run] for run in range(self.settings.n_seeds)]


def start(
    flags: list[str], overrides: list[str], modules: list[str], master: DictConfig, job: Job, console: Console
) -> None:
    """Begin a search; `master` and `job`, one of its, are `compose_sweep`'s of what was typed."""
    search = read_search(overrides, master)
    launcher = launcher_overrides(master, overrides)
    head = Head(__version__, flags, overrides, modules, launcher, retries=search.settings.retries, created=time.time())
    folder, config = Path(master.hydra.sweep.dir), resolved(job.config, job.algo)
    if not (folder / LEDGER).exists():
        # Before there is a ledger, so that no kill can leave one that does not say it is a search's.
        search.write(folder, config)
    sweep = Sweep.create(folder, head, [])
    try:
        console.print(f"search: {shown(sweep.folder)}", soft_wrap=True, markup=False)
        for space in search.spaces:
            console.print(f"  {space.key} in {space.text}", soft_wrap=True, markup=False)
        carry_on(sweep, search, config, Launch(sweep, master, modules, True, console, _TOLD), console)
    finally:
        sweep.release()


def resume(sweep: Sweep, master: DictConfig, typed: list[str], modules: list[str], console: Console) -> None:
    """Go on with a search; `master` has the launcher, and settings that were `typed` anew.

    Raises
    ------
    UsageError
        For a setting that cannot change, and for code of the user's that was not typed.
    """
    search, config = Search.read(sweep.folder)
    # Asked here once: a trial whose runs may not begin would count as failed.
    configuration(copy.deepcopy(config), modules, sweep.folder / FILE)
    now = optuna_config(master)
    names = [re.split(r"[=.]", word)[2] for word in typed if word.startswith("hydra.sweeper.")]
    if fixed := [name for name in names if name not in _CHANGEABLE]:
        raise UsageError(
            f"hydra.sweeper.{fixed[0]} must stay what it was in a search that goes on; of its settings, "
            f"{', '.join(_CHANGEABLE)} may change"
        )
    search = replace(search, settings=replace(search.settings, **{name: getattr(now, name) for name in names}))
    search.write(sweep.folder, config)
    sweep.head.retries = search.settings.retries
    carry_on(sweep, search, config, Launch(sweep, master, modules, False, console, _TOLD), console)


def print_trials(folder: Path, console: Console) -> bool:
    """Print the trials of the search in `folder`, the best first; whether there is more to do."""
    from rlox_cli.sweep.study_report import trials_table

    settings = Search.read(folder)[0].settings
    if not study_file(settings, folder).is_file():
        return True
    study = open_study(study_file(settings, folder), settings.study)
    done = sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
    print_table(console, trials_table(study))
    console.print(f"{done} of {settings.n_trials} trials have ended")
    return done < settings.n_trials


def carry_on(sweep: Sweep, search: Search, config: dict[str, Any], launch: Launch, console: Console) -> None:
    """Bring the search to its last trial, and report.

    Raises
    ------
    RuntimeError
        If runs died so often that they are left for another time, and if no trial came to a value.
    """
    trials = Trials(search, sweep.folder, config["eval"]["n_points"])
    if known := len(trials.study.trials):
        console.print(f"the study has {known} of {search.settings.n_trials} trials", soft_wrap=True)
    try:
        with launch.installed(), _stored(trials.file):
            open_ = trials.carry_out(sweep, config, launch, console)
    except BaseException:
        console.print(f"go on: {resume_command(sweep)}", soft_wrap=True, markup=False)
        raise
    from rlox_cli.sweep.study_report import report
    from rlox_cli.train import finish_mirrors

    found = report(trials.study, search, sweep.folder, console)
    finish_mirrors([p.folder for p in sweep.progress.values() if p.attempts], console)
    if open_:
        raise RuntimeError(
            f"trials {', '.join(map(str, open_))} are not finished: their runs died and are left for another time; go "
            f"on: {resume_command(sweep)}"
        )
    if not found:
        raise RuntimeError(f"no trial came to a value; each run has its account in {shown(sweep.folder)}/…/out.txt")


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """The trial with the highest value; None before one has come to its end."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return max(done, key=lambda trial: (trial.value, -trial.number), default=None)


def describe(study: optuna.Study, number: int, n_trials: int) -> str:
    """One line about a trial that was told."""
    trial, best = study.get_trials(deepcopy=False)[number], best_trial(study)
    if trial.state is TrialState.COMPLETE:
        told = f"{trial.value:.1f}"
    else:
        told = (
            trial.user_attrs["pruned"] if trial.state is TrialState.PRUNED else f"failed: {trial.user_attrs['error']}"
        )
    so_far = "" if best is None else f" (best {best.value:.1f}, trial {best.number})"
    values = " ".join(f"{key.removeprefix('algo.')}={shown_value(value)}" for key, value in trial.params.items())
    return f"trial {number} of {n_trials}: {told}{so_far}  {values}"


def shown_value(value: Any) -> str:
    """For people: ``0.000312``."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
