"""Record videos while training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlox.callbacks.base import Callback, _count
from rlox.callbacks.evaluation import step_limit, warn_without_evaluations
from rlox.evaluation.video import VideoWriter, render_fps


class VideoCallback(Callback):
    """Record a video of an episode at evaluations, as ``<folder>/step-000012800.mp4``.

    The episode is separate from the evaluation, but uses its seed (for native ids, in gymnasium's environment, which
    can render); neither the evaluation nor the training changes. Needs the extra ``video``
    (``pip install "rlox-cli[video]"``).

    Parameters
    ----------
    folder : path
        Folder of the videos.
    every_evaluations : int
        Number of evaluations per video, starting with the first evaluation.
    kind : str
        ``mp4`` or ``gif``.
    fps : int, optional
        Frames per second of the video; by default the environment's.

    Raises
    ------
    ImportError
        On construction, if the package that writes videos is not installed.
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
        # Raise now for an unknown kind or a missing package, not hours later.
        VideoWriter(self.folder / f"step.{kind}", fps or 30)

    def state(self) -> dict[str, Any]:
        return {"evaluations": self._evaluations}

    def set_state(self, state: dict[str, Any]) -> None:
        self._evaluations = _count(state["evaluations"])

    def on_training_start(self, *, algorithm: Any = None, **info: Any) -> None:
        warn_without_evaluations(self, algorithm)

    def on_evaluation(self, *, step: int, evaluation, algorithm, **info: Any) -> None:
        due = self._evaluations % self.every_evaluations == 0
        self._evaluations += 1
        if due:
            path = self.folder / f"step-{step:09d}.{self.kind}"
            limit = step_limit(algorithm)
            options = {} if limit is None else {"max_steps": limit}
            with VideoWriter(path, self.fps or render_fps(algorithm.env_id)) as video:
                algorithm.evaluate(1, evaluation.seed, evaluation.deterministic, frames=video.add, **options)
            self.paths.append(path)
