"""Draw the predictions of a world model during training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlox.callbacks.base import Callback
from rlox.callbacks.evaluation import step_limit, warn_without_evaluations
from rlox.evaluation.pictures import save_in
from rlox.evaluation.predictions import EpisodesTooShort, open_loop


class PredictionsCallback(Callback):
    """Lets the model predict parts of new episodes at each evaluation, draws them, and logs the error.

    The episodes are separate from the evaluation, but use its seed, and the `max_steps` of the algorithm's
    `EvalCallback`. Each time, the picture is replaced: ``predictions.gif`` for images, ``predictions.png`` for vectors.

    Parameters
    ----------
    folder : path
        Folder of the picture.
    log : callable, optional
        Called as ``log(step, metrics)`` with ``model/open_loop_mse``, and so on for each name of
        `rlox.evaluation.predictions.Predictions.summary`.
    written : callable, optional
        Called as ``written(step, file)`` after the picture was replaced.
    n_episodes : int
        Number of episodes at each evaluation.
    """

    section = "log"
    acts_on_evaluation = False

    def __init__(
        self,
        folder: str | Path,
        log: Callable[[int, dict[str, float]], None] | None = None,
        written: Callable[[int, str], None] | None = None,
        n_episodes: int = 4,
    ) -> None:
        self.folder, self.n_episodes = Path(folder), n_episodes
        self._log, self._written = log, written
        self._drawn = -1  # the step of the last picture
        self._warned = False

    def on_training_start(self, *, algorithm: Any = None, **info: Any) -> None:
        warn_without_evaluations(self, algorithm)

    def on_evaluation(self, *, step: int, evaluation: Any, algorithm: Any, **info: Any) -> None:
        # The result of a parallel evaluation arrives after its step, so the model is newer than that step.
        step = max(step, algorithm.counters.steps)
        if step == self._drawn:
            return
        self._drawn = step
        try:
            limit = step_limit(algorithm)
            seed, deterministic = evaluation.seed, evaluation.deterministic
            prediction = open_loop(algorithm, self.n_episodes, seed, deterministic, max_steps=limit)
        except EpisodesTooShort as e:
            if not self._warned:
                warnings.warn(f"no predictions are drawn: {e}", RuntimeWarning, stacklevel=2)
            self._warned = True
            return
        if self._log is not None:
            self._log(step, {f"model/{name}": value for name, value in prediction.summary().items()})
        file = save_in(prediction, self.folder)
        if self._written is not None:
            self._written(step, file)
