"""The metrics of a training in memory, by their names and steps."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlox.callbacks.base import Callback

MOST_ROWS = 10_000  # from this many on, every second row without an evaluation is left out


class History(Mapping[str, np.ndarray]):
    """Columns of metrics, one row for each step at which there were any.

    ``history["step"]`` contains the steps (offline: updates), (R,) int64, increasing. Every other column, such as
    ``history["mean_reward"]``, has one number for each of them, (R,) f64: NaN where there was none. The names are those
    that ``train`` returns; results of evaluations are in ``eval/mean_return`` and so on. ``pandas.DataFrame(history)``
    is a table.

    Rows take 8 bytes for each metric. At `MOST_ROWS` rows, every second one is left out, except for evaluations and the
    newest.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name == "step":
            return np.array(self._steps, np.int64)
        return np.array(self._columns[name])

    def __iter__(self) -> Iterator[str]:
        return iter(["step", *self._columns] if self._steps else [])

    def __len__(self) -> int:
        return len(self._columns) + 1 if self._steps else 0

    def __repr__(self) -> str:
        if not self._steps:
            return "History(empty)"
        return f"History({len(self._steps):,} rows, steps {self._steps[0]:,} to {self._steps[-1]:,}: {', '.join(self)})"

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add `metrics` to the row of `step`, which is new or, for an evaluation, may be an earlier one."""
        at = bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step:
            self._steps.insert(at, step)
            for column in self._columns.values():
                column.insert(at, math.nan)
        for name, value in metrics.items():
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan]) * len(self._steps)
            self._columns[name][at] = value
        if len(self._steps) >= MOST_ROWS:
            self._thin_out()

    def _thin_out(self) -> None:
        kept = np.arange(len(self._steps)) % 2 == 0
        kept[-1] = True
        for name, column in self._columns.items():
            if name.startswith("eval/"):
                kept |= ~np.isnan(column)
        self._steps = array("q", np.array(self._steps)[kept].tolist())
        self._columns = {name: array("d", np.array(column)[kept].tolist()) for name, column in self._columns.items()}


class HistoryCallback(Callback):
    """Keeps the metrics of a training in its `history`."""

    section = "log"
    acts_on_evaluation = False

    def __init__(self) -> None:
        self.history = History()

    def on_step(self, *, step: int, metrics: dict[str, float] | None = None, **info: Any) -> bool:
        self.history.add(step, metrics or {})
        return True

    def on_evaluation(self, *, step: int, evaluation: Any, **info: Any) -> None:
        self.history.add(step, {f"eval/{name}": float(value) for name, value in evaluation.summary().items()})
