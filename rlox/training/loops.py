"""What all training loops share, and the loop over a dataset.

There is one loop per family; the others are `rlox.training.on_policy.on_policy` and `rlox.training.replay.off_policy`.
They know no algorithm by name, and only they advance the step counters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.config import shown
from rlox.processes.failures import Diverged

if TYPE_CHECKING:
    import torch

_NUMBERS = (float, int, np.number)


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


def average_metrics(history: list[dict[str, Any]], rounds: bool = False) -> dict[str, float]:
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


def choose_update(algorithm) -> Callable[[Any], dict[str, Any]]:
    """Return the function that updates from a batch; PyTorch's records gradients, also for a caller without them."""
    if algorithm.backend == "native":
        return algorithm.update_native
    import torch

    return torch.enable_grad()(algorithm.update)


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
    update = choose_update(algorithm)
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
        losses = ranks.metrics(average_metrics(history))
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
