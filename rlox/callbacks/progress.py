"""Report time and progress."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any, TextIO

from rlox.callbacks.base import SECTIONS, Callback, CallbackList, _algorithm
from rlox.callbacks.notebook import NotebookBar, in_notebook

_REDRAW_S = 0.2
_BAR, _LEAST_BAR = 20, 6  # columns


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
        if not self._at:  # a loop of one's own may call `on_step` alone
            self.on_training_start(**info)
            return True
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
    live : bool, optional
        Whether one line with a bar and the time left is redrawn instead. None: in a terminal or a notebook.
    """

    acts_on_evaluation = False

    def __init__(self, every_s: float = 5.0, file: TextIO | None = None, live: bool | None = False):
        self.every_s = every_s
        self.file = file
        self.live = live
        self._shown_at = self._began = 0.0
        self._first = 0  # step at which the training began
        self._end: int | None = None  # step at which it ends, if that is known
        self._step = 0
        self._unit = "steps"
        self._reward: float | None = None
        self._metrics: dict[str, float] | None = None  # None before the first update
        self._evaluation = ""
        self._width = 0  # columns of the line that is on the screen
        self._bar: NotebookBar | None = None

    def on_training_start(self, *, algorithm=None, **info: Any) -> None:
        self._shown_at = self._began = time.monotonic()
        if self.live is None:
            self.live = _is_redrawn(self.file or sys.stderr)
        if self.live and self.file is None and in_notebook():
            self._bar = NotebookBar()
        c = _algorithm(self, algorithm).counters
        self._end, self._unit = None if c.end >= sys.maxsize else c.end, c.unit
        self._first = self._step = c.steps
        if self.live:
            self._redraw()

    def on_step(
        self, *, step: int, reward: float | None = None, metrics: dict[str, float] | None = None, **info: Any
    ) -> bool:
        if not self._began:  # a loop of one's own may call `on_step` alone
            self.on_training_start(**info)
            self._first = step
        self._step, self._reward = step, reward
        self._metrics = {"mean_reward": reward} if metrics is None and reward is not None else metrics or {}
        if time.monotonic() - self._shown_at >= (_REDRAW_S if self.live else self.every_s):
            if self.live:
                self._redraw()
            else:
                self._print(step, ", ".join(self._state()))
        return True

    def _state(self) -> list[str]:
        """Return the speed, and the return if there are episodes; empty before the first update."""
        if self._metrics is None:
            return []
        passed = max(time.monotonic() - self._began, 1e-9)
        speed = self._metrics.get(f"time/{self._unit}_per_second", (self._step - self._first) / passed)
        played = self._metrics.get("mean_reward") if self._reward is None else self._reward
        return [f"{speed:,.0f} {self._unit}/s", *([] if played is None else [f"return {played:.1f}"])]

    def on_evaluation(self, *, step: int, evaluation, **info: Any) -> None:
        s = evaluation.summary()
        self._evaluation = f"evaluation {s['mean_return']:.1f} ± {s['std_return']:.1f}"
        if self.live:
            self._redraw()
        else:
            self._print(step, f"{self._evaluation} ({s['n_episodes']} episodes)")

    def on_training_end(self, *, algorithm=None, **info: Any) -> None:
        self._step = _algorithm(self, algorithm, self._step).counters.steps
        if self.live:
            self._redraw()
            self.close()
        else:
            self._print(self._step, ", ".join(["done", *self._state()]))

    def close(self) -> None:
        """Leave the line that was redrawn, so that what is printed next starts a new one."""
        if self._width:
            self._width = 0
            print(file=self.file or sys.stderr, flush=True)

    @property
    def _planned(self) -> str:
        return "" if self._end is None else f"/{self._end:,}"

    def _redraw(self) -> None:
        self._shown_at = now = time.monotonic()
        share = None
        parts = [f"{self._step:,}{self._planned} {self._unit}"]
        if self._end is not None:
            share = min(1.0, self._step / max(1, self._end))
            done, left = self._step - self._first, self._end - self._step
            if done > 0 and left > 0:
                parts.append(f"{format_clock((now - self._began) * left / done)} left")
        parts += filter(None, [*self._state(), self._evaluation])
        if self._bar is not None:
            self._bar.show(share, ", ".join(parts))
            return
        text = _fit(share, parts, shutil.get_terminal_size().columns - 1)
        # Spaces cover the rest of a longer line before.
        print(f"\r{text:<{self._width}}", end="", file=self.file or sys.stderr, flush=True)
        self._width = len(text)

    def _print(self, step: int, text: str) -> None:
        self._shown_at = time.monotonic()
        print(f"{step:,}{self._planned} {self._unit}: {text}", file=self.file or sys.stderr, flush=True)


def _fit(share: float | None, parts: list[str], columns: int) -> str:
    """Return a line of at most `columns`: where they are few, without the speed, and with a shorter bar or none."""
    start, bar = ("", 0) if share is None else (f"{share:4.0%} ", len("[] ") + _LEAST_BAR)
    text = ", ".join(parts)
    if len(start) + bar + len(text) > columns:
        text = ", ".join(part for part in parts if not part.endswith("/s"))
    room = min(_BAR, columns - len(start) - len("[] ") - len(text))
    if share is None or room < _LEAST_BAR:
        return f"{start}{text}"[:columns]
    full = int(share * room)
    return f"{start}[{'#' * full}{'.' * (room - full)}] {text}"


def _is_redrawn(file: TextIO) -> bool:
    """Return whether a carriage return starts the same line again: in a terminal, and in a notebook."""
    return in_notebook() or (hasattr(file, "isatty") and file.isatty() and os.environ.get("TERM") != "dumb")


def format_clock(seconds: float) -> str:
    """Format a time such as ``0:05`` or ``1:02:03``."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
