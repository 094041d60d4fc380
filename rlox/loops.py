"""One training loop per family. A loop knows no algorithm by name; the step counters exist here, once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


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
    schedule_steps: int = 0  # steps after which its schedules end; another number where it was extended
    recent_returns: deque[float] = field(default_factory=lambda: deque(maxlen=100))  # undiscounted, of whole episodes
    recent_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=100))  # steps
    clock: str = "env_steps"  # the counter that a training's length is measured by; offline: updates

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
        """Fraction of the schedules' length that is done, in [0, 1]."""
        return min(1.0, (self.steps - self.horizon_start) / max(1, self.schedule_steps))

    @property
    def end(self) -> int:
        """`steps` at which the current training ends."""
        return self.horizon_start + self.horizon_steps

    def plan(
        self, where: str, name: str, length: int | None, until: int | None, schedule_timesteps: int | None
    ) -> None:
        """Set the end of the training and of its schedules, as ``train`` is asked to; `name` is its word for `length`.

        Raises
        ------
        ValueError
            For a number below 1, both `length` and `until`, or neither where nothing was begun.
        """
        for key, value in {name: length, "until": until, "schedule_timesteps": schedule_timesteps}.items():
            if value is not None and value < 1:
                raise ValueError(f"{where}: {key} must be >= 1, got {value}")
        if length is not None and until is not None:
            raise ValueError(f"{where}: {name} must not stand beside until; the first begins a new training")
        if length is None and not self.horizon_steps:
            raise ValueError(f"{where}: {name} must be given, for there is no training to go on with")
        if length is not None:
            self.horizon_start, self.horizon_steps, self.schedule_steps = self.steps, length, length
        if until is not None:
            self.horizon_steps = until - self.horizon_start
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
        return {name: value for name, value in asdict(self).items() if isinstance(value, int)}


@dataclass(frozen=True)
class Episodes:
    """What one round of off-policy collection has brought; its length is the environment steps taken."""

    n_steps: int  # over all environments together
    episode_returns: np.ndarray  # (E,) f64, undiscounted, of the episodes that ended
    episode_lengths: np.ndarray  # (E,) int64, steps

    def __len__(self) -> int:
        return self.n_steps


@dataclass(frozen=True)
class Rounds(Episodes):
    """What whole rounds have done, collection and updates."""

    metrics: dict[str, np.ndarray]  # (U,) f64 each, a number for each update; empty where there was none
    update_s: float  # seconds of the updates


def scheduled(value: float, schedule: str, progress: float) -> float:
    """`value` as it stands at `progress` in [0, 1]: constant, or linearly down to 0."""
    return value * (1.0 - progress) if schedule == "linear" else value


def interpolated(start: float, end: float, progress: float, fraction: float) -> float:
    """From `start` to `end`, linearly over the first `fraction` of the horizon; `end` from then on."""
    return end if progress >= fraction else start + (end - start) * progress / fraction


def to_floats(metrics: dict[str, torch.Tensor | float]) -> dict[str, float]:
    """Scalars as floats, with a single transfer from the device."""
    if all(isinstance(value, float) for value in metrics.values()):
        return metrics
    import torch

    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


def _require_finite(losses: dict[str, float], algorithm) -> None:
    c = algorithm.counters
    for name, value in losses.items():
        # Explained variance is undefined (NaN) where all returns are equal; every other metric must be a number.
        if not math.isfinite(value) and name != "explained_variance":
            raise FloatingPointError(
                f"{algorithm.name}: {name} became {value} at {c.unit[:-1]} {c.steps}; training cannot go on. "
                "Try a lower learning_rate or max_grad_norm, and look for extreme rewards or observations"
            )


def _means(history: list[dict[str, Any]]) -> dict[str, float]:
    """Of each metric over the updates that told it: a delayed policy's come with its own updates alone.

    A row of `history` holds tensors, or floats, or arrays of many updates' numbers.
    """
    names = dict.fromkeys(name for row in history for name in row)
    columns = {name: [row[name] for row in history if name in row] for name in names}
    if all(isinstance(values[0], (float, np.ndarray)) for values in columns.values()):
        return {name: float(np.hstack(values).mean()) for name, values in columns.items()}
    import torch

    return to_floats({name: torch.stack(values).mean() for name, values in columns.items()})


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
    native = algorithm.backend == "native"
    go_on = callbacks.on_training_start(algorithm=algorithm)
    since, since_steps = time.perf_counter(), c.env_steps
    while go_on and c.env_steps < c.end:
        started, cpu = time.perf_counter(), time.process_time()
        try:
            batch = algorithm.collector.collect(algorithm.actor, algorithm.config.n_steps)
        except Exception as e:
            # An environment failed, not the learner: the weights are those of the last update, and worth keeping.
            callbacks.on_collection_error(algorithm=algorithm, error=e)
            raise
        collected = time.perf_counter()
        c.env_steps += len(batch)
        c.ended(batch.episode_returns, batch.episode_lengths)
        callbacks.on_rollout_end(algorithm=algorithm, batch=batch)
        updating = time.perf_counter()
        losses = to_floats(algorithm.update_native(batch) if native else algorithm.update(batch))
        c.updates += 1
        now = time.perf_counter()
        _require_finite(losses, algorithm)
        metrics = {
            "mean_reward": c.mean_reward,
            "mean_length": c.mean_length,
            **losses,
            "time/steps_per_second": (c.env_steps - since_steps) / (now - since),
            "time/collect_s": collected - started,
            "time/update_s": now - updating,
            "time/cpu_s": time.process_time() - cpu,
        }
        go_on = callbacks.on_step(step=c.env_steps, reward=metrics["mean_reward"], metrics=metrics, algorithm=algorithm)
        # Evaluation and saving are not the training's speed.
        since += time.perf_counter() - now
    callbacks.on_training_end(algorithm=algorithm)
    return metrics


def off_policy(algorithm) -> dict[str, float]:
    """Collect into the replay memory, update from it, repeat until the horizon is reached or a callback says stop.

    A round is `train_freq` environment steps, rounded up to whole steps of all environments, then `gradient_steps`
    updates, once the memory has taken in `learning_starts` steps and holds `min_rows` transitions. Metrics are means
    over the updates since they were last told, which is a hundred times in a training, and every 1,000 steps in a long
    one; only then does a callback see them, and can stop it. Where nothing of Python's must see the single steps, all
    rounds up to then are one call of the algorithm's kernel, which changes no bit of what comes out.

    Raises
    ------
    FloatingPointError
        As soon as metrics are told that are not finite.
    """
    c, config, callbacks = algorithm.counters, algorithm.config, algorithm.callbacks
    collector, buffer, clock = algorithm.collector, algorithm.buffer, time.perf_counter
    update = algorithm.update_native if algorithm.backend == "native" else algorithm.update
    end = c.end
    tell_every = min(1000, max(1, c.horizon_steps // 100))
    metrics: dict[str, float] = {"mean_reward": c.mean_reward}
    history: list[dict[str, Any]] = []
    collect_s = update_s = 0.0
    go_on = callbacks.on_training_start(algorithm=algorithm)
    fused = algorithm.fused()
    since, since_steps, cpu = clock(), c.env_steps, time.process_time()
    while go_on and c.env_steps < end:
        started, round_start = clock(), c.env_steps
        if fused:
            done = algorithm.rounds(min(tell_every - (c.env_steps - c.horizon_start) % tell_every, end - c.env_steps))
            c.ended(done.episode_returns, done.episode_lengths)
            if done.metrics:
                history.append(done.metrics)
            update_s += done.update_s
            collect_s += clock() - started - done.update_s
        else:
            returns: list[float] = []
            lengths: list[int] = []
            try:
                while c.env_steps - round_start < config.train_freq:
                    algorithm.explore()
                    random = c.env_steps < config.learning_starts
                    ended_returns, ended_lengths = collector.step(algorithm.actor, buffer, random)
                    c.env_steps += collector.n_envs
                    if len(ended_returns):
                        returns += ended_returns.tolist()
                        lengths += ended_lengths.tolist()
            except Exception as e:
                # A policy that is not finite any more acts so, and its weights are not worth keeping.
                _require_finite(_means(history), algorithm)
                # An environment failed, not the learner: the weights are those of the last update, and worth keeping.
                callbacks.on_collection_error(algorithm=algorithm, error=e)
                raise
            done = Episodes(c.env_steps - round_start, np.asarray(returns), np.asarray(lengths, np.int64))
            c.ended(done.episode_returns, done.episode_lengths)
            callbacks.on_rollout_end(algorithm=algorithm, batch=done)
            collected = clock()
            if c.env_steps - algorithm.memory_start >= config.learning_starts and len(buffer) >= algorithm.min_rows:
                for _ in range(len(done) if config.gradient_steps == -1 else config.gradient_steps):
                    history.append(update(algorithm.sample()))
                    c.updates += 1
            now = clock()
            collect_s += collected - started
            update_s += now - collected
        so_far = c.env_steps - c.horizon_start
        if so_far // tell_every == (so_far - len(done)) // tell_every and c.env_steps < end:
            continue
        losses = _means(history)
        history.clear()
        _require_finite(losses, algorithm)
        metrics = {
            "mean_reward": c.mean_reward,
            "mean_length": c.mean_length,
            **losses,
            **algorithm.exploration(),
            "time/steps_per_second": (c.env_steps - since_steps) / (clock() - since),
            "time/collect_s": collect_s,
            "time/update_s": update_s,
            "time/cpu_s": time.process_time() - cpu,
        }
        collect_s = update_s = 0.0
        now = clock()
        go_on = callbacks.on_step(step=c.env_steps, reward=c.mean_reward, metrics=metrics, algorithm=algorithm)
        # Evaluation and saving are not the training's speed.
        since += clock() - now
        cpu = time.process_time()
    callbacks.on_training_end(algorithm=algorithm)
    return metrics


def offline(algorithm) -> dict[str, float]:
    """Update from samples of a dataset until the horizon is reached or a callback says stop.

    The horizon, schedules and callbacks count updates. Metrics are told as in `off_policy`: means over the updates
    since they were last told, a hundred times in a training and every 1,000 updates in a long one. ``time/collect_s``
    is what drawing the samples took.

    Raises
    ------
    FloatingPointError
        As soon as metrics are told that are not finite.
    """
    c, callbacks, clock = algorithm.counters, algorithm.callbacks, time.perf_counter
    update = algorithm.update_native if algorithm.backend == "native" else algorithm.update
    tell_every = min(1000, max(1, c.horizon_steps // 100))
    metrics: dict[str, float] = {}
    go_on = callbacks.on_training_start(algorithm=algorithm)
    since, since_updates, cpu = clock(), c.updates, time.process_time()
    while go_on and c.updates < c.end:
        history: list[dict[str, Any]] = []
        started, drawing_s = clock(), 0.0
        n = min(tell_every - (c.updates - c.horizon_start) % tell_every, c.end - c.updates)
        for _ in range(n):
            drawing = clock()
            batch = algorithm.sample()
            drawing_s += clock() - drawing
            history.append(update(batch))
            c.updates += 1
        losses = _means(history)
        update_s = clock() - started - drawing_s
        _require_finite(losses, algorithm)
        metrics = {
            **losses,
            **to_floats(algorithm.compare_with_data()),
            "time/updates_per_second": (c.updates - since_updates) / (clock() - since),
            "time/collect_s": drawing_s,
            "time/update_s": update_s,
            "time/cpu_s": time.process_time() - cpu,
        }
        now = clock()
        go_on = callbacks.on_step(step=c.updates, reward=c.mean_reward, metrics=metrics, algorithm=algorithm)
        # Evaluation and saving are not the training's speed.
        since += clock() - now
        cpu = time.process_time()
    callbacks.on_training_end(algorithm=algorithm)
    return metrics
