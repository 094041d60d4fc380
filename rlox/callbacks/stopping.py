"""Callbacks that end a training early."""

from __future__ import annotations

import math
import time
from typing import Any

from rlox.callbacks.base import Callback, _algorithm, _finite, _number
from rlox.callbacks.evaluation import EvalCallback


class EarlyStoppingCallback(Callback):
    """Stop once the reward has not risen by `min_delta` for `patience` calls of `on_step`, or has reached `threshold`.

    Parameters
    ----------
    patience : int
        Number of calls without improvement after which training stops. A NaN reward (no episode has ended yet) does not
        count.
    min_delta : float
        Smallest improvement that counts, in units of reward.
    threshold : float, optional
        Reward at which training stops.
    """

    def __init__(self, patience: int = 10, min_delta: float = 0.0, threshold: float | None = None):
        if patience < 1:
            raise ValueError(f"EarlyStoppingCallback: patience must be >= 1, got {patience}")
        self.patience = patience
        self.min_delta = min_delta
        self.threshold = threshold
        self.best = -math.inf
        self.waited = 0

    def state(self) -> dict[str, Any]:
        return {"best": _finite(self.best), "waited": self.waited}

    def set_state(self, state: dict[str, Any]) -> None:
        self.best, self.waited = _number(state["best"]), state["waited"]

    def on_training_start(self, *, algorithm=None, **info: Any) -> None:
        counters = getattr(algorithm, "counters", None)
        is_new = counters is not None and counters.steps == counters.horizon_start
        # A training that goes on although this callback has stopped it gets its patience, too.
        if is_new or self.waited >= self.patience:
            self.waited = 0

    def on_step(self, *, reward: float | None = None, **info: Any) -> bool:
        if reward is None:
            raise TypeError("EarlyStoppingCallback needs reward=…; pass reward=mean_return to on_step")
        if math.isnan(reward):
            return True
        if reward > self.best + self.min_delta:
            self.best = reward
            self.waited = 0
        else:
            self.waited += 1
        return self.waited < self.patience and (self.threshold is None or reward < self.threshold)


class TimeLimitCallback(Callback):
    """Stop at the first update past `seconds` of wall time.

    Parameters
    ----------
    seconds : float
        Wall time from the start of training, including evaluations and checkpoints.
    evaluation : EvalCallback, optional
        Runs one more evaluation when time is up, so that the final policy has a score.
    """

    def __init__(self, seconds: float, evaluation: EvalCallback | None = None):
        if not seconds > 0:
            raise ValueError(f"TimeLimitCallback: seconds must be > 0, got {seconds}")
        self.seconds = seconds
        self.evaluation = evaluation
        self.reached = False
        self._end = math.inf

    def on_training_start(self, **info: Any) -> None:
        self._end, self.reached = time.monotonic() + self.seconds, False

    def on_step(self, *, algorithm=None, step: int | None = None, **info: Any) -> bool:
        if self._end == math.inf:  # a loop of one's own may call `on_step` alone
            self.on_training_start()
        if time.monotonic() < self._end:
            return True
        self.reached = True
        if self.evaluation is not None:
            self.evaluation.evaluate(_algorithm(self.evaluation, algorithm, step, **info))
        return False
