"""Open-loop predictions of a world model, compared with the truth.

An agent runs episodes. For stretches of these episodes, its model gets the state before the stretch and the first few
observations, then only the actions, and predicts the remaining observations.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.config import integer
from rlox.evaluation.episodes import evaluate
from rlox.kernels.rng import Rng
from rlox.nn.acting import ActingPolicy, Inputs

CONTEXT, HORIZON = 5, 15  # steps, as in the paper's figures
_MOST_STEPS = 1000  # maximum length of an episode that is run for predictions
_TALL = 96  # minimum height of an image in a film, in pixels
_MARGIN = 4  # pixels between two images


class EpisodesTooShort(ValueError):
    """Raised when all episodes are too short for a prediction."""


@dataclass(frozen=True)
class Predictions:
    """Observations of B stretches of C + H steps, and a model's predictions of the last H.

    All values are in the environment's units; pixels of images are bytes.
    """

    truth: np.ndarray  # (B, C + H, …) f32
    predicted: np.ndarray  # (B, H, …) f32, of the last H steps
    n_stacked: int = 1  # frames in an image
    images: tuple[tuple[int, int, int, int], ...] = ()  # images within a vector, see `rlox.envs.EnvSpec`

    @property
    def context(self) -> int:
        """C, the number of steps that the model saw."""
        return self.truth.shape[1] - self.predicted.shape[1]

    @property
    def horizon(self) -> int:
        """H, the number of steps that it predicted."""
        return self.predicted.shape[1]

    @property
    def image(self) -> bool:
        """Whether observations are or contain images; a film shows the first image."""
        return self.truth.ndim == 5 or bool(self.images)

    def errors(self) -> np.ndarray:
        """Return the mean squared error of each predicted step, (H,) f64, over stretches and observed numbers."""
        squares = np.square(self.predicted.astype(np.float64) - self.truth[:, self.context :])
        return squares.reshape(len(squares), self.horizon, -1).mean((0, 2))

    def variance(self) -> float:
        """Return the variance of observations over stretches and steps, averaged over the numbers of an observation."""
        return float(self.truth.astype(np.float64).var((0, 1)).mean())

    def summary(self) -> dict[str, float]:
        """Return the errors as metrics.

        ``open_loop_mse`` is the mean over the horizon, ``open_loop_share`` the same divided by the variance of the
        observations, and ``open_loop_last_share`` that ratio for the last step.
        """
        errors, variance = self.errors(), self.variance()
        scale = variance if variance > 0 else np.nan
        return {
            "open_loop_mse": float(errors.mean()),
            "open_loop_share": float(errors.mean() / scale),
            "open_loop_last_share": float(errors[-1] / scale),
        }

    def frames(self, n: int = 4) -> Iterator[np.ndarray]:
        """Yield pictures (h, w, 3) uint8 of a film of the first `n` stretches of images, one below the other.

        The columns are truth, prediction and error. During the context, the column of predictions shows the truth with
        a green edge; afterwards its edge is red.
        """
        if not self.image:
            raise ValueError("Predictions.frames: observations must be images, got vectors; draw them as a plot")
        truth = self._colour_images(self.truth[:n])
        predicted = np.concatenate([truth[:, : self.context], self._colour_images(self.predicted[:n])], 1)
        error = np.abs(predicted - truth)
        for t in range(truth.shape[1]):
            edge = (46, 160, 67) if t < self.context else (207, 34, 46)
            rows = [np.hstack([_draw_frame(truth[b, t], (128, 128, 128)), _draw_frame(predicted[b, t], edge),
                               _draw_frame(error[b, t], (128, 128, 128))]) for b in range(len(truth))]  # fmt: skip
            yield np.vstack(rows)

    def _colour_images(self, images: np.ndarray) -> np.ndarray:
        """Convert images (B, T, C, H, W) to pictures (B, T, h, w, 3) f32 in [0, 255].

        They show the last frame of a stack, enlarged by a whole number.
        """
        if self.images:
            start, *shape = self.images[0]
            images = images[..., start : start + math.prod(shape)].reshape(*images.shape[:2], *shape)
        channels = images.shape[2] // self.n_stacked
        newest = images[:, :, -channels:]
        newest = newest if channels == 3 else np.repeat(newest[:, :, :1], 3, 2)
        times = -(-_TALL // images.shape[3])
        large = newest.repeat(times, 3).repeat(times, 4)
        return np.clip(np.moveaxis(large, 2, -1), 0, 255).astype(np.float32)


def _draw_frame(image: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Return an image (h, w, 3) with an edge of this colour, and a margin around it, as bytes."""
    h, w, _ = image.shape
    frame = np.full((h + 4 * _MARGIN, w + 4 * _MARGIN, 3), 255, np.uint8)
    frame[_MARGIN:-_MARGIN, _MARGIN:-_MARGIN] = colour
    frame[2 * _MARGIN : -2 * _MARGIN, 2 * _MARGIN : -2 * _MARGIN] = np.rint(image).astype(np.uint8)
    return frame


class Recording(ActingPolicy):
    """An agent that records its observations and actions."""

    def __init__(self, actor: ActingPolicy, model_width: int):
        self._actor, self._model_width = actor, model_width
        self.state_dim, self.n_state_noise = actor.state_dim, actor.n_state_noise
        # For each step the agent's states, observations, actions, and whether an episode starts.
        self.steps: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def initial(self, n: int) -> np.ndarray:
        return self._actor.initial(n)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return self._actor.noise_shape(n)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        self._actor.fill_noise(rng, out)

    def act(self, inputs: Inputs, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._record(inputs, *self._actor.act(inputs, noise))

    def mode(self, inputs: Inputs, noise: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        return self._record(inputs, *self._actor.mode(inputs, noise))

    def _record(self, inputs: Inputs, actions: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        before = np.where(inputs.is_first[:, None], np.float32(0), inputs.state)
        taken = state[:, -self._model_width :]
        self.steps.append((before, inputs.obs.copy(), taken.copy(), inputs.is_first.copy()))
        return actions, state

    def episodes(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the states (L, S) before, observations (L, …) and actions (L, A) of each step, for every episode.

        The episodes of one environment are followed by those of the next.
        """
        carry, obs, actions, first = (np.stack(column, 1) for column in zip(*self.steps, strict=True))
        for e in range(len(obs)):
            starts = [*np.flatnonzero(first[e]), obs.shape[1]]
            for start, end in pairwise(starts):
                yield carry[e, start:end], obs[e, start:end], actions[e, start:end]


def open_loop(
    algorithm: Any,
    n_episodes: int = 8,
    seed: int | None = None,
    deterministic: bool = True,
    context: int = CONTEXT,  # steps that the model sees
    horizon: int = HORIZON,  # steps that it then predicts
    n_stretches: int = 64,  # at most, spread over the episodes
    max_steps: int | None = None,
) -> Predictions:
    """Run episodes of at most 1,000 steps in a new environment, and let the model predict stretches of them.

    The algorithm's ``actor`` must have ``open_loop(carry, obs, actions, context, rng)``, like that of DreamerV3. If no
    episode has ``context + horizon`` steps, the horizon is shortened to fit the longest; `EpisodesTooShort` is raised
    if every episode ends within `context` steps.
    """
    where = "open_loop"
    context = integer(where, "context", context, 1)
    horizon = integer(where, "horizon", horizon, 1)
    n_stretches = integer(where, "n_stretches", n_stretches, 1)
    actor = algorithm.actor
    if not hasattr(actor, "open_loop"):
        raise ValueError(
            f"{where}: the algorithm must have a model of the world, got {algorithm.name}; DreamerV3 has one"
        )
    recording = Recording(actor, algorithm.spec.model_width)
    arguments = {**algorithm._evaluation_arguments(n_episodes, seed, deterministic), "policy": recording}
    with warnings.catch_warnings():
        # Episodes are cut here on purpose.
        warnings.filterwarnings("ignore", "evaluate: an episode of", RuntimeWarning)
        evaluate(**arguments, max_steps=min(max_steps or _MOST_STEPS, _MOST_STEPS))
    # All environments run until the last episode ends; the additional steps are used as well.
    episodes = list(recording.episodes())
    longest = max(len(obs) for _, obs, _ in episodes)
    if longest <= context:
        raise EpisodesTooShort(
            f"{where}: context must be less than the {longest} steps of the longest episode, got {context}; lower it"
        )
    length = min(context + horizon, longest)
    stretches = [
        (carry[start], obs[start : start + length], actions[start : start + length])
        for carry, obs, actions in episodes
        for start in range(0, len(obs) - length + 1, length)
    ]
    chosen = np.linspace(0, len(stretches) - 1, min(n_stretches, len(stretches))).round().astype(int)
    carry, obs, actions = (np.stack([stretches[i][column] for i in chosen]) for column in range(3))
    predicted = actor.open_loop(carry, obs, actions, context, Rng(arguments["seed"], Stream.PREDICTIONS))
    return Predictions(obs.astype(np.float32), predicted, algorithm.spec.n_stacked, algorithm.spec.images)
