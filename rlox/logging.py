"""Loggers: callbacks that are given named numbers. The run's record is one; trackers are mirrors of that record."""

from __future__ import annotations

from typing import Any

from rlox.callbacks import Callback

# Library metrics have the seeds' flat names, trackers group them by a prefix.
_TRACKER_NAMES = {
    "mean_reward": "episode/return",
    "mean_length": "episode/length",
    "policy_loss": "loss/policy",
    "value_loss": "loss/value",
    "q_loss": "loss/q",
}


def tracker_name(metric: str) -> str:
    """``policy_loss`` -> ``loss/policy``, ``mean_reward`` -> ``episode/return``; a name with a slash stays."""
    return metric if "/" in metric else _TRACKER_NAMES.get(metric, f"loss/{metric}")


class LoggerCallback(Callback):
    """Base of loggers: override `log`. Given to an algorithm as ``logger=``."""

    section = "log"

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take `metrics` (tracker names, finite or NaN) of environment step `step`."""
        raise NotImplementedError

    def on_step(self, *, step: int, metrics: dict[str, float], **info: Any) -> bool:
        self.log(step, {tracker_name(name): value for name, value in metrics.items()})
        return True

    def on_evaluation(self, *, step: int, evaluation, **info: Any) -> None:
        self.log(step, {f"eval/{name}": float(value) for name, value in evaluation.summary().items()})


class RecordLogger(LoggerCallback):
    """Writes metrics and checkpoint events into a run's `rlox.tracking.record.Record`."""

    def __init__(self, record):
        self.record = record

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.record.metrics(step, metrics)

    def on_checkpoint(self, *, step: int, kind: str, path, **info: Any) -> None:
        self.record.checkpoint(step, kind, path.relative_to(self.record.folder).as_posix())
