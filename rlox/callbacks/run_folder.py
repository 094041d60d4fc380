"""The run folder of a training in the library, with the same files as those of ``rlox train``."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlox import tracking
from rlox.callbacks.checkpoint import CheckpointCallback
from rlox.callbacks.evaluation import EvalCallback
from rlox.callbacks.loggers import RecordLogger
from rlox.checkpoint import one_line, read_header, run_files, versions
from rlox.collectors import reward_name
from rlox.config import (
    DatasetConfig,
    EnvConfig,
    EvalConfig,
    RunConfig,
    shown,
)
from rlox.config.packages import import_package
from rlox.config.run import differences, to_plain
from rlox.envs import env_name
from rlox.tracking.loggers import logger_config, logger_names, logger_settings
from rlox.tracking.record import FILE, Record
from rlox.tracking.store import read_config

yaml = import_package("yaml", "cli", "logger")

_ONE_RUN = ("algo.name", "env.id", "seed")  # settings that a continued run cannot change


class RunFolder:
    """A folder with ``config.yaml``, ``metrics.jsonl`` and ``checkpoints/``, which the command line reads.

    Parameters
    ----------
    where : str
        Name at the beginning of error messages.
    folder : path, optional
        A new folder, or that of the run whose checkpoint was restored. By default a new one below ``outputs``, as on
        the command line, whose name is chosen when the training starts.
    trackers : list of str
        Names of loggers, which mirror the record with their default settings.
    """

    def __init__(self, where: str, folder: str | os.PathLike | None, trackers: list[str]):
        self.where = where
        self.path = None if folder is None else Path(folder)
        self.trackers = trackers
        self._callbacks: tuple[RecordLogger, CheckpointCallback] | None = None  # None before the first training
        try:
            is_file = self.path is not None and not self.path.is_dir() and self.path.exists()
        except (OSError, ValueError) as e:  # too long, or with a null character
            raise ValueError(f"{where}: logger must be a folder that can be made, got {shown(str(folder))}") from e
        if is_file:
            raise ValueError(f"{where}: logger must be a folder, got the file {self.path}")

    @contextmanager
    def recording(self, algorithm: Any) -> Iterator[None]:
        """Record one training of `algorithm`, whose end is already set.

        An interrupt leaves the record without an end, as a killed run has: its last checkpoint can be continued.

        Raises
        ------
        ValueError
            If the folder contains a run, and this training is a new one, has another algorithm, environment or seed, or
            was restored from a checkpoint in the folder of another run.
        RuntimeError
            If another process trains in the folder.
        """
        step = algorithm.counters.steps
        if self.path is None:
            self.path = _new_folder(algorithm.name, _env_id(algorithm), algorithm.seed)
        if (memory := getattr(algorithm, "_memory", None)) is not None and self._callbacks is None:
            # The last checkpoint needs the memory's file, which would be temporary.
            memory.choose_folder(self.path)
        plain = json.loads(json.dumps(to_plain(_run_config(algorithm, self.trackers), algorithm.name), default=str))
        changed = self._changes(plain, self._is_other(algorithm), type(algorithm).__name__)
        record = Record(
            self.path, versions=versions(algorithm.device), resume_step=step or None, changed=changed or None
        )
        with record:
            begun = False
            try:
                run_files.replace_text(self.path, "config.yaml", yaml.safe_dump(plain, sort_keys=False))
                for path in (self.path / "checkpoints").rglob(".*.partial"):
                    path.unlink(missing_ok=True)  # a killed process has not finished writing it
                self._attach(algorithm, record, plain)
                tracking.start_mirrors(self.path)
                begun = True
                yield
            except Exception as e:
                # On a full disk this fails too; the first error is the one to report.
                with suppress(OSError):
                    if begun or record.segment:
                        record.end(algorithm.counters.steps, "failed", f"{type(e).__name__}: {one_line(e, 1000)}")
                    else:
                        (self.path / FILE).unlink()  # nothing was trained: the folder can be used again
                raise
            reasons = [getattr(callback, "stopped", None) for callback in algorithm.callbacks.callbacks]
            early = next((reason for reason in reasons if isinstance(reason, str)), "a callback ended the training")
            c = algorithm.counters
            record.end(c.steps, "finished", f"stopped early: {early}" if c.steps < c.end else "")

    def _is_other(self, algorithm: Any) -> bool:
        """Return whether `algorithm` is new, or was restored from a checkpoint in the folder of another run."""
        assert self.path is not None
        if algorithm.counters.steps == 0:
            return True
        origin: Path | None = getattr(algorithm, "_restored_from", None)
        if origin is None:
            return False
        run = origin.resolve().parent  # has no record if the checkpoint was copied out of its run
        return run != self.path.resolve() and (run / FILE).is_file()

    def _changes(self, plain: dict[str, Any], other: bool, cls: str) -> dict[str, Any]:
        """Return the settings that differ from those of the run in the folder; none for a new folder.

        Raises
        ------
        ValueError
            If the folder contains a run that this training does not continue.
        """
        assert self.path is not None
        record = run_files.check(self.path, FILE)
        if record is None or not record.st_size:
            return {}
        changes = dict(differences(read_config(self.path), plain))
        if self._callbacks is None and (other or any(name in changes for name in _ONE_RUN)):
            raise ValueError(
                f"{self.where}: logger must be a new folder, got {self.path}, which contains a run; choose another, or "
                f"continue that run with {cls}.from_checkpoint('{self.path}/checkpoints/last.safetensors', "
                f"logger='{self.path}')"
            )
        return changes

    def _attach(self, algorithm: Any, record: Record, plain: dict[str, Any]) -> None:
        """Let the algorithm write to `record`; the first time, add the callbacks that do so."""
        if self._callbacks is None:
            checkpoints = CheckpointCallback(record.folder / "checkpoints")
            self._callbacks = RecordLogger(record), checkpoints
            algorithm.callbacks.extend(self._callbacks)
            checkpoints.best = max(checkpoints.best, best_score(record.folder))
        recorder, checkpoints = self._callbacks
        recorder.record, checkpoints.run = record, plain


def best_score(folder: Path) -> float:
    """Return the score of a run's ``best.safetensors``, which may be newer than its last checkpoint; -inf without one.

    Raises ValueError if the file holds no score.
    """
    if not run_files.is_file(folder, "checkpoints/best.safetensors"):
        return -math.inf
    path = folder / "checkpoints" / "best.safetensors"
    evaluation = read_header(path).get("evaluation")
    score = evaluation.get("mean_return") if isinstance(evaluation, dict) else None
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        raise ValueError(f"{path} must hold the evaluation it was saved for, got none; restore or delete it")
    return score


def run_folder(where: str, logger: Any) -> RunFolder | None:
    """Return the run folder for the argument ``logger``; None if it is a callback, or None.

    Raises
    ------
    TypeError
        For other objects.
    ValueError
        For a misspelt tracker, several folders, or a path that is not a folder.
    """
    trackers = logger_names()
    form = f"a LoggerCallback or another Callback, a folder, or one of {', '.join(trackers)}, or a list of these"
    items = list(logger) if isinstance(logger, (list, tuple)) else [logger]
    if not items or not all(isinstance(item, (str, os.PathLike)) and str(item) for item in items):
        raise TypeError(f"{where}: logger must be {form}, got {shown(logger)}")
    folders = [item for item in items if item not in trackers]
    for item in folders:
        close = difflib.get_close_matches(str(item).lower(), trackers, n=1, cutoff=0.7)
        if isinstance(item, str) and close and os.path.basename(item) == item:
            raise ValueError(
                f"{where}: logger must be {form}, got {shown(item)}; did you mean {close[0]!r}? Write './{item}' for "
                "a folder of that name"
            )
    if len(folders) > 1:
        raise ValueError(f"{where}: logger must contain at most one folder, got {shown(logger)}")
    return RunFolder(where, folders[0] if folders else None, [item for item in items if item in trackers])


def _new_folder(algo: str, env: str, seed: int) -> Path:
    """Return a new path such as the command line chooses."""
    name = re.sub(r"[^\w.-]+", "_", f"{algo}-{env[:100]}-s{seed}")
    return Path("outputs", time.strftime("%Y-%m-%d"), f"{name}-{time.strftime('%H%M%S')}-{uuid.uuid4().hex[:4]}")


def _run_config(algorithm: Any, trackers: list[str]) -> RunConfig:
    """Return the settings of `algorithm` in the form of the command line."""
    c, config = algorithm.counters, algorithm.config
    language, dataset = type(config).uses_dataset == "text", _rows_of(algorithm)
    memory = getattr(algorithm, "_memory", None)
    return RunConfig(
        seed=algorithm.seed,
        total_timesteps=max(1, c.end),
        schedule_timesteps=None if c.schedule_steps == c.horizon_steps else c.horizon_start + c.schedule_steps,
        device=algorithm._requested_device,
        backend=str(algorithm.backend),
        threads=algorithm._threads,
        compile=algorithm.backend.compiles,
        model=(algorithm.source or type(algorithm.policy).__name__) if language else None,
        algo=config,
        env=_env(algorithm),
        buffer=None if memory is None else memory.config,
        dataset=None if dataset is None else _dataset(dataset),
        eval=_evaluation(algorithm),
        logger=logger_config()(**{name: logger_settings(name)() for name in trackers}),
    )


def _rows_of(algorithm: Any) -> Any:
    """Return the dataset, or the rows of text, from which `algorithm` learns; None if there are none."""
    names = ("rows",) if type(algorithm.config).uses_dataset == "text" else ("dataset", "_dataset")
    return next((vars(algorithm)[name] for name in names if name in vars(algorithm)), None)


def _env(algorithm: Any) -> EnvConfig:
    """Return the settings of the environments; a language model has none, but the name of its dataset."""
    options = getattr(algorithm, "env_options", None)
    if options is None:
        return EnvConfig(id=_env_id(algorithm), n_envs=1)
    return EnvConfig(
        id=_env_id(algorithm),
        n_envs=algorithm.n_envs,
        kwargs=options.kwargs,
        wrappers=options.wrappers,
        workers=options.workers,
        backend=options.backend,
        reward_fn=_reward(algorithm),
    )


def _env_id(algorithm: Any) -> str:
    """Return the environment's id; without an environment, the name of the dataset."""
    if (env_id := getattr(algorithm, "env_id", None)) is not None:
        return env_name(env_id)
    known = getattr(_rows_of(algorithm), "metadata", None) or {}
    return str(known.get("env", {}).get("id") or Path(_dataset(_rows_of(algorithm)).source).stem)


def _dataset(dataset: Any) -> DatasetConfig:
    """Return the source of a dataset, or the name of its class if it was created in memory."""
    known = getattr(dataset, "metadata", None) or {}
    source = str(known.get("source") or type(dataset).__name__)
    return DatasetConfig(source, normalize=bool(getattr(dataset, "normalized", False)))


def _reward(algorithm: Any) -> str | None:
    """Return the name of the function that replaces the rewards, if there is one."""
    reward_fn = getattr(algorithm.collector, "reward_fn", None)
    return None if reward_fn is None else reward_name(reward_fn).removeprefix("rlox:")


def _evaluation(algorithm: Any) -> EvalConfig:
    """Return the settings of the algorithm's `EvalCallback`; without one, those of a run without evaluations."""
    callback = next((each for each in algorithm.callbacks.callbacks if isinstance(each, EvalCallback)), None)
    if callback is None:
        return EvalConfig(n_points=0)
    names = [item.name for item in dataclasses.fields(EvalConfig) if hasattr(callback, item.name)]
    return EvalConfig(**{name: getattr(callback, name) for name in names})
