"""Scheduled values of hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlox.config import Config


def scheduled(value: float, schedule: str, progress: float) -> float:
    """Return `value` at `progress` in [0, 1]: constant, or decaying linearly to 0."""
    return value * (1.0 - progress) if schedule == "linear" else value


def interpolate(start: float, end: float, progress: float, fraction: float) -> float:
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
