"""Step counters of a training run, with the same meaning in every training loop, and schedules that follow them."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rlox.config import Config, integer
from rlox.config.base import MOST_STEPS

_RECENT = 100  # episodes whose mean is reported


@dataclass
class Counters:
    """Progress of a training run. The counters have the same meaning in every training loop."""

    env_steps: int = 0  # environment steps, summed over all environments
    updates: int = 0  # calls of the algorithm's update
    episodes: int = 0  # episodes completed
    horizon_start: int = 0  # value of `steps` at which the current training began
    horizon_steps: int = 0  # length that was requested for it
    schedule_steps: int = 0  # steps after which its schedules end; differs from horizon_steps only on request
    recent_returns: deque[float] = field(
        default_factory=lambda: deque(maxlen=_RECENT)
    )  # undiscounted, of whole episodes
    recent_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))  # steps
    mean_reward: float = field(
        default=math.nan, init=False, compare=False
    )  # mean of recent_returns; NaN if there are none
    mean_length: float = field(default=math.nan, init=False, compare=False)  # mean of recent_lengths
    clock: str = "env_steps"  # the counter that measures a training's length; offline: updates
    # Steps of the rollout or round that the update learns from (offline: of the last update); 0 during collection.
    in_round: int = field(default=0, compare=False)
    # In an update that a GPU replays as a graph: a tensor () that contains `progress`, because numbers are constants of
    # the graph.
    captured_progress: Any = field(default=None, compare=False, repr=False)

    @property
    def steps(self) -> int:
        """Value of the counter that `clock` names."""
        return getattr(self, self.clock)

    @property
    def unit(self) -> str:
        """Unit of `steps` in messages: ``steps`` or ``updates``."""
        return "steps" if self.clock == "env_steps" else self.clock

    @property
    def progress(self) -> Any:
        """Fraction of the schedules' length that had passed when the current rollout or round began, in [0, 1].

        The steps of the current rollout do not count, so that the last update has a step size above 0, as in CleanRL.
        A float; in an update that is captured as a CUDA graph, a tensor () f32.
        """
        if self.captured_progress is not None:
            return self.captured_progress
        done = getattr(self, self.clock) - self.in_round - self.horizon_start
        return min(1.0, done / max(1, self.schedule_steps))

    @property
    def end(self) -> int:
        """`steps` at which the current training ends."""
        return self.horizon_start + self.horizon_steps

    def plan(
        self, where: str, name: str, length: int | None, until: int | None, schedule_timesteps: int | None
    ) -> None:
        """Set the end of the training and of its schedules, as ``train`` requests.

        `name` is what ``train`` calls `length`. If `until` moves the end of the training, schedules are stretched to
        it, unless `schedule_timesteps` sets their end.

        Raises
        ------
        TypeError
            If a value is not an integer.
        ValueError
            If a number is below 1, if both `length` and `until` are given, if neither is given and no training was
            begun, or if `until` has already passed.
        """
        given = {name: length, "until": until, "schedule_timesteps": schedule_timesteps}
        length, until, schedule_timesteps = (
            None if value is None else integer(where, key, value, 1, MOST_STEPS) for key, value in given.items()
        )
        if length is not None and until is not None:
            raise ValueError(
                f"{where}: {name} must not be given together with until; leave until out to start a new training"
            )
        if length is None and not self.horizon_steps:
            raise ValueError(f"{where}: {name} must be given, since there is no training to continue")
        if length is not None:
            self.horizon_start, self.horizon_steps, self.schedule_steps = self.steps, length, length
        if until is not None and until != self.end:
            if until < self.steps:
                raise ValueError(f"{where}: until must be >= the {self.steps} {self.unit} that are done, got {until}")
            self.horizon_steps = self.schedule_steps = until - self.horizon_start
        if schedule_timesteps is not None:
            self.schedule_steps = schedule_timesteps

    def replan(
        self,
        where: str,
        name: str,
        until: int | None,
        schedule_timesteps: int | None,
        values: Callable[[float], dict[str, float]],
    ) -> None:
        """Plan the rest of a training; look at the scheduled `values`, by their names, as a function of `progress`.

        Warns
        -----
        RuntimeWarning
            If the end of a continued training's schedules changes, with their values before and after; and if a
            learning rate is 0 for the rest of the training because it was planned so before.

        Raises
        ------
        TypeError, ValueError
            As `plan`; also if a learning rate would be 0 for the rest of the training. The plan is then unchanged.
        """
        kept, old_end = self.scalars(), self.horizon_start + self.schedule_steps
        before = values(self.progress)
        self.plan(where, name, None, until, schedule_timesteps)
        end, after = self.horizon_start + self.schedule_steps, values(self.progress)
        frozen = [key for key, value in after.items() if key.endswith("learning_rate") and value == 0.0]
        if frozen and self.steps < self.end and self.scalars() == kept:
            warnings.warn(
                f"train: {frozen[0]} is 0 for the rest of the training, since schedules ended at {self.unit[:-1]} "
                f"{end:,}; schedule_timesteps={self.horizon_steps} stretches them to the end",
                RuntimeWarning,
                stacklevel=5,
            )
            return
        if frozen and self.steps < self.end:
            self.restore(kept)
            raise ValueError(
                f"{where}: schedule_timesteps must be more than the {self.steps - self.horizon_start:,} {self.unit} "
                f"that are done, got {schedule_timesteps:,}: {frozen[0]} would be 0 for the rest of the training; "
                "leave it out (null on the command line) to stretch the schedules to the new end, or choose a larger "
                "value"
            )
        if moved := [f"{key} {old:.3g} -> {after[key]:.3g}" for key, old in before.items() if old != after[key]]:
            warnings.warn(
                f"train: schedules now end at {self.unit[:-1]} {end:,}, not {old_end:,}: {', '.join(moved)}",
                RuntimeWarning,
                stacklevel=5,
            )

    def ended(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        """Count E completed episodes, given their undiscounted returns (E,) and lengths in steps (E,)."""
        if len(returns):  # in most short rollouts no episode ends
            self.episodes += len(returns)
            self.remember(returns, lengths)

    def remember(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        """Add episodes to the recent ones, without counting them."""
        # Of tens of thousands of episodes, which a GPU completes in one rollout, only the last ones are kept.
        self.recent_returns.extend(returns[-_RECENT:].tolist())
        self.recent_lengths.extend(lengths[-_RECENT:].tolist())
        # NumPy takes ten times as long for so few numbers.
        self.mean_reward = sum(self.recent_returns) / len(self.recent_returns) if self.recent_returns else math.nan
        self.mean_length = sum(self.recent_lengths) / len(self.recent_lengths) if self.recent_lengths else math.nan

    def restore(self, scalars: Mapping[str, int]) -> None:
        """Restore the values that `scalars` returned."""
        for name, value in {"schedule_steps": scalars["horizon_steps"], **scalars}.items():
            setattr(self, name, value)

    def scalars(self) -> dict[str, int]:
        """Return only the integers, for a checkpoint's header."""
        return {n: value for n, value in asdict(self).items() if isinstance(value, int) and n != "in_round"}


def scheduled(value: float, schedule: str, progress: Any, end: float = 0.0) -> Any:
    """Return `value` at `progress` in [0, 1]: constant, or falling to the part `end` of it, linearly or along half a
    cosine; a tensor if `progress` is one."""
    if schedule == "linear":
        return value * (1.0 - (1.0 - end) * progress)
    if schedule == "cosine":
        angle = math.pi * progress
        cosine = math.cos(angle) if isinstance(angle, float) else angle.cos()
        return value * (end + (1.0 - end) * 0.5 * (1.0 + cosine))
    return value


def interpolate(start: float, end: float, progress: float, fraction: float) -> float:
    """Interpolate linearly from `start` to `end` over the first `fraction` of the horizon; return `end` after it."""
    return end if progress >= fraction else start + (end - start) * progress / fraction


def follow_schedule(optimizers: Iterable[Any], config: Config, progress: float) -> None:
    """Set the learning rate of all `optimizers` to the scheduled value at `progress`."""
    schedule, end = config.learning_rate_schedule, getattr(config, "learning_rate_end", 0.0)
    for optimizer in optimizers:
        optimizer.learning_rate = scheduled(optimizer.initial_rate, schedule, progress, end)
