"""Callbacks that end a training early."""

from __future__ import annotations

import math
import time
from typing import Any

from rlox.callbacks.base import Callback, _algorithm, _count, _finite, _score
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

    Attributes
    ----------
    stopped : str or None
        Why this callback stopped the training, if it did.
    """

    def __init__(self, patience: int = 10, min_delta: float = 0.0, threshold: float | None = None):
        if patience < 1:
            raise ValueError(f"EarlyStoppingCallback: patience must be >= 1, got {patience}")
        if not math.isfinite(min_delta):
            raise ValueError(f"EarlyStoppingCallback: min_delta must be finite, got {min_delta}")
        if threshold is not None and math.isnan(threshold):
            raise ValueError(f"EarlyStoppingCallback: threshold must be a number, or None, got {threshold}")
        self.patience = patience
        self.min_delta = min_delta
        self.threshold = threshold
        self.best = -math.inf
        self.waited = 0
        self.stopped: str | None = None

    def state(self) -> dict[str, Any]:
        return {"best": _finite(self.best), "waited": self.waited}

    def set_state(self, state: dict[str, Any]) -> None:
        self.best, self.waited = _score(state["best"]), _count(state["waited"])

    def on_training_start(self, *, algorithm=None, **info: Any) -> None:
        self.stopped = None
        counters = getattr(algorithm, "counters", None)
        is_new = counters is not None and counters.steps == counters.horizon_start
        # A training that goes on although this callback has stopped it gets its patience, too.
        if is_new or self.waited >= self.patience:
            self.waited = 0

    def on_step(self, *, reward: float | None = None, **info: Any) -> bool:
        if reward is None:
            raise TypeError("EarlyStoppingCallback needs reward=…; pass reward=mean_return to on_step")
        self.stopped = None
        if math.isnan(reward):
            return True
        if reward > self.best + self.min_delta:
            self.best = reward
            self.waited = 0
        else:
            self.waited += 1
        if self.waited >= self.patience:
            self.stopped = f"the return was not above {self.best:.1f} in {self.waited} calls of on_step"
        if self.threshold is not None and reward >= self.threshold:
            self.stopped = f"the return {reward:.1f} reached {self.threshold:g}"
        return self.stopped is None


class TimeLimitCallback(Callback):
    """Stop at the first update past `seconds` of wall time.

    Parameters
    ----------
    seconds : float
        Wall time from the start of training, including evaluations and checkpoints.
    evaluation : EvalCallback, optional
        Runs one more evaluation when time is up, so that the final policy has a score.

    Attributes
    ----------
    stopped : str or None
        Why this callback stopped the training, if it did.
    """

    def __init__(self, seconds: float, evaluation: EvalCallback | None = None):
        if not seconds > 0:
            raise ValueError(f"TimeLimitCallback: seconds must be > 0, got {seconds}")
        self.seconds = seconds
        self.evaluation = evaluation
        self.reached = False
        self.stopped: str | None = None
        self._end = math.inf

    def on_training_start(self, **info: Any) -> None:
        self._end, self.reached, self.stopped = time.monotonic() + self.seconds, False, None

    def on_step(self, *, algorithm=None, step: int | None = None, **info: Any) -> bool:
        if self._end == math.inf:  # a loop of one's own may call `on_step` alone
            self.on_training_start()
        if time.monotonic() < self._end:
            return True
        self.reached, self.stopped = True, f"the time limit of {self.seconds:g} s was reached"
        if self.evaluation is not None:
            self.evaluation.evaluate(_algorithm(self.evaluation, algorithm, step, **info))
        return False
