"""What happens around training: hooks that the loops call, and the callbacks that ship."""

from __future__ import annotations

import copy
import math
import statistics
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from rlox.checkpoint import Checkpoint, save_checkpoint, versions
from rlox.config import shown
from rlox.envs import env_name, is_native
from rlox.evaluation import Evaluation, evaluate, warn_of_cut
from rlox.evaluator import EvaluationWorker, WorkerDied, cores, make_job, play
from rlox.failures import blame
from rlox.loops import Counters
from rlox.video import VideoWriter, render_fps

SECTIONS = ("evaluate", "log", "checkpoint")  # of callbacks' time; what is none of them is "other"


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

    def on_training_start(self, **info: Any) -> bool | None:
        """Before the first rollout. info: algorithm. Return False to train nothing."""

    def on_rollout_end(self, **info: Any) -> None:
        """After each rollout, or each round of off-policy collection, before the update. info: algorithm, batch (what
        was collected: `rlox.batch.RolloutBatch` or `rlox.loops.Episodes`)."""

    def on_step(self, **info: Any) -> bool:
        """After each update; off-policy, where these are many, a hundred times in a training and every 1,000 steps in a
        long one; offline likewise. info: step (environment steps so far; offline: updates), reward (mean return of the
        last 100 episodes, NaN before the first), metrics (dict of float), algorithm. Return False to stop training."""
        return True

    def on_evaluation_start(self, **info: Any) -> None:
        """When an evaluation begins beside training (see `EvalCallback`), which goes on. info: step, algorithm."""

    def on_evaluation(self, **info: Any) -> None:
        """After each evaluation. info: step, evaluation (`rlox.evaluation.Evaluation`), algorithm. Beside training the
        algorithm may be some updates further than `step`."""

    def on_checkpoint(self, **info: Any) -> None:
        """After a checkpoint is safely on disk. info: step, kind ("last" or "best"), path, algorithm."""

    def on_collection_error(self, **info: Any) -> None:
        """When an environment raised while experience was gathered, before training ends. info: algorithm, error."""

    def on_training_error(self, **info: Any) -> None:
        """When an exception (no interrupt) has ended the training, in place of `on_training_end`. info: algorithm,
        error."""

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
                    blame(e, f"callback {type(callback).__name__}.{hook}")
                raise
            finally:
                took = time.perf_counter() - started
                self.seconds[callback.section] += took - self._inner
                self._inner = outer + took
        return answers

    def _go_on(self, hook: str, info: dict[str, Any]) -> bool:
        """Whether no callback says stop; a TypeError for an answer that says neither."""
        answers = self._call(hook, info)
        for callback, answer in zip(self.callbacks, answers, strict=False):
            if answer is not None and not isinstance(answer, (bool, np.bool_)):
                raise TypeError(
                    f"{type(callback).__name__}.{hook} must return False to stop, or True or nothing to go on, "
                    f"got {shown(answer)}"
                )
        return all(answer is None or bool(answer) for answer in answers)

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
    """`given`, or what stands for it where a loop written by hand passes none of rlox's."""
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


_KEPT_EPISODES = 20_000  # of evaluations, in a checkpoint


def _finite(value: float) -> float | None:
    """A score as JSON has it: null for none."""
    return value if math.isfinite(value) else None


def _number(best: float | None) -> float:
    return -math.inf if best is None else best


class EarlyStoppingCallback(Callback):
    """Stop once the reward has not risen by `min_delta` for `patience` calls of `on_step`, or has reached `threshold`.

    Parameters
    ----------
    patience : int
        Calls without improvement that are borne. A NaN reward (no episode has ended yet) does not count.
    min_delta : float
        What counts as an improvement, in units of reward.
    threshold : float, optional
        Reward that is good enough.
    """

    def __init__(self, patience: int = 10, min_delta: float = 0.0, threshold: float | None = None):
        if patience < 1:
            raise ValueError(f"EarlyStoppingCallback: patience must be >= 1, got {patience}")
        self.patience = patience
        self.min_delta = min_delta
        self.threshold = threshold
        self.best = -math.inf
        self.waited = 0

    def state(self) -> dict[str, Any]:
        return {"best": _finite(self.best), "waited": self.waited}

    def set_state(self, state: dict[str, Any]) -> None:
        self.best, self.waited = _number(state["best"]), state["waited"]

    def on_step(self, *, reward: float | None = None, **info: Any) -> bool:
        if reward is None:
            raise TypeError("EarlyStoppingCallback needs reward=…; pass reward=mean_return to on_step")
        if math.isnan(reward):
            return True
        if reward > self.best + self.min_delta:
            self.best = reward
            self.waited = 0
        else:
            self.waited += 1
        return self.waited < self.patience and (self.threshold is None or reward < self.threshold)


# Evaluations beside training: at most so many processes where their number is chosen here, where the evaluations that
# are left take at least so many seconds.
_MOST_WORKERS, _WORTH_S = 4, 2.0
# What an evaluation's step and episode are taken to be where training says nothing of them: seconds, steps.
_USUAL_STEP_S, _USUAL_LENGTH = 5e-5, 1000


@dataclass
class _Begun:
    """An evaluation whose result has not been taken."""

    step: int
    job: bytes
    worker: EvaluationWorker


class EvalCallback(Callback):
    """Evaluate the policy on an environment of its own; training goes on exactly as it would without.

    With `workers`, other processes play what the policy was at the evaluation's step, beside training, and the numbers
    and checkpoints are the same. ``on_evaluation`` then comes some updates later, with the evaluation's step; loggers
    hold back what comes after that step, and `CheckpointCallback` saves no ``last`` meanwhile, so that a resumed run
    lacks none; where one is due, the next evaluation is made in place. A checkpoint of your own, saved meanwhile, does
    lack it. Training waits for the last evaluation, and for a process where all are busy. Where a process dies, this
    one plays its evaluation again.

    Parameters
    ----------
    n_points : int
        Evaluations evenly spread over training, at the first update past each point, the last at the end.
    n_episodes : int
        Episodes of one evaluation.
    seed : int, optional
        Seed of the evaluation environment; None: 10_000 + the algorithm's seed.
    stop_at : float, optional
        Training stops right after an evaluation whose mean return reaches this.
    patience : int, optional
        Training stops right after this many evaluations in a row without a new best one.
    every_steps : int, optional
        Steps between two evaluations, in place of `n_points`: for a loop written by hand, which passes no algorithm
        that says how long the training is.
    policy, env_id : optional
        What is evaluated in such a loop, a module, and where; attributes of the same names may be set later.
    workers : int
        Processes that evaluate beside training; 0: this one evaluates; -1: as many as there are free cores, at most 4,
        where evaluations take long, and 0 where they must be made here, as on native environments.
    max_steps : int, optional
        Steps after which an episode is cut (see `rlox.evaluation.evaluate`).
    imports : sequence of str
        Modules that the processes import first.

    Attributes
    ----------
    beside_s : float
        Seconds that evaluations took in other processes.
    evaluations : list of (int, Evaluation)
        Environment steps (offline: updates) and what was found there.
    best : float
        Mean return of the best evaluation so far; -inf before the first.
    stopped : str or None
        Why this callback stopped the training, if it did.
    """

    section = "evaluate"
    acts_on_evaluation = False

    def __init__(
        self,
        n_points: int = 10,
        n_episodes: int = 20,
        seed: int | None = None,
        stop_at: float | None = None,
        patience: int | None = None,
        every_steps: int | None = None,
        policy: Any = None,
        env_id: Any = None,
        workers: int = 0,
        max_steps: int | None = None,
        imports: Sequence[str] = (),
    ):
        if workers < -1:
            raise ValueError(f"EvalCallback: workers must be >= 0, or -1 for as many as are useful, got {workers}")
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"EvalCallback: max_steps must be >= 1, got {max_steps}")
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"EvalCallback: every_steps must be >= 1, got {every_steps}")
        if n_points < 0:
            raise ValueError(f"EvalCallback: n_points must be >= 0, got {n_points}")
        if patience is not None and patience < 1:
            raise ValueError(f"EvalCallback: patience must be >= 1, got {patience}")
        self.n_points = n_points
        self.n_episodes = n_episodes
        self.seed = seed
        self.stop_at = stop_at
        self.patience = patience
        self.every_steps = every_steps
        self.policy = policy
        self.env_id = env_id
        self.workers = workers
        self.max_steps = max_steps
        self.imports = list(imports)
        self.beside_s = 0.0
        self._most_workers = 0  # that may be started now
        self._weighing = False  # whether there may be some, once evaluations are known to take long
        self._weigh_at = 0
        self._took_s: float | None = None  # by the last evaluation in this process
        self._collected = (0, 0.0)  # steps and seconds of this training
        self._processes: list[EvaluationWorker] = []
        self._begun: deque[_Begun] = deque()
        self.evaluations: list[tuple[int, Evaluation]] = []
        self.best = -math.inf
        self.waited = 0
        self.stopped: str | None = None
        self._due: list[int] = []

    def state(self) -> dict[str, Any]:
        # The newest, since a checkpoint's header is no place for millions of numbers.
        counts = np.cumsum([len(e.returns) for _, e in reversed(self.evaluations)])
        newest = self.evaluations[-max(1, int((counts <= _KEPT_EPISODES).sum())) :]
        played = [
            {
                "step": step,
                "returns": [_finite(value) for value in e.returns.tolist()],
                "lengths": e.lengths.tolist(),
                "seed": e.seed,
                "deterministic": e.deterministic,
            }
            for step, e in newest
        ]
        return {"best": _finite(self.best), "waited": self.waited, "evaluations": played}

    def set_state(self, state: dict[str, Any]) -> None:
        self.best, self.waited = _number(state["best"]), state["waited"]
        self.evaluations = [
            (
                e["step"],
                Evaluation(np.array(e["returns"], float), np.array(e["lengths"]), e["seed"], e["deterministic"]),
            )
            for e in state["evaluations"]
        ]

    def on_training_start(self, *, algorithm=None, **info: Any) -> bool:
        algorithm = _algorithm(self, algorithm, **info)
        c = algorithm.counters
        if self.every_steps is not None:
            self._due = [c.steps + self.every_steps]
        elif isinstance(algorithm, _HandWritten):
            raise TypeError(
                "EvalCallback needs algorithm=…; pass algorithm=agent to on_training_start and on_step, or make it by "
                'EvalCallback(every_steps=1000, policy=policy, env_id="CartPole-v1")'
            )
        else:
            points = [c.horizon_start + round(c.horizon_steps * (i + 1) / self.n_points) for i in range(self.n_points)]
            self._due = [point for point in points if point > c.steps]
        if c.steps == c.horizon_start:
            self.waited, self.stopped = 0, None
        else:
            # One that goes on, perhaps from right where it was stopped, or with other limits.
            self.stopped = self._reason() if self.evaluations and self.evaluations[-1][0] == c.steps else None
        self._plan_workers(algorithm)
        return self.stopped is None

    def on_step(self, *, step: int, algorithm=None, metrics: dict[str, float] | None = None, **info: Any) -> bool:
        algorithm = _algorithm(self, algorithm, step, **info)
        if self._weighing:
            self._weigh(algorithm, step, metrics or {})
        if self._begun:
            self._deliver(algorithm)
        if self._due and step >= self._due[0]:
            every = [] if self.every_steps is None else [step + self.every_steps]
            self._due = every or [point for point in self._due if point > step]
            last = step >= algorithm.counters.end
            if self._most_workers and not (last or algorithm.callbacks.waiting()):
                self._begin(algorithm, step)
            else:
                self.evaluate(algorithm)
            # At the horizon there is nothing left to stop.
            if not (last or self._begun):
                self.stopped = self._reason()
        return self.stopped is None

    def on_collection_error(self, *, algorithm=None, **info: Any) -> None:
        # The first error is the one to report.
        with suppress(Exception):
            self._deliver(algorithm, wait=True)

    def on_training_error(self, *, algorithm=None, **info: Any) -> None:
        self.on_collection_error(algorithm=algorithm)
        self.close()

    def on_training_end(self, *, algorithm=None, **info: Any) -> None:
        algorithm = _algorithm(self, algorithm, **info)
        if algorithm.counters.steps >= algorithm.counters.end or isinstance(algorithm, _HandWritten):
            self.evaluate(algorithm)
        self._deliver(algorithm, wait=True)
        self.close()

    def close(self) -> None:
        """End the processes; what they have not finished is lost."""
        for process in self._processes:
            process.close()
        self._processes.clear()
        self._begun.clear()

    def obstacle(self, algorithm) -> str | None:
        """Why the evaluations of this training cannot be made beside it; None where they can."""
        kind = type(algorithm)
        if isinstance(algorithm, _HandWritten):
            return "a loop written by hand passes no algorithm"
        if "evaluate" in vars(algorithm) or not kind.evaluate.__module__.startswith("rlox."):
            return f"{kind.__name__} has an evaluate of its own"
        if self.stop_at is not None or self.patience is not None:
            return "training waits for each evaluation where stop_at or patience is set"
        if acting := algorithm.callbacks.that_act_on_evaluations():
            return f"{type(acting[0]).__name__} acts on each evaluation, so that training waits for it"
        if sum(isinstance(callback, EvalCallback) for callback in algorithm.callbacks.by_name().values()) > 1:
            return "there is another EvalCallback, and their results must come in order"
        if algorithm.device != "cpu":
            return f"the policy is on {algorithm.device}, and gives the same numbers only there"
        try:
            self._job(algorithm)
        except Exception as e:
            return f"policy and environment must be such that cloudpickle can send them to another process: {e}"
        return None

    def obstacle_for_auto(self, algorithm) -> str | None:
        """Why they are not, where this callback chooses; None where they are if they take long."""
        if isinstance(algorithm, _HandWritten) or self.workers == 0:
            return "as asked"
        if self._free_cores(algorithm) < 1:
            return f"training uses all {cores()} cores that there are"
        if getattr(algorithm, "_own_policy", False):
            return "the policy is a module of your own, which may keep state"
        obstacle = self.obstacle(algorithm)
        if obstacle is None:
            arguments = algorithm.evaluation_arguments(self.n_episodes, self.seed)
            if is_native(arguments["env_id"]) and not (arguments["env_kwargs"] or arguments["wrappers"]):
                return "native environments are evaluated within milliseconds"
        return obstacle

    def planned_workers(self, algorithm, seconds: float) -> int:
        """How many processes there may be, where the evaluations to come take so many `seconds` together."""
        if self.workers > 0:
            return self.workers
        if seconds < _WORTH_S or self.obstacle_for_auto(algorithm) is not None:
            return 0
        return min(_MOST_WORKERS, self._free_cores(algorithm))

    @staticmethod
    def _free_cores(algorithm) -> int:
        """Cores that training itself leaves."""
        torch = sys.modules.get("torch")
        used = [algorithm.threads or (torch.get_num_threads() if torch else 1), getattr(algorithm, "env_workers", 0)]
        if getattr(algorithm, "env_backend", "auto") == "envpool":
            used.append(algorithm.env_kwargs.get("num_threads") or algorithm.n_envs)
        return cores() - max(used)

    def _plan_workers(self, algorithm) -> None:
        """Decide how many processes this training may have for its evaluations, or when that is decided."""
        c = algorithm.counters
        self.close()
        self._most_workers, self._weighing = 0, False
        if self.workers > 0:
            if (obstacle := self.obstacle(algorithm)) is not None:
                raise ValueError(f"EvalCallback: workers must be 0 or -1 here, got {self.workers}: {obstacle}")
            self._most_workers = self.workers
            self._start_worker()  # it gets ready while training begins
        elif self.workers < 0 and self._due and self.obstacle_for_auto(algorithm) is None:
            self._weighing, self._collected = True, (c.steps, 0.0)
            self._weigh_at = c.steps + (self._due[0] - c.steps) // 4

    def _weigh(self, algorithm, step: int, metrics: dict[str, float]) -> None:
        """Start a process as soon as the evaluations that are left are known to take long enough."""
        begun, seconds = self._collected
        self._collected = begun, seconds + metrics.get("time/collect_s", 0.0)
        if step < self._weigh_at:
            return
        left = len(self._due) if self.every_steps is None else 2
        self._weigh_at = self._due[0] if self._due else sys.maxsize
        self._most_workers = self.planned_workers(algorithm, left * self._expected_s(algorithm, step))
        if self._most_workers:
            self._weighing = False
            self._start_worker()

    def _expected_s(self, algorithm, step: int) -> float:
        """Seconds of one evaluation, from the last one in this process, or from how training collects."""
        if self._took_s is not None:
            return self._took_s
        begun, seconds = self._collected
        each, length = _USUAL_STEP_S, algorithm.counters.mean_length
        if algorithm.counters.clock == "env_steps" and step > begun:
            each = seconds / (step - begun) * max(1, algorithm.env_workers)
        return self.n_episodes * (_USUAL_LENGTH if math.isnan(length) else length) * each

    def _start_worker(self) -> EvaluationWorker:
        self._processes.append(EvaluationWorker())
        return self._processes[-1]

    def _job(self, algorithm) -> bytes:
        arguments = algorithm.evaluation_arguments(self.n_episodes, self.seed)
        return make_job({**arguments, "max_steps": self.max_steps}, algorithm.threads, self.imports)

    def _begin(self, algorithm, step: int) -> None:
        """Let a process evaluate the policy as it is now."""
        job = self._job(algorithm)
        while len(self._begun) >= self._most_workers > 0:
            self._deliver(algorithm, wait=True, leave=self._most_workers - 1)
        if not self._most_workers:  # one has died meanwhile
            self.evaluate(algorithm)
            return
        worker = next((process for process in self._processes if not process.busy), None) or self._start_worker()
        worker.begin(job)
        self._begun.append(_Begun(step, job, worker))
        algorithm.callbacks.on_evaluation_start(step=step, algorithm=algorithm)

    def _deliver(self, algorithm, wait: bool = False, leave: int = 0) -> None:
        """Take what is there, in the order of steps; with `wait` until no more than `leave` are pending."""
        while self._begun:
            one = self._begun[0]
            try:
                if not one.worker.ready(wait and len(self._begun) > leave):
                    return
                evaluation, seconds = one.worker.result()
            except WorkerDied as e:
                self._most_workers = 0
                self._processes.remove(one.worker)
                warnings.warn(
                    f"EvalCallback: {e} in the evaluation at {one.step:,}; evaluations go on in this process",
                    RuntimeWarning,
                    2,
                )
                evaluation = play(one.job)
            except (Exception, SystemExit):
                self.close()
                raise
            else:
                self.beside_s += seconds
                if evaluation.n_cut:
                    warn_of_cut(algorithm.env_id, int(evaluation.lengths.max()))
            self._begun.popleft()
            self._take(algorithm, one.step, evaluation)

    def evaluate(self, algorithm) -> None:
        """Evaluate now, unless the last evaluation was made at this very step."""
        step = algorithm.counters.steps
        if self._begun and self._begun[-1].step == step:
            self._deliver(algorithm, wait=True)
        if self.evaluations and self.evaluations[-1][0] == step:
            return
        started = time.perf_counter()
        options = {} if self.max_steps is None else {"max_steps": self.max_steps}
        # Pending ones are played meanwhile, and come first.
        evaluation = algorithm.evaluate(self.n_episodes, self.seed, **options)
        self._took_s = time.perf_counter() - started
        self._deliver(algorithm, wait=True)
        self._take(algorithm, step, evaluation)

    def _take(self, algorithm, step: int, evaluation: Evaluation) -> None:
        self.evaluations.append((step, evaluation))
        mean = evaluation.summary()["mean_return"]
        self.waited = 0 if mean > self.best else self.waited + 1
        self.best = max(self.best, mean)
        algorithm.callbacks.on_evaluation(step=step, evaluation=evaluation, algorithm=algorithm)

    def _reason(self) -> str | None:
        mean = self.evaluations[-1][1].summary()["mean_return"]
        if self.stop_at is not None and mean >= self.stop_at:
            return f"the evaluation's mean return {mean:.1f} reached stop_at={self.stop_at:g}"
        if self.patience is not None and self.waited >= self.patience:
            return f"{self.waited} evaluations in a row were no better than {self.best:.1f} (patience={self.patience})"
        return None


class TimeLimitCallback(Callback):
    """Stop at the first update past `seconds` of wall time.

    Parameters
    ----------
    seconds : float
        Wall time from the start of training, evaluations and checkpoints included.
    evaluation : EvalCallback, optional
        Asked for one more evaluation when time is up, so that what is handed over has a score.
    """

    def __init__(self, seconds: float, evaluation: EvalCallback | None = None):
        if not seconds > 0:
            raise ValueError(f"TimeLimitCallback: seconds must be > 0, got {seconds}")
        self.seconds = seconds
        self.evaluation = evaluation
        self.reached = False
        self._end = math.inf

    def on_training_start(self, **info: Any) -> None:
        self._end, self.reached = time.monotonic() + self.seconds, False

    def on_step(self, *, algorithm=None, step: int | None = None, **info: Any) -> bool:
        if time.monotonic() < self._end:
            return True
        self.reached = True
        if self.evaluation is not None:
            self.evaluation.evaluate(_algorithm(self.evaluation, algorithm, step, **info))
        return False


class TimingCallback(Callback):
    """Where the wall time goes: collecting experience, updating, or anything else (evaluations, checkpoints, loggers).

    Each update's shares join its metrics as ``time/collect_share``, ``time/update_share`` and ``time/other_share``;
    loggers that come later in the list (the algorithm's own ``logger=`` does) see them. A loop written by hand says how
    long it collected and updated by ``metrics={"time/collect_s": …, "time/update_s": …}``; else both count as other.
    """

    def __init__(self) -> None:
        self._callbacks = CallbackList()  # those it is one of
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
        """``total_s`` of all training so far, and the shares of it, which add up to 1: ``collect``, ``update``,
        ``evaluate``, ``log``, ``checkpoint`` and ``other``; empty before any."""
        total, seconds = self._callbacks.training_s, self._callbacks.seconds
        if not total:
            return {}
        spent = {"collect": self._collect_s, "update": self._update_s, **{name: seconds[name] for name in SECTIONS}}
        shares = {name: value / total for name, value in spent.items()}
        return {"total_s": total, **shares, "other": 1.0 - sum(shares.values())}


class ProgressCallback(Callback):
    """A plain line every few seconds: steps (offline: updates), speed, return, evaluation.

    Parameters
    ----------
    every_s : float
        Seconds between two lines; evaluations and the end have lines of their own.
    file : text file, optional
        Where the lines go; None: stderr.
    """

    acts_on_evaluation = False

    def __init__(self, every_s: float = 5.0, file: TextIO | None = None):
        self.every_s = every_s
        self.file = file
        self._shown_at = self._began = 0.0
        self._goal = ""  # behind the steps: how many there will be, where that is known
        self._step = 0
        self._unit = "steps"
        self._state = ""

    def on_training_start(self, *, algorithm=None, **info: Any) -> None:
        self._shown_at = self._began = time.monotonic()
        c = _algorithm(self, algorithm).counters
        self._goal, self._unit = "" if c.end >= sys.maxsize else f"/{c.end:,}", c.unit

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
        print(f"{step:,}{self._goal} {self._unit}: {text}", file=self.file or sys.stderr, flush=True)


class VideoCallback(Callback):
    """Film an episode of evaluations, as ``<folder>/step-000012800.mp4``.

    It is played apart, on the evaluation's seed (for native ids in gymnasium's environment, which has pictures);
    neither the evaluation nor the training changes. Needs the extra ``video`` (``pip install "rlox-cli[video]"``).

    Parameters
    ----------
    folder : path
        Where the films go.
    every_evaluations : int
        Film every so many evaluations, beginning with the first.
    kind : str
        ``mp4`` or ``gif``.
    fps : int, optional
        Frames per second of the film; None: what the environment says.

    Raises
    ------
    ImportError
        At once, if the package that writes films is not installed.
    """

    def __init__(self, folder: str | Path, every_evaluations: int = 1, kind: str = "mp4", fps: int | None = None):
        if every_evaluations < 1:
            raise ValueError(f"VideoCallback: every_evaluations must be >= 1, got {every_evaluations}")
        self.folder = Path(folder)
        self.every_evaluations = every_evaluations
        self.kind = kind
        self.fps = fps
        self.paths: list[Path] = []
        self._evaluations = 0
        # An unknown kind or a missing package is to be told now, not hours later.
        VideoWriter(self.folder / f"step.{kind}", fps or 30)

    def on_evaluation(self, *, step: int, evaluation, algorithm, **info: Any) -> None:
        due = self._evaluations % self.every_evaluations == 0
        self._evaluations += 1
        if due:
            path = self.folder / f"step-{step:09d}.{self.kind}"
            with VideoWriter(path, self.fps or render_fps(algorithm.env_id)) as video:
                algorithm.evaluate(1, evaluation.seed, evaluation.deterministic, frames=video.add)
            self.paths.append(path)


@dataclass(frozen=True)
class _Advice:
    """Say `line` once `holds` was true for `updates` updates in a row; `metric` must be there and be a number."""

    metric: str
    holds: Callable[[float], bool]
    updates: int
    line: str


_ADVICE = (
    _Advice(
        "explained_variance",
        lambda value: value < 0.0,
        20,
        "explained variance is below 0 ({value:.2f}): the critic predicts returns worse than their mean would; "
        "raise vf_coef or learning_rate, normalise observations or rewards, or check that gamma fits the episodes",
    ),
    _Advice(
        "approx_kl",
        lambda value: value > 0.1,
        10,
        "approx_kl is above 0.1 ({value:.2f}): each update throws the policy far from the one that collected its data; "
        "lower learning_rate or n_epochs, or set target_kl=0.02",
    ),
    _Advice(
        "clip_fraction",
        lambda value: value > 0.5,
        10,
        "clip_fraction is above 0.5 ({value:.2f}): most samples give no gradient any more; lower learning_rate or "
        "n_epochs, or raise batch_size",
    ),
)
_ENTROPY = (
    "the policy's entropy fell below 1 % of its start ({value:.2g} of {start:.2g} nats): it has stopped exploring; if "
    "the return is not what you want yet, raise ent_coef or lower learning_rate"
)
_GRAD_NORM = (
    "grad_norm is more than 100 times its recent median ({value:.3g} against {median:.3g}): the loss is exploding; "
    "lower learning_rate, set max_grad_norm=0.5, or normalise rewards"
)
_LASTING, _RECENT = 3, 50  # updates: how long entropy and grad_norm must stay out, how many the median is taken of


def plan_advice(algorithm) -> Iterator[tuple[str, str]]:
    """What in an algorithm's settings and environment goes wrong in a well-known way: its kind, and a line."""
    c, spec = algorithm.config, algorithm.spec
    if getattr(c, "normalize_advantages", False) and c.n_steps * algorithm.n_envs == 1:
        yield (
            "one_row",
            "a rollout is a single transition, whose advantage has no variance and is not normalised; raise n_steps or "
            "n_envs, or set normalize_advantages=false",
        )
    normalizer = getattr(algorithm, "normalizer", None)
    if spec.obs_bytes is not None and (normalizer is None or not normalizer.obs):
        image = len(spec.obs_bytes) == 2 and min(spec.obs_bytes) >= 36
        shape = ", ".join(map(str, (*spec.obs_bytes, 1)))
        remedy = f"for an image take the wrapper {{ReshapeObservation: {{shape: [{shape}]}}}}, else " if image else ""
        yield (
            "unscaled",
            f"observations are bytes of shape {spec.obs_bytes}, {spec.obs_dim:,} numbers from 0 to 255 that the "
            f"network sees unscaled; {remedy}set normalize_obs=true",
        )


class AdviceCallback(Callback):
    """Watches the metrics for the well-known ways in which training goes wrong, and says so once for each.

    At the start it says what goes wrong in the settings: rollouts of one transition whose advantage is to be
    normalised, and bytes for observations that are neither an image nor normalised.

    ===================  ========================================================
    explained_variance   below 0 for 20 updates in a row
    approx_kl            above 0.1 for 10 updates in a row
    clip_fraction        above 0.5 for 10 updates in a row
    entropy              of a discrete policy: below 1 % of its start, for 3
    grad_norm            above 100 times the median of the last 50, for 3
    ===================  ========================================================

    Parameters
    ----------
    tell : callable, optional
        Given each line: what it means and what to change. None: they go to stderr.
    plan : bool
        Whether to look at the settings; ``rlox train`` does it before the run.
    """

    def __init__(self, tell: Callable[[str], None] | None = None, plan: bool = True):
        self.tell = tell
        self.plan = plan
        self.told: list[str] = []  # kinds, by their metric
        self._streaks: dict[str, int] = {}
        self._entropy_start: float | None = None
        self._grad_norms: deque[float] = deque(maxlen=_RECENT)

    def state(self) -> dict[str, Any]:
        norms = [norm for norm in self._grad_norms if math.isfinite(norm)]
        return {"told": self.told, "streaks": self._streaks, "entropy_start": self._entropy_start, "grad_norms": norms}

    def set_state(self, state: dict[str, Any]) -> None:
        self.told, self._streaks = list(state["told"]), dict(state["streaks"])
        self._entropy_start = state["entropy_start"]
        self._grad_norms.extend(state["grad_norms"])

    def on_training_start(self, *, algorithm=None, **info: Any) -> None:
        if self.plan and hasattr(algorithm, "config"):
            for kind, line in plan_advice(algorithm):
                self._say(kind, line)

    def on_step(self, *, metrics: dict[str, float] | None = None, algorithm=None, **info: Any) -> bool:
        if metrics is None:
            raise TypeError('AdviceCallback needs metrics=…; pass metrics={"approx_kl": …, "grad_norm": …} to on_step')
        for advice in _ADVICE:
            value = metrics.get(advice.metric, math.nan)
            # Explained variance is NaN where all returns are equal, which says nothing either way.
            if not math.isnan(value):
                self._judge(advice.metric, advice.holds(value), advice.updates, advice.line, value=value)
        # A loop written by hand does not say which kind of actions the entropy is of.
        if "entropy" in metrics and algorithm is not None and algorithm.spec.discrete:
            value = metrics["entropy"]
            if self._entropy_start is None:
                self._entropy_start = value
            start = self._entropy_start
            self._judge("entropy", value < 0.01 * start, _LASTING, _ENTROPY, value=value, start=start)
        if "grad_norm" in metrics:
            value = metrics["grad_norm"]
            if len(self._grad_norms) >= _RECENT // 5:
                median = statistics.median(self._grad_norms)
                self._judge("grad_norm", value > 100.0 * median > 0.0, _LASTING, _GRAD_NORM, value=value, median=median)
            self._grad_norms.append(value)
        return True

    def _judge(self, kind: str, holds: bool, updates: int, line: str, **values: float) -> None:
        self._streaks[kind] = self._streaks.get(kind, 0) + 1 if holds else 0
        if self._streaks[kind] == updates:
            self._say(kind, line.format(**values))

    def _say(self, kind: str, text: str) -> None:
        if kind in self.told:
            return
        self.told.append(kind)
        if self.tell is None:
            print(f"advice: {text}", file=sys.stderr)
        else:
            self.tell(text)


class _Write(threading.Thread):
    """A checkpoint on its way to the disk."""

    def __init__(self, write: Callable[[], None], **info: Any):
        # Of no use to a process that is told to stop at once; the file that was there stays until the new one is whole.
        super().__init__(name="rlox-checkpoint", daemon=True)
        self.info = info
        self.error: BaseException | None = None
        self._write = write

    def run(self) -> None:
        try:
            self._write()
        except BaseException as e:
            self.error = e


class CheckpointCallback(Callback):
    """Keep ``last.safetensors`` (every `every_s` seconds and at the end) and ``best.safetensors`` (by evaluation).

    Training waits for a copy to be made; a thread writes it while training goes on, and ``on_checkpoint`` is called
    when it is safely on disk. A `last` that is due while the one before is still being written comes right after it.

    Parameters
    ----------
    folder : path
        Where the two files go.
    every_s : float
        Seconds between two saves of ``last``.
    run : dict, optional
        The resolved configuration of the run, kept in the header.
    memory : bool
        Whether ``last`` has the replay memory beside it, in ``memory/`` (off-policy).
    every_steps : int, optional
        Environment steps (offline: updates) between two saves of ``last``, whichever comes first.
    policy : nn.Module, optional
        In a loop written by hand, which passes no algorithm: what to save. `rlox.checkpoint.load_checkpoint` reads the
        weights again, and ``init_from`` of an algorithm with such a policy starts from them.

    Raises
    ------
    OSError
        Out of the training, at its next update, where a checkpoint could not be written.
    """

    section = "checkpoint"
    acts_on_evaluation = False

    def __init__(
        self,
        folder: str | Path,
        every_s: float = 60.0,
        run: dict[str, Any] | None = None,
        memory: bool = True,
        every_steps: int | None = None,
        policy: Any = None,
    ):
        self.policy = policy
        self.folder = Path(folder)
        self.every_s = every_s
        self.run = run
        self.memory = memory
        self.every_steps = every_steps
        self.best = -math.inf
        self._saved_at = 0.0
        self._saved_step: int | None = None
        self._writes: dict[str, _Write] = {}  # by kind
        # By the step of a pending evaluation: what writes the checkpoint of then, and the callbacks' states.
        self._copies: dict[int, tuple[Callable[..., None], dict[str, Any]]] = {}

    def state(self) -> dict[str, Any]:
        return {"best": _finite(self.best)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.best = _number(state["best"])

    def on_training_start(self, *, algorithm=None, **info: Any) -> None:
        self._saved_at = time.monotonic()
        self._copies.clear()
        if self._saved_step is None:
            self._saved_step = _algorithm(self, algorithm).counters.steps

    def on_step(self, *, algorithm=None, **info: Any) -> bool:
        algorithm = _algorithm(self, algorithm, **info)
        if isinstance(algorithm, _HandWritten):
            algorithm.require("policy")  # now, not at the first save
        self._tell(algorithm)
        steps = algorithm.counters.steps - self._saved_step
        due = time.monotonic() - self._saved_at >= self.every_s or steps >= (self.every_steps or math.inf)
        # One that knows nothing of an evaluation whose step has passed would lose it.
        self.waits_for_evaluation = bool(due and steps and self._copies)
        if due and steps and "last" not in self._writes and not self._copies:
            self.save_last(algorithm)
        return True

    def on_evaluation_start(self, *, step: int, algorithm, **info: Any) -> None:
        write = algorithm.snapshot(self.folder / "best.safetensors", run=self.run)
        self._copies[step] = write, algorithm.callbacks.state()

    def on_evaluation(self, *, evaluation, step: int | None = None, algorithm=None, **info: Any) -> None:
        algorithm = _algorithm(self, algorithm, **info)
        write, states = self._copies.pop(step, (None, {}))
        summary = evaluation.summary()
        if self.best < summary["mean_return"] < math.inf:
            self.best = summary["mean_return"]
            kept = {**summary, "seed": evaluation.seed, "deterministic": evaluation.deterministic}
            if write is None:
                self._save(algorithm, "best", evaluation=kept)
                return
            # As of that step, but for those that the evaluation itself changes.
            now, named = algorithm.callbacks.state(), algorithm.callbacks.by_name()
            scored = [name for name, callback in named.items() if isinstance(callback, (EvalCallback, type(self)))]
            states |= {name: now[name] for name in scored if name in now}
            self._write(algorithm, "best", step, partial(write, evaluation=kept, callbacks=states))

    def on_collection_error(self, *, algorithm, **info: Any) -> None:
        # A disk that is full as well must not hide what the environment said.
        with suppress(OSError):
            if not self._copies:
                self.save_last(algorithm)

    def on_training_error(self, *, algorithm, **info: Any) -> None:
        with suppress(OSError):
            self._tell(algorithm, wait=True)

    def on_training_end(self, *, algorithm=None, **info: Any) -> None:
        algorithm = _algorithm(self, algorithm, **info)
        self.save_last(algorithm)
        self._tell(algorithm, wait=True)

    def save_last(self, algorithm) -> None:
        """Begin to write ``last.safetensors`` now, unless it already holds this step."""
        if self._saved_step != algorithm.counters.steps or not (self.folder / "last.safetensors").is_file():
            self._save(algorithm, "last", memory=self.memory)
            self._saved_step = algorithm.counters.steps
        self._saved_at = time.monotonic()

    def _save(self, algorithm, kind: str, **header: Any) -> None:
        write = algorithm.snapshot(self.folder / f"{kind}.safetensors", run=self.run, **header)
        self._write(algorithm, kind, algorithm.counters.steps, write)

    def _write(self, algorithm, kind: str, step: int, write: Callable[[], None]) -> None:
        if kind in self._writes:
            self._writes[kind].join()
            self._tell(algorithm)
        self._writes[kind] = _Write(write, step=step, kind=kind, path=self.folder / f"{kind}.safetensors")
        self._writes[kind].start()

    def _tell(self, algorithm, wait: bool = False) -> None:
        """See after what is being written: say what is there, raise what went wrong."""
        for kind, write in list(self._writes.items()):
            if wait:
                write.join()
            if write.is_alive():
                continue
            del self._writes[kind]
            if write.error is not None:
                raise write.error
            algorithm.callbacks.on_checkpoint(**write.info, algorithm=algorithm)
