"""One training loop per family. The loops know no algorithm by name, and only they advance the step counters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.config import shown
from rlox.processes.failures import Diverged

if TYPE_CHECKING:
    import torch

_NUMBERS = (float, int, np.number)


@dataclass(frozen=True)
class Episodes:
    """Result of one round of off-policy collection; its length is the number of environment steps taken."""

    n_steps: int  # over all environments together
    episode_returns: np.ndarray  # (E,) f64, undiscounted, of the episodes that ended
    episode_lengths: np.ndarray  # (E,) int64, steps

    def __len__(self) -> int:
        return self.n_steps


@dataclass(frozen=True)
class Rounds(Episodes):
    """Result of whole rounds of collection and updates."""

    metrics: dict[str, np.ndarray]  # (U,) f64 each, one number per update; empty if there was no update
    update_s: float  # seconds spent in updates


def to_floats(metrics: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
    """Convert scalars to floats, with a single transfer from the device.

    Raises
    ------
    TypeError
        If `metrics` is not a mapping, or a metric is neither a number nor a tensor of shape ().
    """
    if type(metrics) is dict and all(isinstance(value, float) for value in metrics.values()):
        return metrics
    _require_metrics(metrics)
    tensors = [_scalar(name, value) for name, value in metrics.items() if not isinstance(value, _NUMBERS)]
    numbers: Iterator[float] = iter(())
    if tensors:
        import torch

        numbers = iter(torch.stack(tensors).tolist())
    return {name: float(value) if isinstance(value, _NUMBERS) else next(numbers) for name, value in metrics.items()}


def _require_metrics(metrics: Any) -> None:
    """Raise TypeError if an algorithm's update did not return metrics by name."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"update must return its metrics as a dict, got {shown(metrics)}")


def _scalar(name: str, value: Any) -> torch.Tensor:
    """Return `value`, a metric that is not a number. Raises TypeError unless it is a tensor of shape ()."""
    import torch

    if not isinstance(value, torch.Tensor) or value.dim():
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
        raise TypeError(f"update must return metrics that are numbers or tensors of shape (), got {name}: {got}")
    return value


def require_finite(losses: dict[str, float], algorithm) -> None:
    """Raise FloatingPointError if a metric of an update is not finite."""
    c = algorithm.counters
    for name, value in losses.items():
        # Explained variance is undefined (NaN) if all returns are equal; every other metric must be finite.
        if not math.isfinite(value) and name.partition("/")[0] != "explained_variance":
            raise FloatingPointError(
                f"{algorithm.name}: {name} became {value} at {c.unit[:-1]} {c.steps}; training cannot continue. "
                "Try a lower learning_rate or max_grad_norm, and look for extreme rewards or observations"
            )


def _means(history: list[dict[str, Any]], rounds: bool = False) -> dict[str, float]:
    """Return the mean of each metric over the updates that report it; a delayed policy does not report in every update.

    A row of `history` contains numbers or tensors; with `rounds`, arrays with one number per update (see `Rounds`).
    """
    numbers = (*_NUMBERS, np.ndarray) if rounds else _NUMBERS
    for row in history:
        _require_metrics(row)
    names = dict.fromkeys(name for row in history for name in row)
    means: dict[str, torch.Tensor | float] = {}
    for name in names:
        values = [row[name] for row in history if name in row]
        tensors = [_scalar(name, value) for value in values if not isinstance(value, numbers)]
        if not tensors:
            means[name] = float(np.hstack(values).mean())
            continue
        import torch

        # One update may report a number, such as 0.0, and another one a tensor.
        device = tensors[0].device
        stacked = torch.stack([torch.as_tensor(value, device=device) for value in values])
        means[name] = (stacked if stacked.is_floating_point() else stacked.double()).mean()
    return to_floats(means)


def _updater(algorithm) -> Callable[[Any], dict[str, Any]]:
    """Return the function that updates from a batch; PyTorch's records gradients, also for a caller without them."""
    if algorithm.backend == "native":
        return algorithm.update_native
    import torch

    return torch.enable_grad()(algorithm.update)


def on_policy(algorithm) -> dict[str, float]:
    """Collect and update until the horizon is reached or a callback stops the training. Returns the last metrics.

    Raises
    ------
    FloatingPointError
        When a metric of an update is not finite: the weights can then no longer be trusted. Saved files are not
        touched.
    """
    c, callbacks, ranks = algorithm.counters, algorithm.callbacks, algorithm.ranks
    metrics: dict[str, float] = {"mean_reward": c.mean_reward}
    update = _updater(algorithm)
    algorithm.collector.env_steps = c.env_steps
    go_on = ranks.call_hook(algorithm, "on_training_start")
    algorithm.backend.require_unchanged("train")
    since, since_steps = time.perf_counter(), c.env_steps
    while go_on and c.env_steps < c.end:
        started, cpu, c.in_round = time.perf_counter(), time.process_time(), 0
        try:
            batch = algorithm.collector.collect(algorithm.actor, algorithm.config.n_steps)
        except Diverged:
            raise
        except Exception as e:
            # An environment failed, not the learner, so the weights of the last update are worth keeping.
            if not ranks.joined:
                callbacks.on_collection_error(algorithm=algorithm, error=e)
            raise
        ranks.merge(algorithm.normalizer)
        collected = time.perf_counter()
        c.in_round = batch.n_taken * ranks.size
        c.env_steps += c.in_round
        c.ended(*ranks.episodes(batch.episode_returns, batch.episode_lengths))
        callbacks.on_rollout_end(algorithm=algorithm, batch=batch)
        updating = time.perf_counter()
        losses = ranks.metrics(to_floats(update(batch)))
        c.updates += 1
        now = time.perf_counter()
        require_finite(losses, algorithm)
        metrics = {
            "mean_reward": c.mean_reward,
            "mean_length": c.mean_length,
            **losses,
            **algorithm.schedule_values(c.progress),
            **algorithm.collector.metrics(),
            "time/steps_per_second": (c.env_steps - since_steps) / (now - since),
            "time/collect_s": collected - started,
            "time/update_s": now - updating,
            "time/cpu_s": time.process_time() - cpu,
        }
        go_on = ranks.call_hook(algorithm, "on_step", step=c.env_steps, reward=metrics["mean_reward"], metrics=metrics)
        # Evaluation and saving do not count towards the training's speed.
        since += time.perf_counter() - now
    algorithm.backend.require_unchanged("train")
    ranks.call_hook(algorithm, "on_training_end")
    return metrics


def off_policy(algorithm) -> dict[str, float]:
    """Collect into the replay memory and update from it until the horizon is reached or a callback stops the training.

    A round is ``round_steps`` environment steps, followed by the due updates (`gradient_steps`, or as many as the
    replay ratio requires), once the memory has received `learning_starts` steps and contains ``min_rows`` rows. Metrics
    are means over the updates since the last report. A training has a hundred reports, a long one a report every 1,000
    steps; callbacks receive metrics, and can stop the training, only at reports. If no Python code needs to see single
    steps, all rounds up to the next report are one call of the algorithm's kernel, with the same results.

    Raises
    ------
    FloatingPointError
        When a metric of a report is not finite.
    """
    c, config, callbacks = algorithm.counters, algorithm.config, algorithm.callbacks
    ranks = algorithm.ranks
    collector, buffer, clock = algorithm.collector, algorithm.buffer, time.perf_counter
    update = _updater(algorithm)
    end = c.end
    report_every = min(1000, max(1, c.horizon_steps // 100))
    metrics: dict[str, float] = {"mean_reward": c.mean_reward}
    history: list[dict[str, Any]] = []
    collect_s = update_s = 0.0
    collector.env_steps = c.env_steps
    go_on = ranks.call_hook(algorithm, "on_training_start")
    algorithm.backend.require_unchanged("train")
    fused = algorithm._can_run_rounds()
    left = algorithm._pretraining_due() if go_on else 0
    while go_on and left:
        begun = clock()
        c.in_round = 0
        for _ in range(min(left, 100)):
            history.append(update(algorithm.sample()))
            c.updates += 1
            left -= 1
        times = {"time/collect_s": 0.0, "time/update_s": clock() - begun}
        metrics = {"mean_reward": c.mean_reward, **ranks.metrics(_means(history)), **times}
        history.clear()
        require_finite({name: value for name, value in metrics.items() if name != "mean_reward"}, algorithm)
        go_on = ranks.call_hook(algorithm, "on_step", step=c.env_steps, reward=c.mean_reward, metrics=metrics)
    since, since_steps, cpu = clock(), c.env_steps, time.process_time()
    while go_on and c.env_steps < end:
        started, round_start, c.in_round = clock(), c.env_steps, 0
        if fused:
            done = algorithm._rounds(
                min(report_every - (c.env_steps - c.horizon_start) % report_every, end - c.env_steps)
            )
            collector.env_steps = c.env_steps
            algorithm._require_finite_memory(len(done))
            c.ended(done.episode_returns, done.episode_lengths)
            if done.metrics:
                history.append(done.metrics)
            update_s += done.update_s
            collect_s += clock() - started - done.update_s
        else:
            returns: list[float] = []
            lengths: list[int] = []
            try:
                while c.env_steps - round_start < algorithm._round_steps():
                    algorithm._explore()
                    random = c.env_steps < config.learning_starts
                    ended_returns, ended_lengths = collector.step(algorithm.actor, buffer, random)
                    c.env_steps += algorithm.n_envs
                    if len(ended_returns):
                        returns += ended_returns.tolist()
                        lengths += ended_lengths.tolist()
            except Diverged:
                require_finite(_means(history), algorithm)
                raise
            except Exception as e:
                # A policy that is no longer finite also causes such errors, and its weights are not worth keeping.
                require_finite(_means(history), algorithm)
                # An environment failed, not the learner, so the weights of the last update are worth keeping.
                if not ranks.joined:
                    callbacks.on_collection_error(algorithm=algorithm, error=e)
                raise
            ranks.merge(algorithm.normalizer)
            ended = ranks.episodes(np.asarray(returns), np.asarray(lengths, np.int64))
            done = Episodes(c.env_steps - round_start, *ended)
            c.in_round = len(done)
            c.ended(done.episode_returns, done.episode_lengths)
            callbacks.on_rollout_end(algorithm=algorithm, batch=done)
            collected = clock()
            begun = c.env_steps - algorithm._memory.start >= config.learning_starts
            if begun and not ranks.any(len(buffer) < algorithm._min_rows):
                for _ in range(algorithm._updates_due(len(done))):
                    history.append(update(algorithm.sample()))
                    c.updates += 1
            now = clock()
            collect_s += collected - started
            update_s += now - collected
        so_far = c.env_steps - c.horizon_start
        if so_far // report_every == (so_far - len(done)) // report_every and c.env_steps < end:
            continue
        losses = ranks.metrics(_means(history, rounds=bool(fused)))
        history.clear()
        require_finite(losses, algorithm)
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
        go_on = ranks.call_hook(algorithm, "on_step", step=c.env_steps, reward=c.mean_reward, metrics=metrics)
        # Evaluation and saving do not count towards the training's speed.
        since += clock() - now
        cpu = time.process_time()
    algorithm.backend.require_unchanged("train")
    ranks.call_hook(algorithm, "on_training_end")
    return metrics


def offline(algorithm) -> dict[str, float]:
    """Update from samples of a dataset until the horizon is reached or a callback stops the training.

    The horizon, schedules and callbacks count updates. Metrics are reported as in `off_policy`: means over the updates
    since the last report, a hundred times in a training and every 1,000 updates in a long one. ``time/collect_s`` is
    the time spent drawing samples.

    Raises
    ------
    FloatingPointError
        When a metric of a report is not finite.
    """
    c, callbacks, ranks, clock = algorithm.counters, algorithm.callbacks, algorithm.ranks, time.perf_counter
    update = _updater(algorithm)
    report_every = min(1000, max(1, c.horizon_steps // 100))
    metrics: dict[str, float] = {}
    go_on = ranks.call_hook(algorithm, "on_training_start")
    algorithm.backend.require_unchanged("train")
    since, since_updates, cpu = clock(), c.updates, time.process_time()
    while go_on and c.updates < c.end:
        history: list[dict[str, Any]] = []
        started, drawing_s, c.in_round = clock(), 0.0, 0
        n = min(report_every - (c.updates - c.horizon_start) % report_every, c.end - c.updates)
        for _ in range(n):
            drawing = clock()
            try:
                batch = algorithm.sample()
            except Diverged:
                raise
            except Exception as e:
                # A file or a reward function failed, not the learner, so the last update's weights are worth keeping.
                if not ranks.joined:
                    callbacks.on_collection_error(algorithm=algorithm, error=e)
                raise
            drawing_s += clock() - drawing
            history.append(update(batch))
            c.updates += 1
        c.in_round = 1  # the last update
        losses = ranks.metrics(_means(history))
        update_s = clock() - started - drawing_s
        require_finite(losses, algorithm)
        metrics = {
            **losses,
            **algorithm.schedule_values(c.progress),
            **to_floats(algorithm._compare_with_data()),
            "time/updates_per_second": (c.updates - since_updates) / (clock() - since),
            "time/collect_s": drawing_s,
            "time/update_s": update_s,
            "time/cpu_s": time.process_time() - cpu,
        }
        now = clock()
        go_on = ranks.call_hook(algorithm, "on_step", step=c.updates, reward=c.mean_reward, metrics=metrics)
        # Evaluation and saving do not count towards the training's speed.
        since += clock() - now
        cpu = time.process_time()
    algorithm.backend.require_unchanged("train")
    ranks.call_hook(algorithm, "on_training_end")
    return metrics
