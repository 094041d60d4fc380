"""The study of a search, in SQLite: trials, pruner, and the callback that reports a run's evaluations."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from rlox.callbacks import Callback
from rlox.checkpoint import locks, run_files
from rlox.config.sqlite import sqlalchemy_uri, sqlite_file
from rlox_cli.config.ranges import OptunaConfig, Search
from rlox_cli.records.ledger import SweepJob
from rlox_cli.terminal.paths import shown

STUDY_FILE = "study.db"
_MEDIAN_OF = 5  # finished trials: a median of fewer is not informative
_BUSY_S = 60  # how long a process waits for others that write to the study


def study_file(settings: OptunaConfig, folder: Path) -> Path:
    """Return the SQLite file with the study of a sweep in `folder`."""
    if settings.storage is None:
        run_files.is_file(folder, STUDY_FILE)  # raises a ValueError if it is a link
        return (folder / STUDY_FILE).absolute()
    return sqlite_file(settings.storage).absolute()


def make_study(path: Path, name: str) -> None:
    """Create the study of that name in the SQLite file `path`, unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_study(path), storage_errors(path):
        if not path.exists():
            # Tables are created one by one; a kill in between would leave a file that Optuna takes for complete.
            for left in path.parent.glob(f".{path.name}.*.partial"):
                left.unlink()
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            _storage(partial).engine.dispose()
            os.replace(partial, path)
        optuna.create_study(storage=_storage(path), study_name=name, direction="maximize", load_if_exists=True)


def open_study(path: Path, name: str, pruner: optuna.pruners.BasePruner | None = None) -> optuna.Study:
    """Return the study of that name in the SQLite file `path`."""
    with storage_errors(path):
        try:
            return optuna.load_study(storage=_storage(path), study_name=name, pruner=pruner)
        except KeyError as e:
            raise ValueError(f"{shown(path)} must hold a study named {name}; restore the file") from e


def _storage(path: Path) -> optuna.storages.RDBStorage:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    template = sqlalchemy_uri(path).replace("{", "{{").replace("}", "}}")  # Optuna formats it
    return optuna.storages.RDBStorage(template, engine_kwargs={"connect_args": {"timeout": _BUSY_S}})


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn errors of the database into an OSError with the file's name. Like a full disk, it may be temporary.

    A file that is no database, or is damaged, raises a ValueError.
    """
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as e:
        is_damaged = DatabaseError in (type(e), type(e.__cause__))  # a full disk and a lock are OperationalErrors
        raise (ValueError if is_damaged else OSError)(
            f"{shown(path)} must be a database that holds the study and can be written: {e.__cause__ or e}"
        ) from e


@contextmanager
def lock_study(path: Path) -> Iterator[None]:
    """Lock a study: another sweep that adds to it must neither exceed its number of trials nor take our trials."""
    lock = locks.take_lock(path.parent, f"{path.name}.lock", _BUSY_S)
    if lock is None:
        raise OSError(f"{shown(path)} is locked by another process; stop that process, and resume")
    try:
        yield
    finally:
        lock.release()


def make_pruner(settings: OptunaConfig, n_points: int) -> optuna.pruners.BasePruner:
    """Return the pruner for runs with `n_points` evaluations."""
    if settings.pruner == "none" or n_points == 0:
        return optuna.pruners.NopPruner()
    if settings.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(1, n_points)
    # The first third of a run's evaluations does not predict its final score well.
    return optuna.pruners.MedianPruner(min(_MEDIAN_OF, settings.n_startup_trials), math.ceil(n_points / 3))


class TrialCallback(Callback):
    """Reports a run's evaluations to its trial, and stops the run if the pruner decides to prune the trial.

    Only a trial's first run reports, since runs with other seeds are not later steps of it; they stop with it.

    Parameters
    ----------
    job : SweepJob
        A run of the trial.
    folder : path
        The sweep's folder.

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
        # The run may have been killed after the trial was pruned and before the run ended.
        self._stop_if_pruned(self._point(algorithm.counters.steps))
        return self.stopped is None

    def on_evaluation(self, *, step: int, evaluation, **info: Any) -> None:
        point = self._point(step)
        if self._reports and step < self.total:
            with storage_errors(self._file):
                self._report(evaluation.summary()["mean_return"], point)
        self._stop_if_pruned(point)

    def _point(self, step: int) -> int:
        """Return how many evaluations are done. Pruners compare these, since step counts depend on rollout lengths."""
        return min(step * self.n_points // self.total, self.n_points) if self.n_points else 0

    def _report(self, value: float, point: int) -> None:
        known = self._frozen()
        trial = Trial(self._study, known._trial_id)
        # A run that resumes from a checkpoint repeats evaluations that it has already reported.
        if point not in known.intermediate_values:
            trial.report(value, point)
        if point >= max(known.intermediate_values, default=0) and trial.should_prune():
            trial.set_user_attr("pruned", f"pruned at evaluation {point} of {self.n_points}")

    def on_step(self, **info: Any) -> bool:
        return self.stopped is None

    def _stop_if_pruned(self, point: int) -> None:
        """Stop if the trial is pruned.

        The reporting run stops at the evaluation that led to it, even if it was killed and must reach it again.
        """
        with storage_errors(self._file):
            known = self._frozen()
        # The last reported evaluation is the one at which the trial was pruned.
        if not self._reports or point >= max(known.intermediate_values, default=0):
            self.stopped = known.user_attrs.get("pruned")

    def _frozen(self) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[self._number]


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """Return the trial with the highest value; None if no trial has ended."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return max(done, key=lambda trial: (trial.value, -trial.number), default=None)


def format_value(value: Any) -> str:
    """Format a value to be read: ``0.000312``."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
