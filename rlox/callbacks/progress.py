"""Report time and progress."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from rlox.callbacks.base import SECTIONS, Callback, CallbackList, _algorithm


class TimingCallback(Callback):
    """Measures the shares of wall time for collection, updates and the rest (evaluations, checkpoints, loggers).

    Each update's shares are added to its metrics as ``time/collect_share``, ``time/update_share`` and
    ``time/other_share``, for loggers that come later in the list (the algorithm's own ``logger=`` does). A hand-written
    loop passes its times as ``metrics={"time/collect_s": …, "time/update_s": …}``; else both count as other.
    """

    def __init__(self) -> None:
        self._callbacks = CallbackList()  # the list that contains this callback
        self._collect_s = 0.0
        self._update_s = 0.0
        self._at = 0.0

    def on_training_start(self, *, algorithm=None, **info: Any) -> None:
        self._callbacks = _algorithm(self, algorithm).callbacks
        self._at = time.perf_counter()

    def on_step(self, *, metrics: dict[str, float] | None = None, **info: Any) -> bool:
        now = time.perf_counter()
        passed, self._at = now - self._at, now
        metrics = {} if metrics is None else metrics
        collect, update = metrics.get("time/collect_s", 0.0), metrics.get("time/update_s", 0.0)
        self._collect_s += collect
        self._update_s += update
        metrics["time/collect_share"] = collect / passed
        metrics["time/update_share"] = update / passed
        metrics["time/other_share"] = 1.0 - (collect + update) / passed
        return True

    def summary(self) -> dict[str, float]:
        """Return ``total_s`` of all training so far, and its shares, which add up to 1: ``collect``, ``update``,
        ``evaluate``, ``log``, ``checkpoint`` and ``other``; empty before any training."""
        total, seconds = self._callbacks.training_s, self._callbacks.seconds
        if not total:
            return {}
        spent = {"collect": self._collect_s, "update": self._update_s, **{name: seconds[name] for name in SECTIONS}}
        shares = {name: value / total for name, value in spent.items()}
        return {"total_s": total, **shares, "other": 1.0 - sum(shares.values())}


class ProgressCallback(Callback):
    """Prints a plain line every few seconds: steps (offline: updates), speed, return, evaluation.

    Parameters
    ----------
    every_s : float
        Seconds between two lines; evaluations and the end of training have separate lines.
    file : text file, optional
        Output of the lines; by default stderr.
    """

    acts_on_evaluation = False

    def __init__(self, every_s: float = 5.0, file: TextIO | None = None):
        self.every_s = every_s
        self.file = file
        self._shown_at = self._began = 0.0
        self._planned = ""  # printed after the steps: their planned number, if known
        self._step = 0
        self._unit = "steps"
        self._state = ""

    def on_training_start(self, *, algorithm=None, **info: Any) -> None:
        self._shown_at = self._began = time.monotonic()
        c = _algorithm(self, algorithm).counters
        self._planned, self._unit = "" if c.end >= sys.maxsize else f"/{c.end:,}", c.unit

    def on_step(
        self, *, step: int, reward: float | None = None, metrics: dict[str, float] | None = None, **info: Any
    ) -> bool:
        self._step = step
        if metrics is None:
            metrics = {} if reward is None else {"mean_reward": reward}
        speed = metrics.get(f"time/{self._unit}_per_second", step / max(time.monotonic() - self._began, 1e-9))
        self._state = f"{speed:,.0f} {self._unit}/s"
        if "mean_reward" in metrics:
            self._state += f", return {metrics['mean_reward'] if reward is None else reward:.1f}"
        if time.monotonic() - self._shown_at >= self.every_s:
            self._print(step, self._state)
        return True

    def on_evaluation(self, *, step: int, evaluation, **info: Any) -> None:
        s = evaluation.summary()
        self._print(step, f"evaluation {s['mean_return']:.1f} ± {s['std_return']:.1f} ({s['n_episodes']} episodes)")

    def on_training_end(self, *, algorithm=None, **info: Any) -> None:
        self._print(_algorithm(self, algorithm, self._step).counters.steps, f"done, {self._state}")

    def _print(self, step: int, text: str) -> None:
        self._shown_at = time.monotonic()
        print(f"{step:,}{self._planned} {self._unit}: {text}", file=self.file or sys.stderr, flush=True)
