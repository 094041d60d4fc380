"""Estimate what a run will cost: a short training is timed, and the rest is multiplication.

Costs are pairs of seconds, (2,): CPU time, and wall time.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from rlox.callbacks import AdviceCallback, Callback, EvalCallback, TimingCallback
from rlox.callbacks.loggers import RecordLogger
from rlox.config import LARGEST_COUNT, Config, RunConfig
from rlox.config.sqlite import is_sqlite
from rlox.envs import is_native
from rlox.nn.modes import torch_threads
from rlox.tracking.record import Record
from rlox_cli.families import limits
from rlox_cli.families.family import Estimate, Start
from rlox_cli.families.probe import Seen
from rlox_cli.terminal.console import TextConsole
from rlox_cli.terminal.progress import ProgressCallback

# About how many CPU seconds the parts of a probe may take. A single update or episode is always completed.
_SHORT_S, _UPDATES_S, _EVALUATION_S = 0.2, 1.0, 0.2
# A mirror runs in its own process during the training, and is not timed here. These are its CPU seconds, once and for
# each row of the record, in units of the CPU seconds that rlox takes to start, which account for the machine's speed.
_MIRRORS = {"mlflow": (0.3, 0.0005), "wandb": (2.0, 0.003), "tensorboard": (0.6, 0.0), "csv": (0.25, 0.0)}
_MLFLOW_SERVER = (7.0, 0.004)  # MLflow is imported, which is not necessary for an SQLite store


def estimate(family: Any, algorithm: Any, config: RunConfig, seen: Seen, start: Start, scratch: Path) -> Estimate:
    """Train `algorithm` for a short time, and multiply.

    Parameters
    ----------
    seen : Seen
        What its environment did.
    scratch : path
        A folder for the files of the probe.

    Raises
    ------
    Exception
        If the environment or the learner raises; this would end the run as well.
    """
    rollout = family.round_steps(config)
    total = -(-config.total_timesteps // rollout) * rollout
    with Record(scratch / "run") as record, torch_threads(config.threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an environment's warnings have been printed
        quiet = ProgressCallback(TextConsole(file=StringIO()), "", config.total_timesteps, algorithm.counters.unit)
        algorithm.callbacks.extend([TimingCallback(), RecordLogger(record), AdviceCallback(lambda line: None), quiet])
        once, each, each_random = family.training_costs(algorithm, config)
        making, each_played, side_by_side = family.evaluation_costs(algorithm, config)
        plan = config.eval
        evaluations_of = EvalCallback(
            plan.n_points, plan.n_episodes, config.eval_seed, plan.stop_at, plan.patience, workers=plan.workers
        )
        checkpoint = scratch / "checkpoint.safetensors"
        saving = measure_call(lambda: algorithm.save(checkpoint))[0]
        record.end(0, "finished")
    n_random = min(getattr(config.algo, "learning_starts", 0), total)
    training = once + each_random * n_random + each * (total - n_random)
    update = family.update_cost(config, each, each_random)
    if update is not None and config.dataset is not None:
        training = training + update * getattr(config.algo, "pretrain_updates", 0)

    n_evaluations = family.evaluations(config)
    # If episodes run together, all of them take as long as the longest.
    per_step = n_evaluations * each_played * (1 if side_by_side else config.eval.n_episodes)
    length, limit = _estimate_length(seen, config), seen.limit or seen.length
    evaluating = n_evaluations * making + per_step * (min(1.5 * length, limit) if side_by_side else length)
    longest = n_evaluations * making + per_step * limit
    workers = evaluations_of.planned_workers(algorithm, evaluating[1])
    # About every second evaluation is the best so far and is saved, and the last one is saved too.
    saving = saving * (n_evaluations / 2 + 1 + (training + evaluating)[1] / config.checkpoint.every_s)

    evaluating[0] += workers * start.python  # their interpreters
    cpu = {"start": start.total, "training": training[0], "evaluation": evaluating[0], "saving": saving[0]}
    rows = family.callback_calls(config) + n_evaluations
    mlflow, costs = config.logger.mlflow, dict(_MIRRORS)
    if mlflow is not None and not is_sqlite(mlflow.in_effect):
        costs["mlflow"] = _MLFLOW_SERVER
    mirrors = {
        name: start.python * (once + each * rows) for name, (once, each) in costs.items() if name in loggers(config)
    }
    own, saved = limits.disk_bytes(config, replay := family.replay_footprint(algorithm, config, total), total)
    on_host = algorithm.config != config.algo and algorithm.env_options.device != "cuda"
    memory = _peak() + (family.rollout_bytes(config, algorithm.spec) if on_host else 0)
    if replay is not None:
        memory += replay.resident
        if saved:
            # A save holds a copy of the new transitions, and their serialised bytes.
            between = min(total, config.checkpoint.every_s / each[1], config.checkpoint.every_steps or total)
            # For sequences this may be all of them, since their states change.
            memory += 2 * (replay.resident if update is not None else int(between) * replay.row)
    return Estimate(
        cpu=cpu | mirrors,
        # The command ends when the mirrors, which run in parallel with the training, are complete.
        wall=max(
            start.total + saving[1] + _by_the_clock(training[1], evaluating[1], n_evaluations, workers),
            *mirrors.values(),
            0.0,
        ),
        longest_evaluation=float(longest[1]),
        memory=memory,
        disk=2 * checkpoint.stat().st_size + own + saved,
        workers=workers,
        step=float(each[0]) if config.algo.replays == "transitions" else None,
        update=None if update is None else float(update[0]),
    )


def _by_the_clock(training: float, evaluating: float, n: int, workers: int) -> float:
    """Return the wall seconds of a training with `n` evenly spread evaluations.

    With `workers`, these processes run all evaluations but the last.

    >>> _by_the_clock(10.0, 20.0, 10, 0), _by_the_clock(10.0, 20.0, 10, 1), _by_the_clock(10.0, 20.0, 10, 2)
    (30.0, 20.0, 12.0)
    """
    if not workers:
        return float(training + evaluating)
    now, free = 0.0, [0.0] * workers
    for i in range(n):
        now += training / n
        if i < n - 1:
            free.sort()
            now = max(now, free[0])
            free[0] = now + evaluating / n
    return float(max(now + evaluating / n, *free))


def loggers(config: RunConfig) -> list[str]:
    """Return the names of the chosen loggers."""
    return [item.name for item in fields(config.logger) if getattr(config.logger, item.name) is not None]


class _Watch(Callback):
    """Reads the clocks after each update, and stops after `seconds` of CPU time and at least two updates."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.rows: list[tuple[float, float, int]] = []

    def on_training_start(self, *, algorithm: Any, **info: Any) -> None:
        self.rows = [(*_clocks(), algorithm.counters.steps)]

    def on_step(self, *, step: int, **info: Any) -> bool:
        self.rows.append((*_clocks(), step))
        return len(self.rows) < 3 or self.rows[-1][0] - self.rows[0][0] < self.seconds

    def costs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the cost that came once, and the cost of each environment step (offline: each update)."""
        rows = np.array(self.rows)
        # The first update is slower, since it loads and creates what it needs.
        settled = rows[1:] if len(rows) > 2 else rows
        each = (settled[-1, :2] - settled[0, :2]) / (settled[-1, 2] - settled[0, 2])
        first = rows[1] - rows[0]
        return np.maximum(0.0, first[:2] - each * first[2]), each


def _clocks() -> tuple[float, float]:
    return limits.cpu_seconds(), time.perf_counter()


def measure_call(call: Callable[[], Any]) -> tuple[np.ndarray, Any]:
    before = np.array(_clocks())
    result = call()
    return np.array(_clocks()) - before, result


def time_rollouts(family: Any, algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the cost that comes once, and twice the cost of a step.

    Whole rollouts are measured if they are short enough, else shorter ones.
    """
    c, n = config.algo, config.env.n_envs
    short = min(c.n_steps, -(-max(getattr(c, "batch_size", 0), 64) // n))
    once, each = _train_briefly(family, algorithm, config, replace(c, n_steps=short), _SHORT_S)
    if each[0] * c.n_steps * n < _UPDATES_S:
        more, each = _train_briefly(family, algorithm, config, c, _UPDATES_S)
        once = once + more
    return once, each, each


def time_replay(
    family: Any, algorithm: Any, config: RunConfig, every: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the costs that come once, of a step with its share of the updates, and of one before the first update."""
    c, each_random = config.algo, np.zeros(2)
    if getattr(c, "pretrain_updates", 0):
        c = replace(c, pretrain_updates=0)
    if c.learning_starts:
        _, each_random = _train_briefly(family, algorithm, config, replace(c, learning_starts=LARGEST_COUNT), _SHORT_S)
    once, each = _train_briefly(family, algorithm, config, replace(c, learning_starts=0), _UPDATES_S, every)
    return once, each, each_random


def time_updates(family: Any, algorithm: Any, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the cost that comes once, and twice the cost of an update.

    The cost of metrics is included realistically: they are reported as rarely as in the run, or so rarely that it makes
    no difference.
    """
    as_seldom = min(1000, max(1, config.total_timesteps // 100))
    once, each = _train_briefly(family, algorithm, config, config.algo, _SHORT_S, min(8, as_seldom))
    enough = max(8, int(_UPDATES_S / 5 / max(each[0], 1e-6)))
    more, each = _train_briefly(family, algorithm, config, config.algo, _UPDATES_S, min(as_seldom, enough))
    return once + more, each, each


def _train_briefly(
    family: Any, algorithm: Any, config: RunConfig, changed: Config, seconds: float, every: int = 32
) -> tuple[np.ndarray, np.ndarray]:
    """Train with `changed` hyper-parameters for some `seconds`; return the cost that came once, and that of a step."""
    watch = _Watch(seconds)
    algorithm.config = changed
    algorithm.callbacks.extend([watch])
    # With many updates, callbacks are called a hundred times in a training: with this horizon, every `every` steps.
    horizon = 100 * max(every, family.round_steps(replace(config, algo=changed)))
    algorithm.train(horizon, schedule_timesteps=config.schedule_timesteps or config.total_timesteps)
    algorithm.callbacks.callbacks.remove(watch)
    return watch.costs()


def time_evaluation(
    algorithm: Any, config: RunConfig, kwargs: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return the costs of creating the environment and of a step, and whether all episodes are stepped together."""
    from rlox.envs.gym_make import ATARI_WRAPPERS, whole_games

    c = config.env
    if is_native(c.id) and not (kwargs or c.wrappers):
        took, played = measure_call(lambda: algorithm.evaluate(config.eval.n_episodes, config.eval_seed))
        return np.zeros(2), took / played.lengths.max(), True
    wrappers = whole_games(c.wrappers) or (ATARI_WRAPPERS if c.id.startswith("ALE/") else ())

    def play(limit: int, n_episodes: int) -> tuple[np.ndarray, Any]:
        """Run episodes that are cut short."""
        before, algorithm.env_options.wrappers = (
            algorithm.env_options.wrappers,
            [*wrappers, {"TimeLimit": {"max_episode_steps": limit}}],
        )
        try:
            return measure_call(lambda: algorithm.evaluate(n_episodes, config.eval_seed))
        finally:
            algorithm.env_options.wrappers = before

    making, _ = play(1, 1)
    limit, n_steps, spent = 50, 0, np.zeros(2)
    while not n_steps or (spent[0] < _EVALUATION_S and limit < 2000):
        took, played = play(limit, 2)
        spent, n_steps = spent + np.maximum(took - making, 0.0), n_steps + int(played.lengths.sum())
        limit *= 2
    return making, spent / n_steps, False


def _estimate_length(seen: Seen, config: RunConfig) -> float:
    """Guess the length of an evaluation's episodes, averaged over the training.

    If every step has the same reward, the final length follows from the score that the tuned settings must reach.
    Without such a score it is the time limit, or the length with random actions if a step costs. For other rewards it
    is halfway between the length with random actions and the time limit, and at most five times the former. Episodes
    reach their final length in the first half of the training.
    """
    first, limit = seen.length, float(seen.limit or seen.length)
    reference = (config.reference or {}).get("mean_return")
    if not seen.constant or not seen.reward:
        last = min((first + limit) / 2, 5 * first)
    elif reference is not None:
        last = reference / seen.reward
    else:
        last = limit if seen.reward > 0 else first
    return (first + 3 * min(max(last, 1.0), limit)) / 4


def _peak() -> int:
    """Return the peak of this process's resident memory in bytes."""
    try:
        # getrusage may return the peak of the process that started this one.
        with open("/proc/self/status", "rb") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith(b"VmHWM"))
    except OSError:
        try:
            import resource
        except ImportError:  # Windows
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
