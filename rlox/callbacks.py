"""What happens around training: hooks that the loops call, and the callbacks that ship."""

from __future__ import annotations

import copy
import math
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from rlox.evaluation import Evaluation
from rlox.video import VideoWriter, render_fps

SECTIONS = ("evaluate", "log", "checkpoint")  # of callbacks' time; what is none of them is "other"


class Callback:
    """Base of all callbacks: override the hooks you need.

    Hooks are called with keyword arguments; take those you use by name and the rest as ``**info``. An exception in a
    hook ends the training.

    Attributes
    ----------
    section : str
        What its time counts as in `CallbackList.seconds`: ``evaluate``, ``log``, ``checkpoint`` or ``other``.
    """

    section = "other"

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

    def on_evaluation(self, **info: Any) -> None:
        """After each evaluation. info: step, evaluation (`rlox.evaluation.Evaluation`), algorithm."""

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
        self.set_state(self._saved)

    def _named(self) -> dict[str, Callback]:
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
        states = {name: callback.state() for name, callback in self._named().items()}
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
        for name, callback in self._named().items():
            if name in self._saved:
                state = self._saved.pop(name)
                try:
                    callback.set_state(state)
                except (AttributeError, LookupError, TypeError, ValueError) as e:
                    raise ValueError(f"{name}: the state that a checkpoint holds of it does not fit: {e!r}") from e

    def listens(self, hook: str) -> bool:
        """Whether any callback defines the hook of this name."""
        return any(
            callback.listens(hook)
            if isinstance(callback, CallbackList)
            else getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)
            for callback in self.callbacks
        )

    def _call(self, hook: str, info: dict[str, Any]) -> list[Any]:
        answers = []
        for callback in self.callbacks:
            outer, self._inner = self._inner, 0.0
            started = time.perf_counter()
            try:
                answers.append(getattr(callback, hook)(**info))
            finally:
                took = time.perf_counter() - started
                self.seconds[callback.section] += took - self._inner
                self._inner = outer + took
        return answers

    def _lap(self) -> None:
        now = time.perf_counter()
        self.training_s += now - self._at
        self._at = now

    def on_training_start(self, **info: Any) -> bool:
        """False if any callback says that nothing is to be trained; the others are still called."""
        self._at = time.perf_counter()
        return all(answer is not False for answer in self._call("on_training_start", info))

    def on_rollout_end(self, **info: Any) -> None:
        self._call("on_rollout_end", info)

    def on_step(self, **info: Any) -> bool:
        """False if any callback says stop; the others are still called."""
        go_on = all(answer is not False for answer in self._call("on_step", info))
        self._lap()
        return go_on

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

    def on_step(self, *, reward: float, **info: Any) -> bool:
        if math.isnan(reward):
            return True
        if reward > self.best + self.min_delta:
            self.best = reward
            self.waited = 0
        else:
            self.waited += 1
        return self.waited < self.patience and (self.threshold is None or reward < self.threshold)


class EvalCallback(Callback):
    """Evaluate the policy on an environment of its own; training goes on exactly as it would without.

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

    Attributes
    ----------
    evaluations : list of (int, Evaluation)
        Environment steps (offline: updates) and what was found there.
    best : float
        Mean return of the best evaluation so far; -inf before the first.
    stopped : str or None
        Why this callback stopped the training, if it did.
    """

    section = "evaluate"

    def __init__(
        self,
        n_points: int = 10,
        n_episodes: int = 20,
        seed: int | None = None,
        stop_at: float | None = None,
        patience: int | None = None,
    ):
        if n_points < 0:
            raise ValueError(f"EvalCallback: n_points must be >= 0, got {n_points}")
        if patience is not None and patience < 1:
            raise ValueError(f"EvalCallback: patience must be >= 1, got {patience}")
        self.n_points = n_points
        self.n_episodes = n_episodes
        self.seed = seed
        self.stop_at = stop_at
        self.patience = patience
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

    def on_training_start(self, *, algorithm, **info: Any) -> bool:
        c = algorithm.counters
        points = [c.horizon_start + round(c.horizon_steps * (i + 1) / self.n_points) for i in range(self.n_points)]
        self._due = [point for point in points if point > c.steps]
        if c.steps == c.horizon_start:
            self.waited, self.stopped = 0, None
        else:
            # One that goes on, perhaps from right where it was stopped, or with other limits.
            self.stopped = self._reason() if self.evaluations and self.evaluations[-1][0] == c.steps else None
        return self.stopped is None

    def on_step(self, *, step: int, algorithm, **info: Any) -> bool:
        if self._due and step >= self._due[0]:
            self._due = [point for point in self._due if point > step]
            self.evaluate(algorithm)
            # At the horizon there is nothing left to stop.
            if step < algorithm.counters.end:
                self.stopped = self._reason()
        return self.stopped is None

    def on_training_end(self, *, algorithm, **info: Any) -> None:
        if algorithm.counters.steps >= algorithm.counters.end:
            self.evaluate(algorithm)

    def evaluate(self, algorithm) -> None:
        """Evaluate now, unless the last evaluation was made at this very step."""
        step = algorithm.counters.steps
        if self.evaluations and self.evaluations[-1][0] == step:
            return
        evaluation = algorithm.evaluate(self.n_episodes, self.seed)
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

    def on_step(self, *, algorithm, **info: Any) -> bool:
        if time.monotonic() < self._end:
            return True
        self.reached = True
        if self.evaluation is not None:
            self.evaluation.evaluate(algorithm)
        return False


class TimingCallback(Callback):
    """Where the wall time goes: collecting experience, updating, or anything else (evaluations, checkpoints, loggers).

    Each update's shares join its metrics as ``time/collect_share``, ``time/update_share`` and ``time/other_share``;
    loggers that come later in the list (the algorithm's own ``logger=`` does) see them.
    """

    def __init__(self) -> None:
        self._callbacks = CallbackList()  # those it is one of
        self._collect_s = 0.0
        self._update_s = 0.0
        self._at = 0.0

    def on_training_start(self, *, algorithm, **info: Any) -> None:
        self._callbacks = algorithm.callbacks
        self._at = time.perf_counter()

    def on_step(self, *, metrics: dict[str, float], **info: Any) -> bool:
        now = time.perf_counter()
        passed, self._at = now - self._at, now
        collect, update = metrics["time/collect_s"], metrics["time/update_s"]
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

    def __init__(self, every_s: float = 5.0, file: TextIO | None = None):
        self.every_s = every_s
        self.file = file
        self._shown_at = 0.0
        self._goal = 0
        self._unit = "steps"
        self._state = ""

    def on_training_start(self, *, algorithm, **info: Any) -> None:
        self._shown_at = time.monotonic()
        self._goal, self._unit = algorithm.counters.end, algorithm.counters.unit

    def on_step(self, *, step: int, reward: float, metrics: dict[str, float], **info: Any) -> bool:
        speed = metrics[f"time/{self._unit}_per_second"]
        self._state = f"{speed:,.0f} {self._unit}/s"
        if "mean_reward" in metrics:
            self._state += f", return {reward:.1f}"
        if time.monotonic() - self._shown_at >= self.every_s:
            self._print(step, self._state)
        return True

    def on_evaluation(self, *, step: int, evaluation, **info: Any) -> None:
        s = evaluation.summary()
        self._print(step, f"evaluation {s['mean_return']:.1f} ± {s['std_return']:.1f} ({s['n_episodes']} episodes)")

    def on_training_end(self, *, algorithm, **info: Any) -> None:
        self._print(algorithm.counters.steps, f"done, {self._state}")

    def _print(self, step: int, text: str) -> None:
        self._shown_at = time.monotonic()
        print(f"{step:,}/{self._goal:,} {self._unit}: {text}", file=self.file or sys.stderr, flush=True)


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


class AdviceCallback(Callback):
    """Watches the metrics for the well-known ways in which training goes wrong, and says so once for each.

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
    """

    def __init__(self, tell: Callable[[str], None] | None = None):
        self.tell = tell
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

    def on_step(self, *, metrics: dict[str, float], algorithm, **info: Any) -> bool:
        for advice in _ADVICE:
            value = metrics.get(advice.metric, math.nan)
            # Explained variance is NaN where all returns are equal, which says nothing either way.
            if not math.isnan(value):
                self._judge(advice.metric, advice.holds(value), advice.updates, advice.line, value=value)
        if "entropy" in metrics and algorithm.spec.discrete:
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
        if self._streaks[kind] == updates and kind not in self.told:
            self.told.append(kind)
            text = line.format(**values)
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

    Raises
    ------
    OSError
        Out of the training, at its next update, where a checkpoint could not be written.
    """

    section = "checkpoint"

    def __init__(
        self,
        folder: str | Path,
        every_s: float = 60.0,
        run: dict[str, Any] | None = None,
        memory: bool = True,
        every_steps: int | None = None,
    ):
        self.folder = Path(folder)
        self.every_s = every_s
        self.run = run
        self.memory = memory
        self.every_steps = every_steps
        self.best = -math.inf
        self._saved_at = 0.0
        self._saved_step: int | None = None
        self._writes: dict[str, _Write] = {}  # by kind

    def state(self) -> dict[str, Any]:
        return {"best": _finite(self.best)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.best = _number(state["best"])

    def on_training_start(self, *, algorithm, **info: Any) -> None:
        self._saved_at = time.monotonic()
        if self._saved_step is None:
            self._saved_step = algorithm.counters.steps

    def on_step(self, *, algorithm, **info: Any) -> bool:
        self._tell(algorithm)
        steps = algorithm.counters.steps - self._saved_step
        due = time.monotonic() - self._saved_at >= self.every_s or steps >= (self.every_steps or math.inf)
        if due and steps and "last" not in self._writes:
            self.save_last(algorithm)
        return True

    def on_evaluation(self, *, evaluation, algorithm, **info: Any) -> None:
        summary = evaluation.summary()
        if self.best < summary["mean_return"] < math.inf:
            self.best = summary["mean_return"]
            kept = {**summary, "seed": evaluation.seed, "deterministic": evaluation.deterministic}
            self._save(algorithm, "best", evaluation=kept)

    def on_collection_error(self, *, algorithm, **info: Any) -> None:
        # A disk that is full as well must not hide what the environment said.
        with suppress(OSError):
            self.save_last(algorithm)

    def on_training_error(self, *, algorithm, **info: Any) -> None:
        with suppress(OSError):
            self._tell(algorithm, wait=True)

    def on_training_end(self, *, algorithm, **info: Any) -> None:
        self.save_last(algorithm)
        self._tell(algorithm, wait=True)

    def save_last(self, algorithm) -> None:
        """Begin to write ``last.safetensors`` now, unless it already holds this step."""
        if self._saved_step != algorithm.counters.steps or not (self.folder / "last.safetensors").is_file():
            self._save(algorithm, "last", memory=self.memory)
            self._saved_step = algorithm.counters.steps
        self._saved_at = time.monotonic()

    def _save(self, algorithm, kind: str, **header: Any) -> None:
        path = self.folder / f"{kind}.safetensors"
        if kind in self._writes:
            self._writes[kind].join()
            self._tell(algorithm)
        write = algorithm.snapshot(path, run=self.run, **header)
        self._writes[kind] = _Write(write, step=algorithm.counters.steps, kind=kind, path=path)
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
