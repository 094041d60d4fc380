"""Values that a schedule moves while a training goes on."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlox.config import Config


def scheduled(value: float, schedule: str, progress: float) -> float:
    """`value` as it stands at `progress` in [0, 1]: constant, or linearly down to 0."""
    return value * (1.0 - progress) if schedule == "linear" else value


def interpolated(start: float, end: float, progress: float, fraction: float) -> float:
    """From `start` to `end`, linearly over the first `fraction` of the horizon; `end` from then on."""
    return end if progress >= fraction else start + (end - start) * progress / fraction


def schedule_values(config: Config, progress: float) -> dict[str, float]:
    """The learning rate, and what else in `config` a schedule moves, at `progress`."""
    found = {}
    for name, kind in _with_schedule(type(config)):
        schedule = getattr(config, kind)
        if schedule != "constant" or name == "learning_rate":
            found[name] = scheduled(getattr(config, name), schedule, progress)
    return found


@cache
def _with_schedule(kind: type[Config]) -> list[tuple[str, str]]:
    """The fields that have another one for their schedule, and that one; looked up once."""
    names = [field.name for field in fields(kind)]
    return [(name, f"{name}_schedule") for name in names if f"{name}_schedule" in names]
