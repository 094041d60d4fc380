"""The progress display of a training: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from rlox.callbacks import Callback
from rlox.callbacks.progress import format_clock
from rlox.checkpoint.checks import visible

_LINE_EVERY_S = 10.0
_BAR, _NARROW_BAR, _SHORTEST_BAR = 24, 8, 4  # columns
_WIDE = 110  # columns from which the bar has its full width
_MOST_ACTORS = 16  # that have a line
_SMOOTHING = 0.9  # weight of the earlier speed at each row
_LOSSES = (
    ("policy", "policy_loss"),
    ("value", "value_loss"),
    ("entropy", "entropy"),
    ("q loss", "q_loss"),
    ("epsilon", "exploration/epsilon"),
    ("alpha", "alpha"),
    ("penalty", "cql_penalty"),
    ("accuracy", "accuracy"),
    ("kl", "kl"),
    ("lag", "actors/lag_mean"),
    ("loss", "loss"),
)


class ProgressCallback(Callback):
    """Shows steps (offline: updates), speed, time left, return, evaluation and losses of one run.

    Speed and time left are measured from the start of learning, since a random phase before it predicts neither.
    Use it as a context manager, so that the terminal is restored however the training ends.
    """

    acts_on_evaluation = False

    def __init__(
        self,
        console: Console,
        label: str,
        total_steps: int,
        unit: str = "steps",
        digits: int = 1,
        counted: str = "episodes",
    ):
        self.console = console
        self.label = label
        self.total_steps = total_steps
        self.unit = unit
        self.digits, self.counted = digits, counted  # of a score, and what an evaluation consists of
        self._shown_at = 0.0
        self._step = 0
        self._parts: list[str] = []
        self._actors: list[str] = []  # one line for each actor, if the algorithm has any
        self._evaluation = ""
        self._updates = 0
        self._waiting = ""  # what happens before learning from its steps
        self._since, self._since_step = 0.0, 0  # where learning began
        self._steps = self._seconds = 0.0  # their quotient is the speed
        self._ends_at = math.nan
        self._live: Live | None = None

    def __enter__(self) -> ProgressCallback:
        self._shown_at = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(self, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_training_start(self, *, algorithm, **info: Any) -> None:
        self._updates, self._step = algorithm.counters.updates, algorithm.counters.steps
        self._since, self._since_step = time.monotonic(), self._step

    def on_step(self, *, step: int, metrics: dict[str, float], algorithm, **info: Any) -> bool:
        now = time.monotonic()
        self._measure(step, metrics, algorithm, now)
        # The bar redraws itself four times a second; composing its text more often would cost more than an update.
        every = _LINE_EVERY_S if self._live is None else 0.25
        if now - self._shown_at >= every or (self._live is not None and step >= self.total_steps):
            self._shown_at = now
            self._parts = self._state(metrics)
            self._actors = _actor_lines(algorithm)
            if self._live is None:
                parts = [f"{self.label}  {step:,}/{self.total_steps:,} {self.unit}", *self._parts, self._left(now)]
                self.console.print("  ".join(filter(None, parts)))
        return True

    def on_evaluation(self, *, step: int, evaluation, **info: Any) -> None:
        s = evaluation.summary()
        self._evaluation = f"eval {s['mean_return']:.{self.digits}f} ± {s['std_return']:.{self.digits}f}"
        if self._live is None:
            parts = [
                f"{self.label}  {step:,}/{self.total_steps:,} {self.unit}",
                f"{self._evaluation} over {s['n_episodes']} {self.counted}",
                self._speed(),
            ]
            self.console.print("  ".join(filter(None, parts)))

    def _measure(self, step: int, metrics: dict[str, float], algorithm, now: float) -> None:
        """Add a row to the measured speed, unless learning has not begun."""
        counters, config = algorithm.counters, algorithm.config
        starts = getattr(vars(algorithm).get("_memory"), "start", 0) + getattr(config, "learning_starts", 0)
        waiting = ""
        if step == self._step and counters.updates > self._updates:
            waiting = f"pretraining, {counters.updates:,} updates"
        elif counters.updates == self._updates or self._step < starts:
            waiting = "warming up"
        if waiting:
            # The row in which learning begins is partly random.
            self._since, self._since_step = now, step
        else:
            took = metrics["time/collect_s"] + metrics["time/update_s"]
            self._steps = _SMOOTHING * self._steps + step - self._step
            self._seconds = _SMOOTHING * self._seconds + took
            # Evaluations and checkpoints will take the same share of the remaining time as so far.
            rate = (now - self._since) / max(1, step - self._since_step)
            self._ends_at = now + rate * max(0, self.total_steps - step)
        self._waiting, self._updates, self._step = waiting, counters.updates, step

    def _speed(self) -> str:
        speed = self._steps / self._seconds if self._seconds > 0 else 0.0
        if speed <= 0:
            return ""
        number = f"{speed / 1000:.3g}k" if speed >= 10_000 else f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
        return f"{number} {self.unit}/s"

    def _left(self, now: float) -> str:
        if self._waiting:
            return self._waiting
        if math.isnan(self._ends_at):
            return ""
        return f"{format_clock(math.ceil(max(0.0, self._ends_at - now)))} left"

    def _state(self, metrics: dict[str, float]) -> list[str]:
        """Return what else to show, the most important first."""
        reward = metrics.get("mean_reward", math.nan)
        played = "" if math.isnan(reward) else f"return {reward:.1f}"
        losses = [f"{name} {metrics[key]:.3g}" for name, key in _LOSSES if key in metrics]
        return [part for part in (self._speed(), played, self._evaluation, *losses) if part]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the live line, and a line for each actor. Parts at the end that do not fit are left out."""
        width = options.max_width - 1  # a full line makes some terminals start a new one
        done = min(1.0, self._step / max(1, self.total_steps))
        bar = _BAR if width >= _WIDE else _NARROW_BAR
        line = f"{int(100 * done):3d}%"
        left = self._left(time.monotonic())
        if left and len(line) + 2 + len(left) <= width:
            line += f"  {left}"
        label = f"{visible(self.label)}  "
        label = label if cell_len(label) + bar + len(line) + 1 <= width else ""
        bar = min(bar, width - len(label) - len(line) - 1)
        for part in self._parts:
            if cell_len(label) + bar + 1 + cell_len(line) + 2 + cell_len(part) > width:
                break
            line += f"  {part}"
        yield Text(label, end="")
        if bar >= _SHORTEST_BAR:
            yield ProgressBar(total=max(1, self.total_steps), completed=done * max(1, self.total_steps), width=bar)
            yield Text(" ", end="")
        yield Text(line, no_wrap=True, overflow="crop", end="")
        for actor in self._actors:
            yield Text(f"\n  {visible(actor)}", no_wrap=True, overflow="crop", end="")


def _actor_lines(algorithm) -> list[str]:
    """Return a line about each actor, if there are any, as far as a terminal has room for them."""
    collector = getattr(algorithm, "collector", None)
    lines = [] if collector is None else collector.lines()
    more = [f"and {len(lines) - _MOST_ACTORS} more"] if len(lines) > _MOST_ACTORS else []
    return [*lines[:_MOST_ACTORS], *more]
