"""`Callback`, the list that calls them, and training loops written by hand."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlox.checkpoint import Checkpoint, save_checkpoint, versions
from rlox.checkpoint.counters import Counters
from rlox.collectors.evaluation import Evaluation, evaluate
from rlox.config import shown
from rlox.envs import env_name
from rlox.envs.failures import note_cause

_Answer = TypeVar("_Answer")

SECTIONS = ("evaluate", "log", "checkpoint")  # of callbacks' time; what is none of them is "other"


def _hook(method: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """For type checkers: an override may name those of the keyword arguments that it takes."""
    return method


class Callback:
    """Base of all callbacks: override the hooks you need.

    Hooks are called with keyword arguments; take those you use by name and the rest as ``**info``. An exception in a
    hook ends the training. A loop written by hand may pass less, such as ``on_step(reward=…, step=…)`` alone: the
    callbacks here work in it, or raise a TypeError that says what to pass.

    Attributes
    ----------
    section : str
        What its time counts as in `CallbackList.seconds`: ``evaluate``, ``log``, ``checkpoint`` or ``other``.
    acts_on_evaluation : bool
        Whether training must wait for the result before its next update, where this callback has `on_evaluation`. False
        where a result may come later than the steps that follow it (see `EvalCallback`).
    waits_for_evaluation : bool
        Whether it has something to do that must not come while an evaluation is pending: the next one is then made
        in place.
    """

    section = "other"
    acts_on_evaluation = True
    waits_for_evaluation = False
    _list: CallbackList | None = None  # the list that this callback was last put in

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback, for a training that is resumed: finite JSON values under texts."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned. Called before `on_training_start`."""

    @_hook
    def on_training_start(self, **info: Any) -> bool | None:
        """Before the first rollout. info: algorithm. Return False to train nothing."""

    @_hook
    def on_rollout_end(self, **info: Any) -> None:
        """After each rollout, or each round of off-policy collection, before the update. info: algorithm, batch (what
        was collected: `rlox.nn.batch.RolloutBatch` or `rlox.training.loops.Episodes`)."""

    @_hook
    def on_step(self, **info: Any) -> bool:
        """After each update; off-policy, where these are many, a hundred times in a training and every 1,000 steps in a
        long one; offline likewise. info: step (environment steps so far; offline: updates), reward (mean return of the
        last 100 episodes, NaN before the first), metrics (dict of float), algorithm. Return False to stop training."""
        return True

    @_hook
    def on_evaluation_start(self, **info: Any) -> None:
        """When an evaluation begins beside training (see `EvalCallback`), which goes on. info: step, algorithm."""

    @_hook
    def on_evaluation(self, **info: Any) -> None:
        """After each evaluation. info: step, evaluation (`rlox.collectors.evaluation.Evaluation`), algorithm.

        Beside training the algorithm may be some updates further than `step`.
        """

    @_hook
    def on_checkpoint(self, **info: Any) -> None:
        """After a checkpoint is safely on disk. info: step, kind ("last" or "best"), path, algorithm."""

    @_hook
    def on_collection_error(self, **info: Any) -> None:
        """When an environment raised while experience was gathered, before training ends. info: algorithm, error."""

    @_hook
    def on_training_error(self, **info: Any) -> None:
        """When an exception (no interrupt) has ended the training, in place of `on_training_end`. info: algorithm,
        error."""

    @_hook
    def on_training_end(self, **info: Any) -> None:
        """After the last update, also when a callback stopped training; not after an exception. info: algorithm."""


class CallbackList(Callback):
    """Several callbacks as one; every hook reaches every callback, in order, but those that save (of the section
    ``checkpoint``) come last, so that what they save has seen what the others have.

    Attributes
    ----------
    seconds : dict
        Wall time spent in callbacks so far, by their `Callback.section`. What a callback sets off in others (an
        evaluation its logging) counts as theirs alone.
    training_s : float
        Wall time of all trainings so far, from their beginning to the end of their last hook.
    """

    def __init__(self, callbacks: Iterable[Callback] | None = None):
        self.callbacks: list[Callback] = []
        self.seconds: Counter[str] = Counter()
        self.training_s = 0.0
        self._inner = 0.0  # seconds of the hooks that the present one has set off
        self._at = 0.0  # until when training_s has counted
        self._saved: dict[str, dict[str, Any]] = {}  # states that wait for the callbacks they are of
        self.extend(callbacks or ())

    def extend(self, callbacks: Iterable[Callback]) -> None:
        """Add `callbacks` behind those that are there, each with its saved state; a TypeError for anything else."""
        callbacks = list(callbacks)
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"CallbackList: callbacks must be rlox.callbacks.Callback, got {type(callback).__name__}"
                )
        self.callbacks = sorted([*self.callbacks, *callbacks], key=lambda one: one.section == "checkpoint")
        for callback in callbacks:
            callback._list = self
        self.set_state(self._saved)

    def by_name(self) -> dict[str, Callback]:
        """Each callback by its class, ``Name``, ``Name#2`` and so on."""
        named: dict[str, Callback] = {}
        seen: Counter[str] = Counter()
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] += 1
            named[name if seen[name] == 1 else f"{name}#{seen[name]}"] = callback
        return named

    def state(self) -> dict[str, Any]:
        """The states of all that have one, by name; also those that were restored for callbacks not there (yet)."""
        states = {name: callback.state() for name, callback in self.by_name().items()}
        # Copies: they are written while the callbacks go on.
        return copy.deepcopy({**self._saved, **{name: state for name, state in states.items() if state}})

    def set_state(self, state: dict[str, Any]) -> None:
        """Give each callback its state; the others' wait until `extend` brings them.

        Raises
        ------
        ValueError
            If a callback cannot take its own.
        """
        self._saved = dict(state)
        for name, callback in self.by_name().items():
            if name in self._saved:
                state = self._saved.pop(name)
                try:
                    callback.set_state(state)
                except (AttributeError, LookupError, TypeError, ValueError) as e:
                    raise ValueError(f"{name}: the state that a checkpoint holds of it does not fit: {e!r}") from e

    def listens(self, hook: str) -> bool:
        """Whether any callback defines the hook of this name."""
        return any(
            callback.listens(hook) if isinstance(callback, CallbackList) else self.listens_to(callback, hook)
            for callback in self.callbacks
        )

    @staticmethod
    def listens_to(callback: Callback, hook: str) -> bool:
        """Whether this callback defines the hook of this name."""
        return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)

    def that_act_on_evaluations(self) -> list[Callback]:
        """The callbacks that training must wait for an evaluation for."""
        found: list[Callback] = []
        for callback in self.callbacks:
            if isinstance(callback, CallbackList):
                found += callback.that_act_on_evaluations()
            elif callback.acts_on_evaluation and CallbackList.listens_to(callback, "on_evaluation"):
                found.append(callback)
        return found

    def waiting(self) -> bool:
        """Whether any has something to do that must not come while an evaluation is pending."""
        return any(
            callback.waiting() if isinstance(callback, CallbackList) else callback.waits_for_evaluation
            for callback in self.callbacks
        )

    def _call(self, hook: str, info: dict[str, Any]) -> list[Any]:
        answers = []
        for callback in self.callbacks:
            outer, self._inner = self._inner, 0.0
            started = time.perf_counter()
            try:
                answers.append(getattr(callback, hook)(**info))
            except Exception as e:
                if type(callback).__module__.partition(".")[0] not in ("rlox", "rlox_cli"):
                    note_cause(e, f"callback {type(callback).__name__}.{hook}")
                raise
            finally:
                took = time.perf_counter() - started
                self.seconds[callback.section] += took - self._inner  # type: ignore[assignment]  # of seconds, not whole
                self._inner = outer + took
        return answers

    def _go_on(self, hook: str, info: dict[str, Any]) -> bool:
        """Whether no callback says stop; a TypeError for an answer that says neither."""
        go_on = True
        for callback, answer in zip(self.callbacks, self._call(hook, info), strict=False):
            if answer is None or answer is True:
                continue
            if not isinstance(answer, (bool, np.bool_)):
                raise TypeError(
                    f"{type(callback).__name__}.{hook} must return False to stop, or True or nothing to go on, "
                    f"got {shown(answer)}"
                )
            go_on = go_on and bool(answer)
        return go_on

    def _lap(self) -> None:
        now = time.perf_counter()
        self.training_s += now - self._at
        self._at = now

    def on_training_start(self, **info: Any) -> bool:
        """False if any callback says that nothing is to be trained; the others are still called."""
        self._at = time.perf_counter()
        return self._go_on("on_training_start", info)

    def on_rollout_end(self, **info: Any) -> None:
        self._call("on_rollout_end", info)

    def on_step(self, **info: Any) -> bool:
        """False if any callback says stop; the others are still called."""
        go_on = self._go_on("on_step", info)
        self._lap()
        return go_on

    def on_evaluation_start(self, **info: Any) -> None:
        self._call("on_evaluation_start", info)

    def on_evaluation(self, **info: Any) -> None:
        self._call("on_evaluation", info)

    def on_checkpoint(self, **info: Any) -> None:
        self._call("on_checkpoint", info)

    def on_collection_error(self, **info: Any) -> None:
        self._call("on_collection_error", info)

    def on_training_error(self, **info: Any) -> None:
        self._call("on_training_error", info)
        self._lap()

    def on_training_end(self, **info: Any) -> None:
        self._call("on_training_end", info)
        self._lap()


class _HandWritten:
    """Stands for the algorithm in a loop written by hand.

    What it knows comes from `owner`, the callback that asks, from what the loop passed to it, and from the attributes
    ``policy`` and ``env_id`` of an object that the loop passed as ``algorithm``.
    """

    def __init__(self, owner: Callback):
        self.owner = owner
        self.counters = Counters(horizon_steps=sys.maxsize)
        self.known: dict[str, Any] = {}

    def require(self, name: str) -> Any:
        """What is known by this name; a TypeError that says how to give it where nothing is."""
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
        """The outermost list that the callback is in."""
        found = self.owner._list or CallbackList([self.owner])
        while found._list is not None:
            found = found._list
        return found

    def evaluate(
        self, n_episodes: int, seed: int | None = None, deterministic: bool = True, **options: Any
    ) -> Evaluation:
        policy, seed = self.require("policy"), 10_000 if seed is None else seed
        device = str(next(policy.parameters()).device)
        return evaluate(policy, self.env_id, n_episodes, seed, deterministic, device=device, **options)

    def snapshot(self, path: Path, memory: bool = False, **header: Any) -> Callable[[], None]:
        """Write the policy's weights, which `rlox.checkpoint.load_checkpoint` and ``init_from`` read."""
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
    """`given`, or its replacement where a hand-written loop passes no object of rlox."""
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
    """A score as JSON has it: null for none."""
    return value if math.isfinite(value) else None


def _number(best: float | None) -> float:
    return -math.inf if best is None else best
