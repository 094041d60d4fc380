"""Agents that carry a state from step to step."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from rlox.kernels.rng import Rng


@runtime_checkable
class RecurrentActor(Protocol):
    """Interface of an agent for N environments with a state of S numbers for each. A: size of a model's action."""

    def initial(self, n: int) -> np.ndarray:
        """Return the states (n, S) f32 before an episode."""

    def act(
        self, carry: np.ndarray, obs: np.ndarray, is_first: np.ndarray, rng: Rng | None, deterministic: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the environments' actions (n, …), these as model inputs (n, A) f32, and the next states (n, S).

        Where `is_first` (n,), `carry` (n, S) is treated as the state before an episode. `rng` is the generator of the
        actions, unless `deterministic`, and of the samples in the model's state. If it is None, both are the most
        likely values.
        """


class Remembering:
    """An agent in `n` environments, with its states; call it with observations (n, …), then call `end`."""

    def __init__(self, actor: RecurrentActor, n: int, rng: Rng, deterministic: bool):
        self._actor, self._rng, self._deterministic = actor, rng, deterministic
        self._carry, self._first = actor.initial(n), np.ones(n, np.bool_)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        actions, _, self._carry = self._actor.act(self._carry, obs, self._first, self._rng, self._deterministic)
        self._first = np.zeros(len(obs), np.bool_)
        return actions

    def end(self, ended: np.ndarray) -> None:
        """Reset the states of environments whose episodes `ended`, (n,) bool."""
        self._first = ended.copy()


class FirstStep:
    """Counterpart of `acting.ModuleActor` for an agent that treats every observation as the first of an episode."""

    def __init__(self, actor: RecurrentActor):
        self._actor = actor

    def mode(self, obs: np.ndarray) -> np.ndarray:
        """Return the most likely actions."""
        return self._act(obs, None)

    def sample(self, obs: np.ndarray, rng: Rng | None = None) -> np.ndarray:
        """Sample actions, with PyTorch's generator if `rng` is None."""
        if rng is None:
            from rlox.nn.networks import rng_from_torch

            rng = rng_from_torch()
        return self._act(obs, rng)

    def _act(self, obs: np.ndarray, rng: Rng | None) -> np.ndarray:
        n = len(obs)
        return self._actor.act(self._actor.initial(n), obs, np.ones(n, np.bool_), rng, rng is None)[0]
