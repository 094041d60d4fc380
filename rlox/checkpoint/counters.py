"""The step counters of a training; they exist once and mean the same in every loop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from rlox.config import integer

MOST_STEPS = 2**62 - 1  # of a training, since kernels add to them


def _mean(recent: deque[float] | deque[int]) -> float:
    # NumPy takes ten times as long for so few numbers, which A2C's rounds of some 100 us would feel.
    return sum(recent) / len(recent) if recent else math.nan


@dataclass
class Counters:
    """What a training has done so far; the same words mean the same in every loop."""

    env_steps: int = 0  # environment steps, over all environments together
    updates: int = 0  # calls of the algorithm's update
    episodes: int = 0  # episodes completed
    horizon_start: int = 0  # steps (by the clock) at which the current training began
    horizon_steps: int = 0  # steps it was asked for
    schedule_steps: int = 0  # steps after which its schedules end; another number where it was asked for
    recent_returns: deque[float] = field(default_factory=lambda: deque(maxlen=100))  # undiscounted, of whole episodes
    recent_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=100))  # steps
    clock: str = "env_steps"  # the counter that a training's length is measured by; offline: updates
    # Steps of the rollout or round that is being learned from, offline of the last update; 0 while it is collected.
    in_round: int = field(default=0, compare=False)

    @property
    def steps(self) -> int:
        """What the clock says: how far the trainings have come."""
        return getattr(self, self.clock)

    @property
    def unit(self) -> str:
        """What `steps` counts, for people: ``steps`` or ``updates``."""
        return "steps" if self.clock == "env_steps" else self.clock

    @property
    def progress(self) -> float:
        """Fraction of the schedules' length that was done when the current rollout or round began, in [0, 1].

        Its own steps do not count when it is learned from, so that the last update has a step size above 0, as in
        CleanRL.
        """
        return min(1.0, (self.steps - self.in_round - self.horizon_start) / max(1, self.schedule_steps))

    @property
    def end(self) -> int:
        """`steps` at which the current training ends."""
        return self.horizon_start + self.horizon_steps

    def plan(
        self, where: str, name: str, length: int | None, until: int | None, schedule_timesteps: int | None
    ) -> None:
        """Set the end of the training and of its schedules, as ``train`` is asked to; `name` is its word for `length`.

        Schedules are stretched to an end that `until` moves, unless `schedule_timesteps` says where they end.

        Raises
        ------
        TypeError
            For what is no integer.
        ValueError
            For a number below 1, both `length` and `until`, neither where nothing was begun, or an `until` that is
            already past.
        """
        given = {name: length, "until": until, "schedule_timesteps": schedule_timesteps}
        length, until, schedule_timesteps = (
            None if value is None else integer(where, key, value, 1, MOST_STEPS) for key, value in given.items()
        )
        if length is not None and until is not None:
            raise ValueError(f"{where}: {name} must not stand beside until; the first begins a new training")
        if length is None and not self.horizon_steps:
            raise ValueError(f"{where}: {name} must be given, for there is no training to go on with")
        if length is not None:
            self.horizon_start, self.horizon_steps, self.schedule_steps = self.steps, length, length
        if until is not None and until != self.end:
            if until < self.steps:
                raise ValueError(f"{where}: until must be >= the {self.steps} {self.unit} that are done, got {until}")
            self.horizon_steps = self.schedule_steps = until - self.horizon_start
        if schedule_timesteps is not None:
            self.schedule_steps = schedule_timesteps

    def ended(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        """Take in the episodes that ended, (E,) undiscounted returns and (E,) steps."""
        self.episodes += len(returns)
        self.recent_returns.extend(returns.tolist())
        self.recent_lengths.extend(lengths.tolist())

    @property
    def mean_reward(self) -> float:
        return _mean(self.recent_returns)

    @property
    def mean_length(self) -> float:
        return _mean(self.recent_lengths)

    def restore(self, scalars: Mapping[str, int]) -> None:
        """Go on from what `scalars` returned."""
        for name, value in {"schedule_steps": scalars["horizon_steps"], **scalars}.items():
            setattr(self, name, value)

    def scalars(self) -> dict[str, int]:
        """The integers alone, for a checkpoint's header."""
        return {n: value for n, value in asdict(self).items() if isinstance(value, int) and n != "in_round"}
