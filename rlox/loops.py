"""One training loop per family. A loop knows no algorithm by name; the step counters exist here, once."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import asdict, dataclass, field

import numpy as np
import torch


@dataclass
class Counters:
    """What a training has done so far; the same words mean the same in every loop."""

    env_steps: int = 0  # environment steps, over all environments together
    updates: int = 0  # calls of the algorithm's update
    episodes: int = 0  # episodes completed
    horizon_start: int = 0  # env_steps at which the current train() began
    horizon_steps: int = 0  # steps it was asked for; schedules end there
    recent_returns: deque[float] = field(default_factory=lambda: deque(maxlen=100))  # undiscounted, of whole episodes
    recent_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=100))  # steps

    @property
    def progress(self) -> float:
        """Fraction of the horizon that is done, in [0, 1]."""
        return min(1.0, (self.env_steps - self.horizon_start) / max(1, self.horizon_steps))

    @property
    def mean_reward(self) -> float:
        return float(np.mean(self.recent_returns)) if self.recent_returns else math.nan

    @property
    def mean_length(self) -> float:
        return float(np.mean(self.recent_lengths)) if self.recent_lengths else math.nan

    def scalars(self) -> dict[str, int]:
        """The integers alone, for a checkpoint's header."""
        return {name: value for name, value in asdict(self).items() if isinstance(value, int)}


def scheduled(value: float, schedule: str, progress: float) -> float:
    """`value` as it stands at `progress` in [0, 1]: constant, or linearly down to 0."""
    return value * (1.0 - progress) if schedule == "linear" else value


def to_floats(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """Scalars as floats, with a single transfer from the device."""
    if not metrics:
        return {}
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


def on_policy(algorithm) -> dict[str, float]:
    """Collect, update, repeat until the horizon is reached or a callback says stop; returns the last metrics.

    Raises
    ------
    FloatingPointError
        As soon as an update's metrics are not finite: the weights are then not to be trusted, and nothing saved is
        touched.
    """
    c, callbacks = algorithm.counters, algorithm.callbacks
    metrics: dict[str, float] = {"mean_reward": c.mean_reward}
    end = c.horizon_start + c.horizon_steps
    callbacks.on_training_start(algorithm=algorithm)
    go_on = True
    since, since_steps = time.perf_counter(), c.env_steps
    while go_on and c.env_steps < end:
        started = time.perf_counter()
        try:
            batch = algorithm.collector.collect(algorithm.policy, algorithm.config.n_steps)
        except Exception as e:
            # An environment failed, not the learner: the weights are those of the last update, and worth keeping.
            callbacks.on_collection_error(algorithm=algorithm, error=e)
            raise
        collected = time.perf_counter()
        c.env_steps += len(batch)
        c.episodes += len(batch.episode_returns)
        c.recent_returns.extend(batch.episode_returns.tolist())
        c.recent_lengths.extend(batch.episode_lengths.tolist())
        callbacks.on_rollout_end(algorithm=algorithm, batch=batch)
        updating = time.perf_counter()
        losses = to_floats(algorithm.update(batch))
        c.updates += 1
        now = time.perf_counter()
        for name, value in losses.items():
            # Explained variance is undefined (NaN) where all returns are equal; every other metric must be a number.
            if not math.isfinite(value) and name != "explained_variance":
                raise FloatingPointError(
                    f"{algorithm.name}: {name} became {value} at step {c.env_steps}; training cannot go on. Try a "
                    "lower learning_rate or max_grad_norm, and look for extreme rewards or observations"
                )
        metrics = {
            "mean_reward": c.mean_reward,
            "mean_length": c.mean_length,
            **losses,
            "time/steps_per_second": (c.env_steps - since_steps) / (now - since),
            "time/collect_s": collected - started,
            "time/update_s": now - updating,
        }
        go_on = callbacks.on_step(step=c.env_steps, reward=c.mean_reward, metrics=metrics, algorithm=algorithm)
        # Evaluation and saving are not the training's speed.
        since += time.perf_counter() - now
    callbacks.on_training_end(algorithm=algorithm)
    return metrics
