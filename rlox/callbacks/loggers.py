"""Loggers: callbacks that receive named metrics. One writes the run's record, of which trackers are mirrors."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rlox.callbacks.base import Callback
from rlox.config import shown
from rlox.tracking.record import Record

# The library's metrics have flat names; trackers group metrics by a prefix.
_TRACKER_NAMES = {
    "mean_reward": "episode/return",
    "mean_length": "episode/length",
    "policy_loss": "loss/policy",
    "value_loss": "loss/value",
    "q_loss": "loss/q",
    "loss": "loss/total",
    **{name: f"reward/{name}" for name in ("accuracy", "margin", "equal_groups")},
    "chosen_reward": "reward/chosen",
    "rejected_reward": "reward/rejected",
    "reward_std": "reward/std",
    "completion_length": "completion/length",
    "truncated": "completion/truncated",
    **{name: f"schedule/{name}" for name in ("learning_rate", "policy_learning_rate", "clip_eps", "beta")},
}


def tracker_name(metric: str) -> str:
    """``policy_loss`` -> ``loss/policy``, ``mean_reward`` -> ``episode/return``; a name with a slash stays."""
    return metric if "/" in metric else _TRACKER_NAMES.get(metric, f"loss/{metric}")


class LoggerCallback(Callback):
    """Base class of loggers: override `log`, and pass the logger to an algorithm as ``logger=``.

    Steps are logged in order: while an evaluation is pending (see `rlox.callbacks.EvalCallback`), later metrics are
    held back.

    Attributes
    ----------
    logged_at : float or None
        In `log`, the time (as `time.time`) of metrics that were held back; None for current metrics.
    """

    section = "log"
    acts_on_evaluation = False
    logged_at: float | None = None
    # Pending evaluations and the metrics that follow them: step, time, metrics (None for the evaluation itself).
    _waiting: deque[tuple[int, float, dict[str, float] | None]] | None = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log `metrics` (tracker names; values are finite or NaN) of environment step `step`."""
        raise NotImplementedError

    def on_step(
        self, *, step: int, metrics: dict[str, float] | None = None, reward: float | None = None, **info: Any
    ) -> bool:
        if metrics is None:  # a hand-written loop
            if reward is None:
                raise TypeError(f"{type(self).__name__} needs metrics=…; pass metrics={{name: number}} to on_step")
            metrics = {"mean_reward": reward}
        named = {tracker_name(name): value for name, value in metrics.items()}
        if self._waiting:
            self._waiting.append((step, time.time(), named))
        else:
            self.log(step, named)
        return True

    def on_training_start(self, **info: Any) -> None:
        self._waiting = None

    def on_evaluation_start(self, *, step: int, **info: Any) -> None:
        self._waiting = deque() if self._waiting is None else self._waiting
        self._waiting.append((step, time.time(), None))

    def on_evaluation(self, *, step: int, evaluation, **info: Any) -> None:
        metrics = {f"eval/{name}": float(value) for name, value in evaluation.summary().items()}
        if not self._waiting:
            self.log(step, metrics)
            return
        _, began, _ = self._waiting.popleft()
        self._log_late(step, metrics, began)
        while self._waiting and (later := self._waiting[0][2]) is not None:
            then, at, _ = self._waiting.popleft()
            self._log_late(then, later, at)

    def _log_late(self, step: int, metrics: dict[str, float], at: float) -> None:
        self.logged_at = at
        try:
            self.log(step, metrics)
        finally:
            self.logged_at = None


class RecordLogger(LoggerCallback):
    """Writes metrics and checkpoint events to a run's `rlox.tracking.record.Record`, which the caller opens and closes.

    An algorithm does all of this itself if its ``logger`` is a folder.

    Raises
    ------
    TypeError
        If `record` is not a `Record`.
    """

    def __init__(self, record: Record):
        if not isinstance(record, Record):
            raise TypeError(
                f"RecordLogger: record must be a rlox.tracking.Record, got {shown(record)}; write logger='FOLDER' to "
                "let an algorithm write a run folder, or RecordLogger(Record('FOLDER')) in a loop of your own"
            )
        self.record = record

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.record.metrics(step, metrics, self.logged_at)

    def on_checkpoint(self, *, step: int, kind: str, path, **info: Any) -> None:
        # A checkpoint of another folder, which another callback has written, is not part of the run.
        if path.absolute().is_relative_to(self.record.folder.absolute()):
            file = path.absolute().relative_to(self.record.folder.absolute())
            self.record.checkpoint(step, kind, file.as_posix())
