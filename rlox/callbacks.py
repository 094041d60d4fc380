"""What happens around training: hooks that the loops call, and the callbacks that ship."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlox.evaluation import Evaluation


class Callback:
    """Base of all callbacks: override the hooks you need.

    Hooks are called with keyword arguments; take those you use by name and the rest as ``**info``. An exception in a
    hook ends the training.
    """

    def on_training_start(self, **info: Any) -> None:
        """Before the first rollout. info: algorithm."""

    def on_rollout_end(self, **info: Any) -> None:
        """After each rollout, before the update. info: algorithm, batch."""

    def on_step(self, **info: Any) -> bool:
        """After each update. info: step (environment steps so far), reward (mean return of the last 100 episodes, NaN
        before the first), metrics (dict of float), algorithm. Return False to stop training."""
        return True

    def on_evaluation(self, **info: Any) -> None:
        """After each evaluation. info: step, evaluation (`rlox.evaluation.Evaluation`), algorithm."""

    def on_checkpoint(self, **info: Any) -> None:
        """After a checkpoint is safely on disk. info: step, kind ("last" or "best"), path, algorithm."""

    def on_training_end(self, **info: Any) -> None:
        """After the last update, also when a callback stopped training; not after an exception. info: algorithm."""


class CallbackList(Callback):
    """Several callbacks as one; every hook reaches every callback, in order."""

    def __init__(self, callbacks: Iterable[Callback] | None = None):
        self.callbacks: list[Callback] = []
        self.extend(callbacks or ())

    def extend(self, callbacks: Iterable[Callback]) -> None:
        """Add `callbacks` behind those that are there; a TypeError for anything else."""
        callbacks = list(callbacks)
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"CallbackList: callbacks must be rlox.callbacks.Callback, got {type(callback).__name__}"
                )
        self.callbacks += callbacks

    def on_training_start(self, **info: Any) -> None:
        for callback in self.callbacks:
            callback.on_training_start(**info)

    def on_rollout_end(self, **info: Any) -> None:
        for callback in self.callbacks:
            callback.on_rollout_end(**info)

    def on_step(self, **info: Any) -> bool:
        """False if any callback says stop; the others are still called."""
        return all([callback.on_step(**info) is not False for callback in self.callbacks])

    def on_evaluation(self, **info: Any) -> None:
        for callback in self.callbacks:
            callback.on_evaluation(**info)

    def on_checkpoint(self, **info: Any) -> None:
        for callback in self.callbacks:
            callback.on_checkpoint(**info)

    def on_training_end(self, **info: Any) -> None:
        for callback in self.callbacks:
            callback.on_training_end(**info)


class EarlyStoppingCallback(Callback):
    """Stop once the reward has not risen by `min_delta` for `patience` calls of `on_step`.

    Parameters
    ----------
    patience : int
        Calls without improvement that are borne. A NaN reward (no episode has ended yet) does not count.
    min_delta : float
        What counts as an improvement, in units of reward.
    """

    def __init__(self, patience: int = 10, min_delta: float = 0.0):
        if patience < 1:
            raise ValueError(f"EarlyStoppingCallback: patience must be >= 1, got {patience}")
        self.patience = patience
        self.min_delta = min_delta
        self.best = -math.inf
        self.waited = 0

    def on_step(self, *, reward: float, **info: Any) -> bool:
        if math.isnan(reward):
            return True
        if reward > self.best + self.min_delta:
            self.best = reward
            self.waited = 0
        else:
            self.waited += 1
        return self.waited < self.patience


class EvalCallback(Callback):
    """Evaluate the policy on an environment of its own; training goes on exactly as it would without.

    Parameters
    ----------
    n_points : int
        Evaluations evenly spread over training, at the first update past each point, the last at the end.
    n_episodes : int
        Episodes of one evaluation.
    seed : int, optional
        Seed of the evaluation environment; None: 10_000 + the algorithm's seed.
    """

    def __init__(self, n_points: int = 10, n_episodes: int = 20, seed: int | None = None):
        if n_points < 0:
            raise ValueError(f"EvalCallback: n_points must be >= 0, got {n_points}")
        self.n_points = n_points
        self.n_episodes = n_episodes
        self.seed = seed
        self.evaluations: list[tuple[int, Evaluation]] = []
        self._due: list[int] = []

    def on_training_start(self, *, algorithm, **info: Any) -> None:
        c = algorithm.counters
        points = [c.horizon_start + round(c.horizon_steps * (i + 1) / self.n_points) for i in range(self.n_points)]
        self._due = [point for point in points if point > c.env_steps]

    def on_step(self, *, step: int, algorithm, **info: Any) -> bool:
        if self._due and step >= self._due[0]:
            self._due = [point for point in self._due if point > step]
            self._evaluate(algorithm)
        return True

    def on_training_end(self, *, algorithm, **info: Any) -> None:
        c = algorithm.counters
        evaluated = self.evaluations[-1][0] if self.evaluations else None
        if c.env_steps >= c.horizon_start + c.horizon_steps and evaluated != c.env_steps:
            self._evaluate(algorithm)

    def _evaluate(self, algorithm) -> None:
        evaluation = algorithm.evaluate(self.n_episodes, self.seed)
        step = algorithm.counters.env_steps
        self.evaluations.append((step, evaluation))
        algorithm.callbacks.on_evaluation(step=step, evaluation=evaluation, algorithm=algorithm)


class CheckpointCallback(Callback):
    """Keep ``last.safetensors`` (every `every_s` seconds and at the end) and ``best.safetensors`` (by evaluation).

    Parameters
    ----------
    folder : path
        Where the two files go.
    every_s : float
        Seconds between two saves of ``last``.
    run : dict, optional
        The resolved configuration of the run, kept in the header.
    """

    def __init__(self, folder: str | Path, every_s: float = 60.0, run: dict[str, Any] | None = None):
        self.folder = Path(folder)
        self.every_s = every_s
        self.run = run
        self.best = -math.inf
        self._saved_at = 0.0
        self._saved_step: int | None = None

    def on_training_start(self, **info: Any) -> None:
        self._saved_at = time.monotonic()

    def on_step(self, *, algorithm, **info: Any) -> bool:
        if time.monotonic() - self._saved_at >= self.every_s:
            self.save_last(algorithm)
        return True

    def on_evaluation(self, *, evaluation, algorithm, **info: Any) -> None:
        summary = evaluation.summary()
        if self.best < summary["mean_return"] < math.inf:
            self.best = summary["mean_return"]
            kept = {**summary, "seed": evaluation.seed, "deterministic": evaluation.deterministic}
            self._save(algorithm, "best", evaluation=kept)

    def on_training_end(self, *, algorithm, **info: Any) -> None:
        self.save_last(algorithm)

    def save_last(self, algorithm) -> None:
        """Write ``last.safetensors`` now, unless it already holds this step."""
        if self._saved_step != algorithm.counters.env_steps:
            self._save(algorithm, "last")
            self._saved_step = algorithm.counters.env_steps
        self._saved_at = time.monotonic()

    def _save(self, algorithm, kind: str, **header: Any) -> None:
        path = self.folder / f"{kind}.safetensors"
        algorithm.save(path, run=self.run, **header)
        algorithm.callbacks.on_checkpoint(step=algorithm.counters.env_steps, kind=kind, path=path, algorithm=algorithm)
