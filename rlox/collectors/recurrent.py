"""Agents that carry a state of their own from step to step."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from rlox.kernels.rng import Rng


@runtime_checkable
class RecurrentActor(Protocol):
    """What acts in N environments, and has a state of S numbers for each. Letters: A numbers of a model's action."""

    def initial(self, n: int) -> np.ndarray:
        """The states (n, S) f32 before an episode."""

    def act(
        self, carry: np.ndarray, obs: np.ndarray, is_first: np.ndarray, rng: Rng | None, deterministic: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Actions for the environments (n, …), the same as a model sees them (n, A) f32, and the next states (n, S).

        `carry` (n, S) counts as before an episode where `is_first` (n,). `rng` decides what is drawn: the action,
        unless `deterministic`, and what the model draws for its state. Without it, both are the most likely ones.
        """


class Remembering:
    """Acts in `n` environments and keeps the agent's states; call it with observations (n, …), then `end`."""

    def __init__(self, actor: RecurrentActor, n: int, rng: Rng, deterministic: bool):
        self._actor, self._rng, self._deterministic = actor, rng, deterministic
        self._carry, self._first = actor.initial(n), np.ones(n, np.bool_)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        actions, _, self._carry = self._actor.act(self._carry, obs, self._first, self._rng, self._deterministic)
        self._first = np.zeros(len(obs), np.bool_)
        return actions

    def end(self, ended: np.ndarray) -> None:
        """These environments' episodes have `ended`, (n,) bool."""
        self._first = ended.copy()


class FirstStep:
    """What `rlox.collectors.acting.ModuleActor` does, by an agent to which every observation is an episode's first."""

    def __init__(self, actor: RecurrentActor):
        self._actor = actor

    def mode(self, obs: np.ndarray) -> np.ndarray:
        """The most likely actions."""
        return self._act(obs, None)

    def sample(self, obs: np.ndarray, rng: Rng | None = None) -> np.ndarray:
        """Sampled actions; without `rng`, PyTorch's generator decides them."""
        if rng is None:
            from rlox.nn.networks import rng_from_torch

            rng = rng_from_torch()
        return self._act(obs, rng)

    def _act(self, obs: np.ndarray, rng: Rng | None) -> np.ndarray:
        n = len(obs)
        return self._actor.act(self._actor.initial(n), obs, np.ones(n, np.bool_), rng, rng is None)[0]
