"""How well a world model foresees what happens: open-loop predictions beside the truth.

An agent plays episodes. Of stretches of these its model sees what came before and the first few observations, then only
the actions, and predicts the observations to come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.collectors.evaluation import evaluate
from rlox.collectors.recurrent import RecurrentActor
from rlox.config import integer
from rlox.kernels.rng import Rng

CONTEXT, HORIZON = 5, 15  # steps, as in the paper's figures
_MOST_STEPS = 1000  # of an episode that is played for predictions
_TALL = 96  # pixels that an image of a film has at least
_MARGIN = 4  # pixels between two images


class EpisodesTooShort(ValueError):
    """There is nothing to predict."""


@dataclass(frozen=True)
class Predictions:
    """B stretches of C + H steps: what was observed, and what the model made of the first C. In the environment's
    units, bytes of images too."""

    truth: np.ndarray  # (B, C + H, …) f32
    predicted: np.ndarray  # (B, H, …) f32, of the last H steps
    n_stacked: int = 1  # frames in an image
    images: tuple[tuple[int, int, int, int], ...] = ()  # within a vector, see `rlox.envs.EnvSpec`

    @property
    def context(self) -> int:
        """C, the steps that the model saw."""
        return self.truth.shape[1] - self.predicted.shape[1]

    @property
    def horizon(self) -> int:
        """H, the steps that it predicted."""
        return self.predicted.shape[1]

    @property
    def image(self) -> bool:
        """Whether observations are images, or hold some: a film shows the first."""
        return self.truth.ndim == 5 or bool(self.images)

    def errors(self) -> np.ndarray:
        """Mean squared error of each step of the horizon, (H,) f64, over stretches and numbers of an observation."""
        squares = np.square(self.predicted.astype(np.float64) - self.truth[:, self.context :])
        return squares.reshape(len(squares), self.horizon, -1).mean((0, 2))

    def variance(self) -> float:
        """Variance of the observations over stretches and steps, its mean over the numbers of an observation."""
        return float(self.truth.astype(np.float64).var((0, 1)).mean())

    def summary(self) -> dict[str, float]:
        """``open_loop_mse`` over the horizon, ``open_loop_share`` of the observations' variance that it is, and
        ``open_loop_last_share``, that of the last step's."""
        errors, variance = self.errors(), self.variance()
        scale = variance if variance > 0 else np.nan
        return {
            "open_loop_mse": float(errors.mean()),
            "open_loop_share": float(errors.mean() / scale),
            "open_loop_last_share": float(errors[-1] / scale),
        }

    def frames(self, n: int = 4) -> Iterator[np.ndarray]:
        """Pictures (h, w, 3) uint8 of a film of the first `n` stretches, one below the other: truth, prediction, error.

        While the model still sees, its column shows the truth, with a green edge; then its edge is red.

        Raises
        ------
        ValueError
            If observations are no images.
        """
        if not self.image:
            raise ValueError("Predictions.frames: observations must be images, got vectors; draw them as a plot")
        truth = self._coloured(self.truth[:n])
        predicted = np.concatenate([truth[:, : self.context], self._coloured(self.predicted[:n])], 1)
        error = np.abs(predicted - truth)
        for t in range(truth.shape[1]):
            edge = (46, 160, 67) if t < self.context else (207, 34, 46)
            rows = [np.hstack([_framed(truth[b, t], (128, 128, 128)), _framed(predicted[b, t], edge),
                               _framed(error[b, t], (128, 128, 128))]) for b in range(len(truth))]  # fmt: skip
            yield np.vstack(rows)

    def _coloured(self, images: np.ndarray) -> np.ndarray:
        """(B, T, C, H, W) -> (B, T, h, w, 3) f32 in [0, 255]: the last frame of a stack, enlarged by whole numbers."""
        if self.images:
            start, *shape = self.images[0]
            images = images[..., start : start + math.prod(shape)].reshape(*images.shape[:2], *shape)
        channels = images.shape[2] // self.n_stacked
        newest = images[:, :, -channels:]
        newest = newest if channels == 3 else np.repeat(newest[:, :, :1], 3, 2)
        times = -(-_TALL // images.shape[3])
        large = newest.repeat(times, 3).repeat(times, 4)
        return np.clip(np.moveaxis(large, 2, -1), 0, 255).astype(np.float32)


def _framed(image: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """An image (h, w, 3) with an edge of this colour, and a margin around it, as bytes."""
    h, w, _ = image.shape
    found = np.full((h + 4 * _MARGIN, w + 4 * _MARGIN, 3), 255, np.uint8)
    found[_MARGIN:-_MARGIN, _MARGIN:-_MARGIN] = colour
    found[2 * _MARGIN : -2 * _MARGIN, 2 * _MARGIN : -2 * _MARGIN] = np.rint(image).astype(np.uint8)
    return found


class Recording:
    """An agent that keeps what it sees and does."""

    def __init__(self, actor: RecurrentActor):
        self._actor = actor
        # The agent's states, observations, actions, and whether an episode starts.
        self.steps: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def initial(self, n: int) -> np.ndarray:
        return self._actor.initial(n)

    def act(
        self, carry: np.ndarray, obs: np.ndarray, is_first: np.ndarray, rng: Rng | None, deterministic: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        before = np.where(is_first[:, None], np.float32(0), carry)
        actions, taken, carry = self._actor.act(carry, obs, is_first, rng, deterministic)
        self.steps.append((before, obs.copy(), taken.copy(), is_first.copy()))
        return actions, taken, carry

    def episodes(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The agent's states (L, S) before, the observations (L, …) and the actions (L, A) of each step of an episode;
        the episodes of one environment after those of the other."""
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
    context: int = CONTEXT,
    horizon: int = HORIZON,
    n_stretches: int = 64,
    max_steps: int | None = None,
) -> Predictions:
    """Play episodes on a fresh environment, and have the model predict stretches of them.

    Where no episode has ``context + horizon`` steps the horizon is what the longest leaves.

    Parameters
    ----------
    algorithm : Algorithm
        Its ``actor`` has ``open_loop(carry, obs, actions, context, rng)``, as DreamerV3's.
    n_episodes, seed, deterministic, max_steps
        As `rlox.training.Algorithm.evaluate` takes them; an episode has at most 1,000 steps here.
    context, horizon : int
        Steps that the model sees, and that it then predicts.
    n_stretches : int
        At most so many stretches, spread over the episodes.

    Raises
    ------
    ValueError
        If the algorithm has no model of the world.
    EpisodesTooShort
        If every episode is over within `context` steps.
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
    recording = Recording(actor)
    arguments = {**algorithm.evaluation_arguments(n_episodes, seed, deterministic), "policy": recording}
    evaluate(**arguments, max_steps=min(max_steps or _MOST_STEPS, _MOST_STEPS))
    # Environments play on until the last episode is over; what is beyond is as good as the rest.
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
