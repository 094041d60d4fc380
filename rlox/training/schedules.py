"""The end of a training and of its schedules, and the scheduled values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from rlox.checkpoint.counters import Counters

if TYPE_CHECKING:
    from rlox.config import Config


def scheduled(value: float, schedule: str, progress: float) -> float:
    """Return `value` at `progress` in [0, 1]: constant, or decaying linearly to 0."""
    return value * (1.0 - progress) if schedule == "linear" else value


def interpolated(start: float, end: float, progress: float, fraction: float) -> float:
    """Interpolate linearly from `start` to `end` over the first `fraction` of the horizon; return `end` after it."""
    return end if progress >= fraction else start + (end - start) * progress / fraction


def follow_schedule(optimizers: Iterable[Any], config: Config, progress: float) -> None:
    """Set the learning rate of all `optimizers` to the scheduled value at `progress`."""
    learning_rate = scheduled(config.learning_rate, config.learning_rate_schedule, progress)
    for optimizer in optimizers:
        optimizer.learning_rate = learning_rate


def schedule_values(config: Config, progress: float) -> dict[str, float]:
    """Return the learning rate and all other scheduled values of `config` at `progress`."""
    found = {}
    for name, kind in _with_schedule(type(config)):  # type: ignore[arg-type]  # a class has a hash
        schedule = getattr(config, kind)
        if schedule != "constant" or name == "learning_rate":
            found[name] = scheduled(getattr(config, name), schedule, progress)
    return found


@cache
def _with_schedule(kind: type[Config]) -> list[tuple[str, str]]:
    """Return the fields that have a schedule, with the names of their schedule fields; looked up once."""
    names = [field.name for field in fields(kind)]
    return [(name, f"{name}_schedule") for name in names if f"{name}_schedule" in names]


def plan(algorithm: Any, length: int | None, until: int | None, schedule_timesteps: int | None) -> None:
    """Set the end of a training and of its schedules from the arguments of ``train``.

    Warns
    -----
    RuntimeWarning
        If the end of a continued training's schedules changes, with their values before and after; and if a learning
        rate is 0 for the rest of the training because it was planned so before.

    Raises
    ------
    ValueError
        As `Counters.plan`; also if a learning rate would be 0 for the rest of the training. The plan is then unchanged.
    """
    c, where = algorithm.counters, f"{type(algorithm).__name__}.train"
    if algorithm._trains:
        raise ValueError(
            f"{where}: train must not be called by a callback or another thread while this algorithm trains; return "
            "False from on_step to end that training, and call train after it"
        )
    c.in_round = 0
    kept, old_end = c.scalars(), c.horizon_start + c.schedule_steps
    before = algorithm.schedule_values(c.progress)
    c.plan(where, algorithm.length, length, until, schedule_timesteps)
    if length is not None:
        return
    end, after = c.horizon_start + c.schedule_steps, algorithm.schedule_values(c.progress)
    frozen = [key for key, value in after.items() if key.endswith("learning_rate") and value == 0.0]
    if frozen and c.steps < c.end and c.scalars() == kept:
        warnings.warn(
            f"train: {frozen[0]} is 0 for the rest of the training, since schedules ended at {c.unit[:-1]} {end:,}; "
            f"schedule_timesteps={c.horizon_steps} stretches them to the end",
            RuntimeWarning,
            stacklevel=4,
        )
        return
    if frozen and c.steps < c.end:
        c.restore(kept)
        raise ValueError(
            f"{where}: schedule_timesteps must be more than the {c.steps - c.horizon_start:,} {c.unit} that are done, "
            f"got {schedule_timesteps:,}: {frozen[0]} would be 0 for the rest of the training; leave it out (null on "
            "the command line) to stretch the schedules to the new end, or choose a larger value"
        )
    if moved := [f"{key} {old:.3g} -> {after[key]:.3g}" for key, old in before.items() if old != after[key]]:
        warnings.warn(
            f"train: schedules now end at {c.unit[:-1]} {end:,}, not {old_end:,}: {', '.join(moved)}",
            RuntimeWarning,
            stacklevel=4,
        )


@contextmanager
def running(algorithm: Any) -> Iterator[None]:
    """Mark the algorithm as training, so that no other training can start, and report exceptions to callbacks."""
    algorithm._trains = True
    try:
        yield
    except Exception as e:
        algorithm.callbacks.on_training_error(algorithm=algorithm, error=e)
        raise
    finally:
        algorithm._trains = False


def warn_if_done(counters: Counters) -> None:
    """Warn (RuntimeWarning) if a continued training has nothing left to do."""
    c = counters
    if c.steps >= c.end:
        warnings.warn(
            f"train: nothing is left to train, all {c.horizon_steps:,} {c.unit} are done; train(until=...) with more "
            f"than {c.end} continues, train(number) starts a new training",
            RuntimeWarning,
            stacklevel=4,
        )
