"""One training loop per family. A loop knows no algorithm by name; the step counters exist here, once."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.config import integer
from rlox.failures import Diverged

if TYPE_CHECKING:
    import torch

    from rlox.config import Config


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


def plan(algorithm: Any, name: str, length: int | None, until: int | None, schedule_timesteps: int | None) -> None:
    """Set the end of a training and of its schedules, as ``train`` is asked to; `name` is its word for `length`.

    Warns
    -----
    RuntimeWarning
        Where the schedules of a training that is gone on with get another end, with their values before and after; and
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
    c.plan(where, name, length, until, schedule_timesteps)
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
    """A RuntimeWarning where a training that is gone on with has nothing left to do."""
    c = counters
    if c.steps >= c.end:
        warnings.warn(
            f"train: nothing is left to train, all {c.horizon_steps:,} {c.unit} are done; train(until=...) with more "
            f"than {c.end} goes on, train(number) begins a new training",
            RuntimeWarning,
            stacklevel=3,
        )


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
    algorithm.collector.env_steps = c.env_steps
    go_on = callbacks.on_training_start(algorithm=algorithm)
    algorithm.check_kernel("train", functions=True)
    since, since_steps = time.perf_counter(), c.env_steps
    while go_on and c.env_steps < c.end:
        started, cpu, c.in_round = time.perf_counter(), time.process_time(), 0
        algorithm.check_kernel("train")
        try:
            batch = algorithm.collector.collect(algorithm.actor, algorithm.config.n_steps)
        except Diverged:
            raise
        except Exception as e:
            # An environment failed, not the learner: the weights are those of the last update, and worth keeping.
            callbacks.on_collection_error(algorithm=algorithm, error=e)
            raise
        collected = time.perf_counter()
        c.env_steps += len(batch)
        c.in_round = len(batch)
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
            **algorithm.schedule_values(c.progress),
            "time/steps_per_second": (c.env_steps - since_steps) / (now - since),
            "time/collect_s": collected - started,
            "time/update_s": now - updating,
            "time/cpu_s": time.process_time() - cpu,
        }
        go_on = callbacks.on_step(step=c.env_steps, reward=metrics["mean_reward"], metrics=metrics, algorithm=algorithm)
        # Evaluation and saving are not the training's speed.
        since += time.perf_counter() - now
    algorithm.check_kernel("train", functions=True)
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
    collector.env_steps = c.env_steps
    go_on = callbacks.on_training_start(algorithm=algorithm)
    algorithm.check_kernel("train", functions=True)
    fused = algorithm.fused()
    since, since_steps, cpu = clock(), c.env_steps, time.process_time()
    while go_on and c.env_steps < end:
        started, round_start, c.in_round = clock(), c.env_steps, 0
        algorithm.check_kernel("train")
        if fused:
            done = algorithm.rounds(min(tell_every - (c.env_steps - c.horizon_start) % tell_every, end - c.env_steps))
            collector.env_steps = c.env_steps
            algorithm.require_finite_memory(len(done))
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
            except Diverged:
                _require_finite(_means(history), algorithm)
                raise
            except Exception as e:
                # A policy that is not finite any more acts so, and its weights are not worth keeping.
                _require_finite(_means(history), algorithm)
                # An environment failed, not the learner: the weights are those of the last update, and worth keeping.
                callbacks.on_collection_error(algorithm=algorithm, error=e)
                raise
            done = Episodes(c.env_steps - round_start, np.asarray(returns), np.asarray(lengths, np.int64))
            c.in_round = len(done)
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
            **algorithm.schedule_values(c.progress),
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
    algorithm.check_kernel("train", functions=True)
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
    algorithm.check_kernel("train", functions=True)
    since, since_updates, cpu = clock(), c.updates, time.process_time()
    while go_on and c.updates < c.end:
        history: list[dict[str, Any]] = []
        started, drawing_s, c.in_round = clock(), 0.0, 0
        algorithm.check_kernel("train")
        n = min(tell_every - (c.updates - c.horizon_start) % tell_every, c.end - c.updates)
        for _ in range(n):
            drawing = clock()
            batch = algorithm.sample()
            drawing_s += clock() - drawing
            history.append(update(batch))
            c.updates += 1
        c.in_round = 1  # the last update
        losses = _means(history)
        update_s = clock() - started - drawing_s
        _require_finite(losses, algorithm)
        metrics = {
            **losses,
            **algorithm.schedule_values(c.progress),
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
    algorithm.check_kernel("train", functions=True)
    callbacks.on_training_end(algorithm=algorithm)
    return metrics
