"""What a person sees while training runs: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rlox.callbacks import Callback

_LINE_EVERY_S = 10.0


class ProgressCallback(Callback):
    """Steps (offline: updates), their speed, time left, return, evaluation and losses of one run.

    Use as a context manager, so that the terminal is given back whatever ends the training.
    """

    def __init__(self, console: Console, label: str, total_steps: int, unit: str = "steps"):
        self.console = console
        self.label = label
        self.total_steps = total_steps
        self.unit = unit
        self._live = console.is_terminal
        self._shown_at = 0.0
        self._speed = 0.0
        self._evaluation = ""
        self._progress: Progress | None = None

    def __enter__(self) -> ProgressCallback:
        self._shown_at = time.monotonic()
        if self._live:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
                refresh_per_second=4,
                transient=True,
            )
            self._task = self._progress.add_task(self.label, total=self.total_steps, state="")
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def on_step(self, *, step: int, metrics: dict[str, float], **info: Any) -> bool:
        speed = metrics[f"time/{self.unit}_per_second"]
        self._speed = speed if not self._speed else 0.9 * self._speed + 0.1 * speed
        now = time.monotonic()
        if self._progress is not None:
            # The bar redraws itself four times a second; composing its text more often would cost more than an update.
            if now - self._shown_at >= 0.25 or step >= self.total_steps:
                self._shown_at = now
                self._progress.update(self._task, completed=min(step, self.total_steps), state=self._state(metrics))
        elif now - self._shown_at >= _LINE_EVERY_S:
            self._shown_at = now
            left = (self.total_steps - step) / self._speed if self._speed else math.nan
            self.console.print(
                f"{self.label}  {step:,}/{self.total_steps:,} {self.unit}  {self._state(metrics)}  {left:.0f} s left",
                soft_wrap=True,
            )
        return True

    def on_evaluation(self, *, step: int, evaluation, **info: Any) -> None:
        s = evaluation.summary()
        self._evaluation = f"  eval {s['mean_return']:.1f} ± {s['std_return']:.1f}"
        if self._progress is None:
            self.console.print(
                f"{self.label}  {step:,}/{self.total_steps:,} {self.unit}{self._evaluation} "
                f"over {s['n_episodes']} episodes  {self._speed:,.0f} {self.unit}/s",
                soft_wrap=True,
            )

    def _state(self, metrics: dict[str, float]) -> str:
        losses = "  ".join(
            f"{name} {metrics[key]:.3g}"
            for name, key in (
                ("policy", "policy_loss"),
                ("value", "value_loss"),
                ("entropy", "entropy"),
                ("q loss", "q_loss"),
                ("epsilon", "exploration/epsilon"),
                ("alpha", "alpha"),
                ("penalty", "cql_penalty"),
            )
            if key in metrics
        )
        played = f"  return {metrics['mean_reward']:.1f}" if "mean_reward" in metrics else ""
        return f"{self._speed:,.0f} {self.unit}/s{played}{self._evaluation}  {losses}"
