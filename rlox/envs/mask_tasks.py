"""Small environments whose legal actions change, with known best returns with and without masks.

They are registered as ``rlox/MaskedBandit-v0``, ``rlox/MaskedTMaze-v0`` and ``rlox/InvalidActions-v0``.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlox.envs.memory_tasks import TMaze

_ARMS = np.array([0.0, 0.5, 1.0])  # rewards of the bandit's arms


class MaskedBandit(gymnasium.Env):
    """A bandit whose best arm is illegal in a random half of the steps.

    Of three arms with rewards 0, 0.5 and 1, the last is legal with probability 1/2 in each step, which only
    ``info["action_mask"]``, (3,) bool, shows; the observation (1,) is always 1. An illegal arm gives -1. An episode
    has `length` steps and then terminates.

    A policy that respects the mask reaches 0.75 per step (7.5 per episode of 10 steps), any other at most 0.5.

    Parameters
    ----------
    length : int
        Steps of an episode.

    Raises
    ------
    ValueError
        If `length` < 1.
    """

    def __init__(self, length: int = 10):
        _require(length >= 1, f"MaskedBandit: length must be >= 1, got {length}")
        self.length = length
        self.observation_space = spaces.Box(0, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(len(_ARMS))
        self._step = 0
        self._legal = True  # whether the last arm is

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self._step = 0
        return self._show()

    def step(self, action: int):
        reward = float(_ARMS[action]) if self._legal or action < 2 else -1.0
        self._step += 1
        obs, info = self._show()
        return obs, reward, self._step == self.length, False, info

    def _show(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        self._legal = bool(self.np_random.integers(2))
        return np.ones(1, np.float32), {"action_mask": np.array([True, True, self._legal])}

    def get_state(self) -> list[Any]:
        """Return the step of the episode, and whether the last arm is legal."""
        return [self._step, self._legal]

    def set_state(self, state: list[Any]) -> None:
        """Continue from the result of `get_state`; raise a ValueError for any other state."""
        step, legal = state
        _require(
            type(step) is int and 0 <= step < self.length and type(legal) is bool,
            f"MaskedBandit.set_state: state must be a step below {self.length} and a flag, got {state}",
        )
        self._step, self._legal = step, legal


class MaskedTMaze(TMaze):
    """A T-maze with two doors on each side, of which one is locked.

    As in `TMaze`, only the first observation shows the side of the goal, and the agent reaches the junction after
    `length` steps. Doors 0 and 1 lead to the left and doors 2 and 3 to the right. At the junction one random door of
    each side is open, which only ``info["action_mask"]``, (4,) bool, shows; in the corridor every action is legal and
    does nothing. The reward of the last step is 1 for an open door on the side of the goal, and -1 for any other door.

    With memory and mask a policy reaches 1. With one of them, it reaches 0 on average, and with none -0.5.
    """

    _n_actions = 4

    def __init__(self, length: int = 10):
        super().__init__(length)
        self._open = np.ones(4, np.bool_)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        obs, _ = super().reset(seed=seed)
        self._open = np.ones(4, np.bool_)
        return obs, {"action_mask": self._open.copy()}

    def step(self, action: int):
        obs, reward, terminated, truncated, _ = super().step(action)
        if self._place == self.length:
            doors = np.array([0, 2]) + self.np_random.integers(2, size=2)
            self._open = np.isin(np.arange(4), doors)
        return obs, reward, terminated, truncated, {"action_mask": self._open.copy()}

    def _reaches(self, action: int) -> bool:
        return (action >= 2) == (self._goal == 1) and bool(self._open[action])

    def get_state(self) -> list[Any]:
        """Return the place, the goal and the legal actions."""
        return [*super().get_state(), self._open.copy()]

    def set_state(self, state: list[Any]) -> None:
        """Continue from the result of `get_state`; raise a ValueError for any other state."""
        *place, legal = state
        legal = np.asarray(legal)
        _require(
            legal.shape == (4,) and legal.dtype == np.bool_ and bool(legal.any()),
            f"MaskedTMaze.set_state: state must end with the 4 flags of the doors, got {state}",
        )
        super().set_state(place)
        self._open = legal.copy()


class InvalidActions(gymnasium.Env):
    """The right action is the number that the observation shows, and most others are illegal.

    The observation and the action are numbers below `dim`. In each step the reward is 1 if they are equal and 0
    otherwise, and the next observation is random. `n_invalid` random actions are illegal, never the right one;
    ``action_masks()`` shows which. An illegal action gives no reward, like any wrong one. An episode is truncated after
    `length` steps, so the best return is `length`.

    This is the environment ``InvalidActionEnvDiscrete`` with which sb3-contrib tests its MaskablePPO, written anew.

    Parameters
    ----------
    dim : int
        Number of observations and of actions.
    n_invalid : int
        Number of illegal actions in each step, below `dim`.
    length : int
        Steps of an episode.

    Raises
    ------
    ValueError
        If one of them is out of range.
    """

    def __init__(self, dim: int = 80, n_invalid: int = 60, length: int = 100):
        _require(dim >= 1, f"InvalidActions: dim must be >= 1, got {dim}")
        _require(0 <= n_invalid < dim, f"InvalidActions: n_invalid must lie in [0, {dim - 1}], got {n_invalid}")
        _require(length >= 1, f"InvalidActions: length must be >= 1, got {length}")
        self.dim, self.n_invalid, self.length = dim, n_invalid, length
        self.observation_space, self.action_space = spaces.Discrete(dim), spaces.Discrete(dim)
        self._step = self._right = 0
        self._legal = np.ones(dim, np.bool_)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self._step = 0
        self._draw()
        return self._right, {}

    def step(self, action: int):
        reward = float(action == self._right)
        self._step += 1
        self._draw()
        return self._right, reward, False, self._step >= self.length, {}

    def _draw(self) -> None:
        self._right = int(self.np_random.integers(self.dim))
        # Numbers below dim - 1, of which those from the right action on stand for the next one.
        invalid = self.np_random.choice(self.dim - 1, self.n_invalid, replace=False)
        self._legal = np.ones(self.dim, np.bool_)
        self._legal[invalid + (invalid >= self._right)] = False

    def action_masks(self) -> np.ndarray:
        """Return the legal actions, (dim,) bool."""
        return self._legal.copy()

    def get_state(self) -> list[Any]:
        """Return the step of the episode, the right action and the legal ones."""
        return [self._step, self._right, self._legal.copy()]

    def set_state(self, state: list[Any]) -> None:
        """Continue from the result of `get_state`; raise a ValueError for any other state."""
        step, right, legal = state
        legal = np.asarray(legal)
        sound = type(step) is int and 0 <= step < self.length and type(right) is int and 0 <= right < self.dim
        _require(
            sound and legal.shape == (self.dim,) and legal.dtype == np.bool_ and bool(legal[right]),
            f"InvalidActions.set_state: state must be a step, an action and {self.dim} flags that allow it, got "
            f"{state}",
        )
        self._step, self._right, self._legal = step, right, legal.copy()


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
