"""The end of a training and of its schedules, and the values that these move."""

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
    """`value` as it stands at `progress` in [0, 1]: constant, or linearly down to 0."""
    return value * (1.0 - progress) if schedule == "linear" else value


def interpolated(start: float, end: float, progress: float, fraction: float) -> float:
    """From `start` to `end`, linearly over the first `fraction` of the horizon; `end` from then on."""
    return end if progress >= fraction else start + (end - start) * progress / fraction


def follow_schedule(optimizers: Iterable[Any], config: Config, progress: float) -> None:
    """Set the learning rate of all `optimizers` to what the schedule says at `progress`."""
    learning_rate = scheduled(config.learning_rate, config.learning_rate_schedule, progress)
    for optimizer in optimizers:
        optimizer.learning_rate = learning_rate


def schedule_values(config: Config, progress: float) -> dict[str, float]:
    """The learning rate, and what else in `config` a schedule moves, at `progress`."""
    found = {}
    for name, kind in _with_schedule(type(config)):  # type: ignore[arg-type]  # a class has a hash
        schedule = getattr(config, kind)
        if schedule != "constant" or name == "learning_rate":
            found[name] = scheduled(getattr(config, name), schedule, progress)
    return found


@cache
def _with_schedule(kind: type[Config]) -> list[tuple[str, str]]:
    """The fields that have another one for their schedule, and that one; looked up once."""
    names = [field.name for field in fields(kind)]
    return [(name, f"{name}_schedule") for name in names if f"{name}_schedule" in names]


def plan(algorithm: Any, length: int | None, until: int | None, schedule_timesteps: int | None) -> None:
    """Set the end of a training and of its schedules, as ``train`` is asked to.

    Warns
    -----
    RuntimeWarning
        Where the schedules of a continued training get another end, with their values before and after; and
        where a learning rate is 0 in all that is left, as it was planned before.

    Raises
    ------
    ValueError
        As `Counters.plan`; also where a learning rate would be 0 in all that is left. The plan is what it was then.
    """
    c, where = algorithm.counters, f"{type(algorithm).__name__}.train"
    if algorithm._trains:
        raise ValueError(
            f"{where}: it must not be called while this algorithm trains, by a callback or another thread; return "
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
            f"train: {frozen[0]} is 0 in all that is left, since schedules ended at {c.unit[:-1]} {end:,}; "
            f"schedule_timesteps={c.horizon_steps} stretches them to the end",
            RuntimeWarning,
            stacklevel=4,
        )
        return
    if frozen and c.steps < c.end:
        c.restore(kept)
        raise ValueError(
            f"{where}: schedule_timesteps must be more than the {c.steps - c.horizon_start:,} {c.unit} that are done, "
            f"got {schedule_timesteps:,}: {frozen[0]} would be 0 in all that is left; leave it out (null on the "
            "command line) to stretch the schedules to the new end, or name a later one"
        )
    if moved := [f"{key} {old:.3g} -> {after[key]:.3g}" for key, old in before.items() if old != after[key]]:
        warnings.warn(
            f"train: schedules now end at {c.unit[:-1]} {end:,}, not {old_end:,}: {', '.join(moved)}",
            RuntimeWarning,
            stacklevel=4,
        )


@contextmanager
def running(algorithm: Any) -> Iterator[None]:
    """Around a training: no other one begins within it, and callbacks hear of the exception that ends it early."""
    algorithm._trains = True
    try:
        yield
    except Exception as e:
        algorithm.callbacks.on_training_error(algorithm=algorithm, error=e)
        raise
    finally:
        algorithm._trains = False


def warn_if_done(counters: Counters) -> None:
    """A RuntimeWarning where a continued training has nothing left to do."""
    c = counters
    if c.steps >= c.end:
        warnings.warn(
            f"train: nothing is left to train, all {c.horizon_steps:,} {c.unit} are done; train(until=...) with more "
            f"than {c.end} goes on, train(number) begins a new training",
            RuntimeWarning,
            stacklevel=4,
        )
