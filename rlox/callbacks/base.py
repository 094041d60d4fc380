"""`Callback`, the list that calls callbacks, the history of metrics, and support for hand-written training loops."""

from __future__ import annotations

import copy
import math
import sys
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, partialmethod
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlox.checkpoint import Checkpoint, is_count, one_line, save_checkpoint, versions
from rlox.checkpoint.counters import Counters
from rlox.config import shown
from rlox.envs import env_name
from rlox.evaluation.episodes import Evaluation, evaluate
from rlox.processes.failures import note_cause, require_exception

_Answer = TypeVar("_Answer")

SECTIONS = ("evaluate", "log", "checkpoint")  # of callbacks' time; the rest is "other"
_STOPPING = ("on_training_start", "on_step")  # hooks whose answer False stops the training
_AT_ONCE = 100  # rows of a history that are put into its columns together
MOST_ROWS = 10_000  # of a history; from this many on, every second row without an evaluation is left out
_COUNTED = ("on_step", "on_training_error", "on_training_end")  # hooks up to whose end `CallbackList.training_s` counts


def _hook(method: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """Let type checkers accept overrides that name the keyword arguments they use."""
    return method


class Callback:
    """Base class of all callbacks: override the hooks you need.

    Hooks are called with keyword arguments; take those you use by name and the rest as ``**info``. An exception in a
    hook ends the training. A hand-written loop may pass fewer arguments, such as only ``on_step(reward=…, step=…)``:
    the callbacks here then still work, or raise a TypeError that says what to pass.

    Attributes
    ----------
    section : str
        Category of its time in `CallbackList.seconds`: ``evaluate``, ``log``, ``checkpoint`` or ``other``.
    acts_on_evaluation : bool
        Whether training must wait for an evaluation's result before its next update, if this callback overrides
        `on_evaluation`. False if results may arrive after later steps (see `EvalCallback`).
    waits_for_evaluation : bool
        Whether the callback has work that must not be done while an evaluation is pending. The next evaluation is then
        run in place.
    enclosing_list : CallbackList or None
        The list that this callback was last put in.
    """

    section = "other"
    acts_on_evaluation = True
    waits_for_evaluation = False
    enclosing_list: CallbackList | None = None

    def state(self) -> dict[str, Any]:
        """Return the state to store in checkpoints, for a resumed training: finite JSON values with string keys."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned. Called before `on_training_start`."""

    @_hook
    def on_training_start(self, **info: Any) -> bool | None:
        """Called before the first rollout. info: algorithm. Return False to train nothing."""

    @_hook
    def on_rollout_end(self, **info: Any) -> None:
        """Called after each rollout, or each round of off-policy collection, before the update. info: algorithm, batch
        (what was collected: `rlox.RolloutBatch` or `rlox.training.replay.Episodes`)."""

    @_hook
    def on_step(self, **info: Any) -> bool:
        """Called after each update. Off-policy and offline trainings have many updates: they call it a hundred times in
        a training, or every 1,000 steps in a long one. info: step (environment steps so far; offline: updates), reward
        (mean return of the last 100 episodes, NaN before the first), metrics (dict of float), algorithm. Return False
        to stop training."""
        return True

    @_hook
    def on_evaluation_start(self, **info: Any) -> None:
        """Called when an evaluation starts in parallel to training (see `EvalCallback`). info: step, algorithm."""

    @_hook
    def on_evaluation(self, **info: Any) -> None:
        """Called after each evaluation. info: step, evaluation (`rlox.evaluation.episodes.Evaluation`), algorithm.

        If it ran in parallel to training, the algorithm may be a few updates ahead of `step`.
        """

    @_hook
    def on_checkpoint(self, **info: Any) -> None:
        """Called after a checkpoint is safely on disk. info: step, kind ("last" or "best"), path, algorithm."""

    @_hook
    def on_collection_error(self, **info: Any) -> None:
        """Called when an environment raised an error during collection, before training ends. info: algorithm,
        error."""

    @_hook
    def on_training_error(self, **info: Any) -> None:
        """Called when an exception (not an interrupt) has ended the training, instead of `on_training_end`. info:
        algorithm, error."""

    @_hook
    def on_training_end(self, **info: Any) -> None:
        """Called after the last update, also when a callback stopped training, but not after an exception. info:
        algorithm."""


class CallbackList(Callback):
    """Several callbacks as one. Every hook calls all callbacks in order, except that callbacks of the section
    ``checkpoint`` come last, so that the saved state includes the effects of the others.

    Attributes
    ----------
    seconds : dict
        Wall time spent in callbacks so far, by their `Callback.section`. If a callback triggers others (an evaluation
        triggers logging), their time counts only for them.
    training_s : float
        Wall time of all trainings so far, from their start to the end of their last hook.
    failed_hook : str or None
        The hook that has raised the error that ended the training, if a callback has.
    """

    def __init__(self, callbacks: Iterable[Callback] | None = None):
        self.callbacks: list[Callback] = []
        self.seconds: Counter[str] = Counter()
        self.training_s = 0.0
        self._inner = 0.0  # seconds of the hooks that the current hook has triggered
        self._at = 0.0  # time up to which training_s has counted
        self.failed_hook: str | None = None
        self._saved: dict[str, dict[str, Any]] = {}  # restored states of callbacks that were not added yet
        self.extend(callbacks or ())

    def extend(self, callbacks: Iterable[Callback]) -> None:
        """Append `callbacks`, each with its saved state. Raises TypeError for other objects."""
        callbacks = list(callbacks)
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"CallbackList: callbacks must be rlox.callbacks.Callback, got {type(callback).__name__}"
                )
        self.callbacks = sorted([*self.callbacks, *callbacks], key=lambda one: one.section == "checkpoint")
        for callback in callbacks:
            callback.enclosing_list = self
        if self._saved:
            self.set_state(self._saved)

    def by_name(self) -> dict[str, Callback]:
        """Return the callbacks by the name of their class: ``Name``, ``Name#2`` and so on."""
        named: dict[str, Callback] = {}
        seen: Counter[str] = Counter()
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] += 1
            named[name if seen[name] == 1 else f"{name}#{seen[name]}"] = callback
        return named

    def state(self) -> dict[str, Any]:
        """Return the non-empty states by name, including restored states of callbacks that were not added yet."""
        states = {name: callback.state() for name, callback in self.by_name().items()}
        # Copy them, because they are written while the callbacks continue.
        return copy.deepcopy({**self._saved, **{name: state for name, state in states.items() if state}})

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state of each callback; other states wait until `extend` adds their callbacks.

        Raises
        ------
        ValueError
            If a callback cannot restore its state.
        """
        self._saved = dict(state)
        for name, callback in self.by_name().items():
            if name in self._saved:
                state = self._saved.pop(name)
                try:
                    callback.set_state(state)
                except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as e:
                    raise ValueError(f"{name}: its state in the checkpoint does not fit: {e!r}") from e

    def listens(self, hook: str) -> bool:
        """Return whether any callback defines the hook of this name."""
        return any(
            callback.listens(hook) if isinstance(callback, CallbackList) else self.listens_to(callback, hook)
            for callback in self.callbacks
        )

    @staticmethod
    def listens_to(callback: Callback, hook: str) -> bool:
        """Return whether this callback defines the hook of this name."""
        return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)

    def acting_on_evaluations(self) -> list[Callback]:
        """Return the callbacks because of which training must wait for evaluations."""
        found: list[Callback] = []
        for callback in self.callbacks:
            if isinstance(callback, CallbackList):
                found += callback.acting_on_evaluations()
            elif callback.acts_on_evaluation and CallbackList.listens_to(callback, "on_evaluation"):
                found.append(callback)
        return found

    def waiting(self) -> bool:
        """Return whether any callback has work that must not be done while an evaluation is pending."""
        return any(
            callback.waiting() if isinstance(callback, CallbackList) else callback.waits_for_evaluation
            for callback in self.callbacks
        )

    def call_hook(self, hook: str, **info: Any) -> bool:
        """Call a hook of all callbacks. Returns False if any of them requests a stop; the others are still called.

        Raises
        ------
        TypeError
            If a callback answers a hook that can stop the training with anything but a bool or None.
        """
        if hook == "on_training_start" or not self._at:  # a loop of one's own may call `on_step` alone
            self._at, self.failed_hook = time.perf_counter(), None
        answers: list[tuple[Callback, Any]] = []
        for callback in self.callbacks:
            method = getattr(callback, hook)
            if getattr(method, "__func__", None) is getattr(Callback, hook):  # it does not define this hook
                continue
            outer, self._inner = self._inner, 0.0
            started = time.perf_counter()
            try:
                answers.append((callback, method(**info)))
            except BaseException as e:
                self.failed_hook = self.failed_hook or hook
                if type(callback).__module__.partition(".")[0] not in ("rlox", "rlox_cli"):
                    what = f"callback {type(callback).__name__}.{hook}"
                    require_exception(e, what, what)
                    note_cause(e, what)
                raise
            finally:
                took = time.perf_counter() - started
                self.seconds[callback.section] += took - self._inner  # type: ignore[assignment]  # of seconds, not whole
                self._inner = outer + took
        go_on = True
        for callback, answer in answers if hook in _STOPPING else ():
            if not (answer is None or isinstance(answer, (bool, np.bool_))):
                raise TypeError(
                    f"{type(callback).__name__}.{hook} must return False to stop, or True or nothing to continue, "
                    f"got {shown(answer)}"
                )
            go_on = go_on and (answer is None or bool(answer))
        if hook in _COUNTED:
            now = time.perf_counter()
            self.training_s += now - self._at
            self._at = now
        return go_on

    on_training_start: Any = partialmethod(call_hook, "on_training_start")
    on_rollout_end: Any = partialmethod(call_hook, "on_rollout_end")
    on_step: Any = partialmethod(call_hook, "on_step")
    on_evaluation_start: Any = partialmethod(call_hook, "on_evaluation_start")
    on_evaluation: Any = partialmethod(call_hook, "on_evaluation")
    on_checkpoint: Any = partialmethod(call_hook, "on_checkpoint")
    on_collection_error: Any = partialmethod(call_hook, "on_collection_error")
    on_training_error: Any = partialmethod(call_hook, "on_training_error")
    on_training_end: Any = partialmethod(call_hook, "on_training_end")


class History(Mapping[str, np.ndarray]):
    """Columns of metrics, one row for each step at which there were any.

    ``history["step"]`` contains the steps (offline: updates), (R,) int64, increasing. Every other column, such as
    ``history["mean_reward"]``, has one number for each of them, (R,) f64: NaN where there was none. The names are those
    that ``train`` returns; results of evaluations are in ``eval/mean_return`` and so on.
    ``pandas.DataFrame(dict(history))`` is a table.

    Rows take 8 bytes for each metric. At `MOST_ROWS` rows, every second one is left out, except for evaluations and the
    newest.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._waiting: list[tuple[int, dict[str, float]]] = []  # rows that are not in the columns yet

    def __getitem__(self, name: str) -> np.ndarray:
        self._fill_columns()
        if name == "step":
            return np.array(self._steps, np.int64)
        return np.array(self._columns[name])

    def __iter__(self) -> Iterator[str]:
        self._fill_columns()
        return iter(["step", *self._columns] if self._steps else [])

    def __len__(self) -> int:
        self._fill_columns()
        return len(self._columns) + 1 if self._steps else 0

    def __repr__(self) -> str:
        self._fill_columns()
        if not self._steps:
            return "History(empty)"
        return f"History({len(self._steps):,} rows, steps {self._steps[0]:,} to {self._steps[-1]:,}: {', '.join(self)})"

    def _repr_html_(self) -> str:
        """Return the curve of the returns, and the last value of each metric, for notebooks."""
        from rlox.evaluation.html import Line, draw_curves, write_table

        self._fill_columns()
        if not self._steps:
            return "no metrics yet"
        shown = {"mean_reward": "training", "eval/mean_return": "evaluation"}
        lines = [Line(label, self["step"], self[name]) for name, label in shown.items() if name in self._columns]
        last = [
            [name, next((v for v in reversed(column) if v == v), math.nan)] for name, column in self._columns.items()
        ]
        table = write_table(["metric", "last"], last, f"{len(self._steps):,} rows, to step {self._steps[-1]:,}")
        return f"{draw_curves(lines, 'steps', 'return')}<details><summary>all metrics</summary>{table}</details>"

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add `metrics` to the row of `step`, which is new or, for an evaluation, may be an earlier one."""
        # An A2C round takes 100 us, of which filling the columns row by row would take 3.
        self._waiting.append((step, dict(metrics)))
        if len(self._waiting) == _AT_ONCE:
            self._fill_columns()

    def _fill_columns(self) -> None:
        """Move the rows that wait into the columns."""
        rows, self._waiting = self._waiting, []
        while rows:
            part = rows[: max(1, MOST_ROWS - len(self._steps))]
            rows = rows[len(part) :]
            steps, added = zip(*part, strict=True)
            if any(before >= after for before, after in pairwise([*self._steps[-1:], *steps])):
                for step, metrics in part:
                    self._insert(step, metrics)
            else:
                names = list(added[0])
                if all(list(metrics) == names for metrics in added):
                    columns: Any = zip(names, zip(*map(dict.values, added), strict=True), strict=True)
                else:
                    names = list(dict.fromkeys(name for metrics in added for name in metrics))
                    columns = ((name, [metrics.get(name, math.nan) for metrics in added]) for name in names)
                unknown = array("d", [math.nan])
                for name, values in columns:
                    if name not in self._columns:
                        self._columns[name] = unknown * len(self._steps)
                    self._columns[name] += array("d", values)
                for name in self._columns.keys() - set(names):
                    self._columns[name] += unknown * len(added)
                self._steps.extend(steps)
            if len(self._steps) >= MOST_ROWS:
                self._thin_out()

    def _insert(self, step: int, metrics: dict[str, float]) -> None:
        at = bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step:
            self._steps.insert(at, step)
            for column in self._columns.values():
                column.insert(at, math.nan)
        for name, value in metrics.items():
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan]) * len(self._steps)
            self._columns[name][at] = value

    def _thin_out(self) -> None:
        kept = np.arange(len(self._steps)) % 2 == 0
        kept[-1] = True
        for name, column in self._columns.items():
            if name.startswith("eval/"):
                kept |= ~np.isnan(column)
        self._steps = array("q", np.array(self._steps)[kept].tolist())
        self._columns = {name: array("d", np.array(column)[kept].tolist()) for name, column in self._columns.items()}


@dataclass(eq=False)
class HistoryCallback(Callback):
    """Keeps the metrics of a training in its `history`."""

    history: History = field(default_factory=History)

    section = "log"
    acts_on_evaluation = False

    def on_step(self, *, step: int, metrics: dict[str, float] | None = None, **info: Any) -> bool:
        self.history.add(step, metrics or {})
        return True

    def on_evaluation(self, *, step: int, evaluation: Any, **info: Any) -> None:
        self.history.add(step, {f"eval/{name}": float(value) for name, value in evaluation.summary().items()})


class _HandWritten:
    """Replacement for the algorithm in a hand-written loop.

    It takes its values from `owner`, the callback that uses it, from what the loop passed to that callback, and from
    the attributes ``policy`` and ``env_id`` of an object that the loop passed as ``algorithm``.
    """

    def __init__(self, owner: Callback):
        self.owner = owner
        self.counters = Counters(horizon_steps=sys.maxsize)
        self.known: dict[str, Any] = {}

    def require(self, name: str) -> Any:
        """Return the value of this name. If it is unknown, raise a TypeError that says how to pass it."""
        if name not in self.known:
            who = type(self.owner).__name__
            raise TypeError(
                f"{who} needs algorithm=…, or {name}=…; pass algorithm=agent to on_step, or {who}({name}=…)"
            )
        return self.known[name]

    @property
    def env_id(self) -> Any:
        return self.require("env_id")

    @property
    def callbacks(self) -> CallbackList:
        """The outermost list that contains the callback."""
        found = self.owner.enclosing_list or CallbackList([self.owner])
        while found.enclosing_list is not None:
            found = found.enclosing_list
        return found

    def evaluate(
        self, n_episodes: int, seed: int | None = None, deterministic: bool = True, **options: Any
    ) -> Evaluation:
        policy, seed = self.require("policy"), 10_000 if seed is None else seed
        device = str(next(policy.parameters()).device)
        return evaluate(policy, self.env_id, n_episodes, seed, deterministic, device=device, **options)

    def snapshot(self, path: Path, memory: bool = False, **header: Any) -> Callable[[], None]:
        """Write the policy's weights, for `rlox.checkpoint.load_checkpoint` and ``init_from``."""
        state, env_id = self.require("policy").state_dict(), self.known.get("env_id")
        weights = {name: value.detach().cpu().numpy().copy() for name, value in state.items()}
        info = {
            "algorithm": "hand-written",
            "config": {},
            "counters": {**self.counters.scalars(), "horizon_steps": self.counters.steps},
            "env": {
                "id": None if env_id is None else env_name(env_id),
                "n_envs": 1,
                "kwargs": {},
                "wrappers": [],
                "workers": 0,
            },
            "generators": {},
            "policy": "custom",
            "seed": 0,
            "threads": 0,
            "callbacks": self.callbacks.state(),
            "versions": versions(),
            **header,
        }
        return partial(save_checkpoint, path, Checkpoint(info, {"policy": weights}))


def _algorithm(owner: Callback, given: Any, step: int | None = None, **info: Any) -> Any:
    """Return `given`, or its replacement if a hand-written loop does not pass an rlox algorithm."""
    if hasattr(given, "counters"):
        return given
    found = owner.__dict__.setdefault("_hand_written", _HandWritten(owner))
    for name in ("policy", "env_id"):
        for value in (getattr(owner, name, None), getattr(given, name, None), info.get(name)):
            if value is not None:
                found.known[name] = value
    if step is not None:
        found.counters.env_steps = step
    return found


def _finite(value: float) -> float | None:
    """Return a score for JSON: None (null) if it is not finite."""
    return value if math.isfinite(value) else None


def _number(value: Any) -> float:
    """Return a number of a saved state. Raises ValueError if it is none, and OverflowError if it is too large."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{one_line(value, 40)!r} is no number")
    return float(value)


def _score(saved: Any) -> float:
    """Return a saved score, which is None (null) before the first."""
    return -math.inf if saved is None else _number(saved)


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{one_line(value, 40)!r} is no count")
    return value
