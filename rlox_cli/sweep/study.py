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
from sqlalchemy.exc import SQLAlchemyError

from rlox.callbacks import Callback
from rlox.tracking import lock
from rlox_cli.config.ranges import OptunaConfig, Search
from rlox_cli.records.ledger import SweepJob
from rlox_cli.terminal.paths import shown

STUDY_FILE = "study.db"
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
    with locked(path), storage_errors(path):
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
    with storage_errors(path):
        try:
            return optuna.load_study(storage=_storage(path), study_name=name, pruner=pruner)
        except KeyError as e:
            raise ValueError(f"{shown(path)} must hold a study of the name {name}; restore the file") from e


def _storage(path: Path) -> optuna.storages.RDBStorage:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": _BUSY_S}})


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """What a database raises becomes an OSError, which may pass, as a full disk does, and says which file it is."""
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as e:
        raise OSError(
            f"{shown(path)} must be a database that holds the study and can be written: {e.__cause__ or e}"
        ) from e


@contextmanager
def locked(path: Path) -> Iterator[None]:
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
            with storage_errors(self._file):
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
        with storage_errors(self._file):
            known = self._frozen()
        # The evaluation that had it pruned is the last that was reported.
        if not self._reports or point >= max(known.intermediate_values, default=0):
            self.stopped = known.user_attrs.get("pruned")

    def _frozen(self) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[self._number]


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """The trial with the highest value; None before one has come to its end."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return max(done, key=lambda trial: (trial.value, -trial.number), default=None)


def shown_value(value: Any) -> str:
    """For people: ``0.000312``."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
