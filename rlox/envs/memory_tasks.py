"""Small environments that need a world model or a memory: one with images, a T-maze, and three without velocities.

They are registered as ``rlox/DrawnCatch-v0``, ``rlox/TMaze-v0``, ``rlox/CartPoleHidden-v1``,
``rlox/PendulumHidden-v1`` and ``rlox/MountainCarContinuousHidden-v0``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv, Continuous_MountainCarEnv, PendulumEnv

_DIM, _BRIGHT = 120, 255  # grey of the paddle, and of the ball
# Side of a cell in pixels of the observation. Encoding a single pixel would cost the model more than it gains.
_CELL = 3
_PICTURE = 4  # side of an observation's pixel in a picture, in pixels


class DrawnCatch(gymnasium.Env):
    """A ball falls, and a paddle must be below it at the end.

    The observation is a grey image (3 `size`, 3 `size`, 1) of bytes, with 3 x 3 pixels for each cell of a grid: the
    ball is one bright cell, the paddle three dim cells in the lowest row. The ball starts anywhere in the highest row,
    falls one row per step and moves sideways by -1, 0 or 1 column, the same in all steps, except that it bounces off
    walls. A single image does not show its direction; two images do.

    Actions: 0 left, 1 stay, 2 right, by one column. An episode has ``size - 1`` steps; the last step gives a reward of
    1 if the ball is caught and of -1 if not, and terminates the episode; all other rewards are 0. Every ball can be
    caught.

    Parameters
    ----------
    size : int
        Number of rows and columns of the grid, 8 to 64.
    dense : bool
        Give a reward in every step, 1 while the paddle is below the ball and -1 otherwise, which is easier to learn.
    render_mode : str, optional
        ``rgb_array``: the enlarged observation.

    Raises
    ------
    ValueError
        If `size` is out of range.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (gymnasium's form)

    def __init__(self, size: int = 10, dense: bool = False, render_mode: str | None = None):
        if not 8 <= size <= 64:
            raise ValueError(f"DrawnCatch: size must lie in [8, 64], got {size}")
        self.size, self.dense, self.render_mode = size, dense, render_mode
        self.observation_space = spaces.Box(0, 255, (_CELL * size, _CELL * size, 1), np.uint8)
        self.action_space = spaces.Discrete(3)
        self._row = self._column = self._drift = self._paddle = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self._row, self._paddle = 0, self.size // 2
        self._column = int(self.np_random.integers(self.size))
        self._drift = int(self.np_random.integers(-1, 2))
        return self._observed(), {}

    def step(self, action: int):
        self._paddle = min(max(self._paddle + int(action) - 1, 1), self.size - 2)
        if not 0 <= self._column + self._drift < self.size:
            self._drift = -self._drift
        self._column += self._drift
        self._row += 1
        over = self._row == self.size - 1
        caught = abs(self._column - self._paddle) <= 1
        reward = (1.0 if caught else -1.0) if over or self.dense else 0.0
        return self._observed(), reward, over, False, {}

    def _observed(self) -> np.ndarray:
        cells = np.zeros((self.size, self.size, 1), np.uint8)
        cells[-1, self._paddle - 1 : self._paddle + 2] = _DIM
        cells[self._row, self._column] = _BRIGHT
        return cells.repeat(_CELL, 0).repeat(_CELL, 1)

    def render(self) -> np.ndarray:
        """Return the picture, (12 size, 12 size, 3) uint8."""
        return self._observed().repeat(_PICTURE, 0).repeat(_PICTURE, 1).repeat(3, 2)

    def get_state(self) -> np.ndarray:
        """Return row, column and drift of the ball, and the column of the paddle, (4,) int64."""
        return np.array([self._row, self._column, self._drift, self._paddle])

    def set_state(self, state: np.ndarray) -> None:
        """Continue from the result of `get_state`; raise a ValueError for any other state."""
        numbers = np.asarray(state)
        low, high = [0, 0, -1, 1], [self.size - 1, self.size - 1, 1, self.size - 2]
        if numbers.shape != (4,) or numbers.dtype.kind != "i" or (numbers < low).any() or (numbers > high).any():
            raise ValueError(f"DrawnCatch.set_state: state must lie within {low} and {high}, got {numbers.tolist()}")
        self._row, self._column, self._drift, self._paddle = map(int, numbers)


class TMaze(gymnasium.Env):
    """A corridor with a junction at its end, and a goal on the side that only the first observation shows.

    The observation (2,) is the side of the goal in the first step of an episode, -1 left and 1 right, and 0 in all
    others; and 1 at the junction, 0 before it. The agent walks through the corridor by itself and is at the junction
    after `length` steps; until then every action does nothing. There, action 0 turns left and 1 right, which terminates
    the episode with a reward of 1 on the side of the goal and of -1 on the other one. All other rewards are 0.

    A policy that remembers the first observation for `length` steps reaches 1; without a memory, the mean is 0.

    Parameters
    ----------
    length : int
        Steps from the first observation to the junction.

    Raises
    ------
    ValueError
        If `length` < 1.
    """

    _n_actions = 2

    def __init__(self, length: int = 10):
        if length < 1:
            raise ValueError(f"{type(self).__name__}: length must be >= 1, got {length}")
        self.length = length
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(self._n_actions)
        self._place, self._goal = 0, 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self._place, self._goal = 0, 2 * int(self.np_random.integers(2)) - 1
        return self._show(), {}

    def step(self, action: int):
        over = self._place == self.length
        reward = (1.0 if self._reaches(int(action)) else -1.0) if over else 0.0
        self._place += 1
        return self._show(), reward, over, False, {}

    def _reaches(self, action: int) -> bool:
        """Return whether an action at the junction leads to the goal."""
        return action == (self._goal + 1) // 2

    def _show(self) -> np.ndarray:
        return np.array([0 if self._place else self._goal, self._place == self.length], np.float32)

    def get_state(self) -> list[Any]:
        """Return the place in the corridor and the side of the goal."""
        return [self._place, self._goal]

    def set_state(self, state: list[Any]) -> None:
        """Continue from the result of `get_state`; raise a ValueError for any other state."""
        place, goal = state
        if type(place) is not int or not 0 <= place <= self.length or goal not in (-1, 1):
            raise ValueError(
                f"{type(self).__name__}.set_state: state must be a place from 0 to {self.length} and -1 or 1, got "
                f"{state}"
            )
        self._place, self._goal = place, goal


class KeepNumbers(gymnasium.ObservationWrapper):
    """Shows only some numbers of a vector, such as positions without velocities.

    Parameters
    ----------
    env : gymnasium.Env
        Its observation space must be a Box (D,).
    keep : sequence of int
        Indices of the numbers to keep, in their new order.

    Raises
    ------
    ValueError
        If the observations are not vectors, or an index is out of range.
    """

    def __init__(self, env: gymnasium.Env, keep: Sequence[int]):
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"KeepNumbers: the observations must be vectors, got {space}")
        self._keep = np.asarray(list(keep), np.int64)
        if not len(self._keep) or self._keep.min() < 0 or self._keep.max() >= space.shape[0]:
            raise ValueError(f"KeepNumbers: keep must name numbers from 0 to {space.shape[0] - 1}, got {list(keep)}")
        self.observation_space = spaces.Box(space.low[self._keep], space.high[self._keep], dtype=space.dtype.type)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[self._keep]

    def get_state(self) -> None:
        """Return None, since the wrapper has no state of its own."""

    def set_state(self, state: None) -> None:
        """Do nothing, since the wrapper has no state of its own."""


def cart_pole_hidden(**kwargs: Any) -> gymnasium.Env:
    """Create gymnasium's CartPole with observations of only the cart's position and the pole's angle."""
    return KeepNumbers(CartPoleEnv(**kwargs), [0, 2])


def pendulum_hidden(**kwargs: Any) -> gymnasium.Env:
    """Create gymnasium's Pendulum with observations of only the cosine and the sine of the angle."""
    return KeepNumbers(PendulumEnv(**kwargs), [0, 1])


def mountain_car_continuous_hidden(**kwargs: Any) -> gymnasium.Env:
    """Create gymnasium's MountainCarContinuous with observations of only the position."""
    return KeepNumbers(Continuous_MountainCarEnv(**kwargs), [0])
