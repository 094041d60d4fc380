"""Evaluate while training."""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlox.callbacks.base import Callback, _algorithm, _count, _finite, _HandWritten, _score
from rlox.config import MOST_AT_ONCE, integer
from rlox.envs import is_vectorised
from rlox.evaluation.episodes import Evaluation, warn_of_cut
from rlox.evaluation.evaluator import EvaluationWorker, cores, make_job, play
from rlox.processes.parent import ChildDied

_KEPT_EPISODES = 20_000  # evaluation episodes stored in a checkpoint
# With workers=-1: the most evaluation processes, and the seconds that the remaining evaluations must take to start any.
_MOST_WORKERS, _WORTH_S = 4, 2.0
# Assumed seconds of a step and steps of an episode in an evaluation, if training does not provide these numbers.
_USUAL_STEP_S, _USUAL_LENGTH = 5e-5, 1000


@dataclass
class _Pending:
    """A started evaluation whose result was not collected yet."""

    step: int
    job: bytes
    worker: EvaluationWorker


def step_limit(algorithm: Any) -> int | None:
    """Return the `max_steps` of the algorithm's evaluations, for other episodes at an evaluation; None if not set."""
    callbacks = algorithm.callbacks.callbacks
    return next((each.max_steps for each in callbacks if isinstance(each, EvalCallback) and each.max_steps), None)


def warn_without_evaluations(callback: Callback, algorithm: Any) -> None:
    """Warn if `callback`, which acts at evaluations, is in a training without any."""
    callbacks = getattr(algorithm, "callbacks", None)
    if callbacks is not None and not any(isinstance(each, EvalCallback) for each in callbacks.callbacks):
        name = type(callback).__name__
        warnings.warn(
            f"{name} acts at evaluations, and there are none; add an EvalCallback(every_steps=…) to the callbacks",
            RuntimeWarning,
            stacklevel=2,
        )


def _evaluation(saved: dict[str, Any]) -> Evaluation:
    """Return an evaluation that was saved in a checkpoint. Raises ValueError unless it has numbers of each episode."""
    returns, lengths = np.array(saved["returns"], float), np.array(saved["lengths"])
    if returns.ndim != 1 or lengths.ndim != 1 or not len(returns) or lengths.dtype.kind not in "if":
        raise ValueError("an evaluation must have the returns and lengths of its episodes")
    return Evaluation(returns, lengths, saved["seed"], saved["deterministic"])


class EvalCallback(Callback):
    """Evaluate the policy in a separate environment; training is exactly the same as without evaluations.

    With `workers`, other processes evaluate the policy of the evaluation's step in parallel to training; the numbers
    and checkpoints are the same. ``on_evaluation`` is then called a few updates later, with the evaluation's step. In
    the meantime, loggers hold back the metrics of later steps, and `CheckpointCallback` does not save ``last``, so that
    a resumed run lacks no evaluation; if ``last`` is due, the next evaluation runs in place. A checkpoint that you save
    yourself in the meantime does lack the evaluation. Training waits for the last evaluation, and for a free process if
    all are busy. If a process dies, this process repeats its evaluation.

    Parameters
    ----------
    n_points : int
        Number of evaluations, evenly spread over training: at the first update past each point, the last at the end.
    n_episodes : int
        Episodes of one evaluation.
    seed : int, optional
        Seed of the evaluation environment; by default 10_000 + the algorithm's seed.
    stop_at : float, optional
        Training stops right after an evaluation whose mean return reaches this value.
    patience : int, optional
        Training stops right after this many evaluations in a row without a new best one.
    every_steps : int, optional
        Steps between two evaluations, instead of `n_points`: for a hand-written loop, which passes no algorithm that
        knows the length of the training.
    policy, env_id : optional
        The module to evaluate in such a loop, and its environment; attributes of the same names may be set later.
    workers : int
        Processes that evaluate in parallel to training. 0 evaluates in this process. -1 uses as many as there are free
        cores, at most 4, if evaluations take long, and 0 if they must run here, as on native environments.
    max_steps : int, optional
        Steps after which an episode is truncated (see `rlox.evaluation.episodes.evaluate`).
    imports : sequence of str
        Modules that the processes import first.

    Attributes
    ----------
    beside_s : float
        Seconds that evaluations took in other processes.
    evaluations : list of (int, Evaluation)
        Environment steps (offline: updates) and the result of the evaluation at that step.
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
        if patience is not None and patience < 1:
            raise ValueError(f"EvalCallback: patience must be >= 1, got {patience}")
        self.n_points = integer("EvalCallback", "n_points", n_points, 0, MOST_AT_ONCE)
        self.n_episodes = integer("EvalCallback", "n_episodes", n_episodes, 1, MOST_AT_ONCE)
        self.seed = None if seed is None else integer("EvalCallback", "seed", seed, 0)
        self.stop_at = stop_at
        self.patience = patience
        self.every_steps = every_steps
        self.policy = policy
        self.env_id = env_id
        self.workers = workers
        self.max_steps = max_steps
        self.imports = list(imports)
        self.beside_s = 0.0
        self._most_workers = 0  # how many may be started now
        self._measuring = False  # whether workers may be started later, if evaluations turn out to take long
        self._decide_at = 0
        self._took_s: float | None = None  # duration of the last evaluation in this process
        self._collected = (0, 0.0)  # step at the start of this training, and its seconds of collection
        self._processes: list[EvaluationWorker] = []
        self._pending: deque[_Pending] = deque()
        self.evaluations: list[tuple[int, Evaluation]] = []
        self.best = -math.inf
        self.waited = 0
        self.stopped: str | None = None
        self._due: list[int] = []

    def state(self) -> dict[str, Any]:
        # Only the newest evaluations: a checkpoint's header must not contain millions of numbers.
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
        self.best, self.waited = _score(state["best"]), _count(state["waited"])
        self.evaluations = [(_count(e["step"]), _evaluation(e)) for e in state["evaluations"]]

    def on_training_start(self, *, algorithm=None, **info: Any) -> bool:
        algorithm = _algorithm(self, algorithm, **info)
        c = algorithm.counters
        if self.every_steps is not None:
            # A training that continues keeps the distance from the last evaluation.
            last = [step for step, _ in self.evaluations[-1:] if step <= c.steps]
            self._due = [max([c.horizon_start, *last]) + self.every_steps]
        elif isinstance(algorithm, _HandWritten):
            raise TypeError(
                "EvalCallback needs algorithm=…; pass algorithm=agent to on_training_start and on_step, or use "
                'EvalCallback(every_steps=1000, policy=policy, env_id="CartPole-v1")'
            )
        else:
            points = [c.horizon_start + round(c.horizon_steps * (i + 1) / self.n_points) for i in range(self.n_points)]
            self._due = [point for point in points if point > c.steps]
        if c.steps == c.horizon_start:
            self.waited, self.stopped = 0, None
        else:
            # The training continues, perhaps exactly where it was stopped, or with other limits.
            evaluated_now = bool(self.evaluations) and self.evaluations[-1][0] == c.steps
            self.stopped = self._find_reason_to_stop() if evaluated_now else None
        self.close()
        # Decide how many processes this training may use for its evaluations, or when to decide that.
        self._most_workers, self._measuring = 0, False
        if self.workers > 0:
            if (obstacle := self.obstacle(algorithm)) is not None:
                raise ValueError(f"EvalCallback: workers must be 0 or -1 here, got {self.workers}: {obstacle}")
            self._most_workers = self.workers
            self._start_worker()  # it starts up while training begins
        elif self.workers < 0 and self._due and self.obstacle_for_auto(algorithm) is None:
            self._measuring, self._collected = True, (c.steps, 0.0)
            self._decide_at = c.steps + (self._due[0] - c.steps) // 4
        return self.stopped is None

    def on_step(self, *, step: int, algorithm=None, metrics: dict[str, float] | None = None, **info: Any) -> bool:
        algorithm = _algorithm(self, algorithm, step, **info)
        if self.every_steps is not None and not self._due:  # a loop of one's own may call `on_step` alone
            self._due = [self.every_steps]
        if self._measuring:
            self._start_process_if_slow(algorithm, step, metrics or {})
        if self._pending:
            self._process_results(algorithm)
        if self._due and step >= self._due[0]:
            every = [] if self.every_steps is None else [step + self.every_steps]
            due, self._due = self._due, every or [point for point in self._due if point > step]
            last = step >= algorithm.counters.end
            try:
                if self._most_workers and not (last or algorithm.callbacks.waiting()):
                    self._begin(algorithm, step)
                else:
                    self.evaluate(algorithm)
            except Exception:
                self._due = due  # a resumed training tries it again
                raise
            # At the end of training there is nothing left to stop.
            if not (last or self._pending):
                self.stopped = self._find_reason_to_stop()
        return self.stopped is None

    def on_collection_error(self, *, algorithm=None, **info: Any) -> None:
        # The first error is the one to report.
        with suppress(Exception):
            self._process_results(algorithm, wait=True)

    def on_training_error(self, *, algorithm=None, **info: Any) -> None:
        self.on_collection_error(algorithm=algorithm)
        self.close()

    def on_training_end(self, *, algorithm=None, **info: Any) -> None:
        algorithm = _algorithm(self, algorithm, **info)
        if algorithm.counters.steps >= algorithm.counters.end or isinstance(algorithm, _HandWritten):
            self.evaluate(algorithm)
        if self._pending:
            self._process_results(algorithm, wait=True)
        self.close()

    def close(self) -> None:
        """End the processes. Their unfinished evaluations are lost."""
        for process in self._processes:
            process.close()
        self._processes.clear()
        self._pending.clear()

    def obstacle(self, algorithm) -> str | None:
        """Return why this training cannot be evaluated in parallel; None if it can."""
        kind = type(algorithm)
        if isinstance(algorithm, _HandWritten):
            return "a hand-written loop passes no algorithm"
        if hasattr(algorithm, "scored"):
            return "a language model is scored by the process that trains it"
        if "evaluate" in vars(algorithm) or not kind.evaluate.__module__.startswith("rlox."):
            return f"{kind.__name__} has an evaluate of its own"
        if os.name == "nt":
            return "other processes need Linux or macOS"
        if self.stop_at is not None or self.patience is not None:
            return "training must wait for each evaluation if stop_at or patience is set"
        if acting := algorithm.callbacks.acting_on_evaluations():
            return f"{type(acting[0]).__name__} acts on each evaluation, so training must wait for it"
        if sum(isinstance(callback, EvalCallback) for callback in algorithm.callbacks.by_name().values()) > 1:
            return "there is another EvalCallback, and their results must come in order"
        if algorithm.device != "cpu":
            return f"the policy is on {algorithm.device}, and gives the same numbers only there"
        try:
            self._make_job(algorithm)
        except Exception as e:
            return f"cloudpickle must be able to send policy and environment to another process: {e}"
        return None

    def obstacle_for_auto(self, algorithm) -> str | None:
        """Return why workers=-1 starts no process; None if it starts processes when evaluations take long."""
        if isinstance(algorithm, _HandWritten) or self.workers == 0:
            return "as requested"
        options = getattr(algorithm, "env_options", None)  # a language model has no environment
        if options is not None and is_vectorised(algorithm.env_id) and not (options.eval_kwargs or options.wrappers):
            return "native environments are evaluated within milliseconds"
        if self._free_cores(algorithm) < 1:
            return f"training uses all {cores()} cores"
        if getattr(algorithm, "_own_policy", False):
            return "the policy is a custom module, which may keep state"
        return self.obstacle(algorithm)

    def planned_workers(self, algorithm, seconds: float) -> int:
        """Return how many processes may be started if the remaining evaluations take `seconds` in total."""
        if self.workers > 0:
            return self.workers
        if seconds < _WORTH_S or self.obstacle_for_auto(algorithm) is not None:
            return 0
        return min(_MOST_WORKERS, self._free_cores(algorithm))

    @staticmethod
    def _free_cores(algorithm) -> int:
        """Return the number of cores that training leaves free."""
        torch = sys.modules.get("torch")
        used = [algorithm._threads or (torch.get_num_threads() if torch else 1)]
        if (options := getattr(algorithm, "env_options", None)) is not None:  # a language model has no environment
            used.append(options.workers)
            if options.backend == "envpool":
                used.append(options.kwargs.get("num_threads") or algorithm.n_envs)
        return cores() - max(used)

    def _start_process_if_slow(self, algorithm, step: int, metrics: dict[str, float]) -> None:
        """Start a process as soon as the remaining evaluations are known to take long enough."""
        begun, seconds = self._collected
        self._collected = begun, seconds + metrics.get("time/collect_s", 0.0)
        if step < self._decide_at:
            return
        left = len(self._due) if self.every_steps is None else 2
        self._decide_at = self._due[0] if self._due else sys.maxsize
        self._most_workers = self.planned_workers(algorithm, left * self._estimate_seconds(algorithm, step))
        if self._most_workers:
            self._measuring = False
            self._start_worker()

    def _estimate_seconds(self, algorithm, step: int) -> float:
        """Estimate the seconds of one evaluation, from the last one in this process or from the training's speed."""
        if self._took_s is not None:
            return self._took_s
        begun, seconds = self._collected
        each, length = _USUAL_STEP_S, algorithm.counters.mean_length
        if algorithm.counters.clock == "env_steps" and step > begun:
            each = seconds / (step - begun) * max(1, algorithm.env_options.workers)
        return self.n_episodes * (_USUAL_LENGTH if math.isnan(length) else length) * each

    def _start_worker(self) -> EvaluationWorker:
        self._processes.append(EvaluationWorker())
        return self._processes[-1]

    def _make_job(self, algorithm) -> bytes:
        arguments = algorithm._evaluation_arguments(self.n_episodes, self.seed)
        return make_job({**arguments, "max_steps": self.max_steps}, algorithm._threads, self.imports)

    def _begin(self, algorithm, step: int) -> None:
        """Start the evaluation of the current policy in a process."""
        job = self._make_job(algorithm)
        while len(self._pending) >= self._most_workers > 0:
            self._process_results(algorithm, wait=True, leave=self._most_workers - 1)
        if not self._most_workers:  # a process has died in the meantime
            self.evaluate(algorithm)
            return
        worker = next((process for process in self._processes if not process.busy), None) or self._start_worker()
        worker.begin(job)
        self._pending.append(_Pending(step, job, worker))
        algorithm.callbacks.on_evaluation_start(step=step, algorithm=algorithm)

    def _process_results(self, algorithm, wait: bool = False, leave: int = 0) -> None:
        """Process available results in the order of steps; with `wait`, until at most `leave` are pending."""
        while self._pending:
            pending = self._pending[0]
            try:
                if not pending.worker.ready(wait and len(self._pending) > leave):
                    return
                evaluation, seconds = pending.worker.result()
            except ChildDied as e:
                self._most_workers = 0
                self._processes.remove(pending.worker)
                warnings.warn(
                    f"EvalCallback: {e} in the evaluation at {pending.step:,}; evaluations continue in this process",
                    RuntimeWarning,
                    2,
                )
                evaluation = play(pending.job)
            except BaseException:
                self.close()
                raise
            else:
                self.beside_s += seconds
                if evaluation.n_cut:
                    bounded = self.max_steps is None and algorithm.counters.clock == "env_steps"
                    warn_of_cut(algorithm.env_id, int(evaluation.lengths.max()), bounded)
            self._pending.popleft()
            self._report(algorithm, pending.step, evaluation)

    def evaluate(self, algorithm) -> None:
        """Evaluate now, unless the last evaluation was at this step."""
        step = algorithm.counters.steps
        if self._pending and self._pending[-1].step == step:
            self._process_results(algorithm, wait=True)
        if self.evaluations and self.evaluations[-1][0] == step:
            return
        started = time.perf_counter()
        options = {} if self.max_steps is None else {"max_steps": self.max_steps}
        acts = isinstance(algorithm, _HandWritten) or hasattr(algorithm, "env_options")
        evaluate = algorithm.evaluate if acts else algorithm.scored  # language models have no episodes
        evaluation = evaluate(self.n_episodes, self.seed, **options)
        self._took_s = time.perf_counter() - started
        if self._pending:  # they ran in the meantime, and are delivered first
            self._process_results(algorithm, wait=True)
        self._report(algorithm, step, evaluation)

    def _report(self, algorithm, step: int, evaluation: Evaluation) -> None:
        self.evaluations.append((step, evaluation))
        mean = evaluation.summary()["mean_return"]
        self.waited = 0 if mean > self.best else self.waited + 1
        self.best = max(self.best, mean)
        algorithm.callbacks.on_evaluation(step=step, evaluation=evaluation, algorithm=algorithm)

    def _find_reason_to_stop(self) -> str | None:
        mean = self.evaluations[-1][1].summary()["mean_return"]
        if self.stop_at is not None and mean >= self.stop_at:
            return f"the evaluation's mean return {mean:.1f} reached stop_at={self.stop_at:g}"
        if self.patience is not None and self.waited >= self.patience:
            return f"{self.waited} evaluations in a row were no better than {self.best:.1f} (patience={self.patience})"
        return None
