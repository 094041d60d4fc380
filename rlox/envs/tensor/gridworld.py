"""GridWorld-v0 in tensor operations; see kernels/envs/gridworld.pxd, whose constants it reads."""

from __future__ import annotations

import torch

from rlox.envs.tensor.base import NativeTwin
from rlox.kernels.envs.native_env import CONSTANTS

_C = CONSTANTS["GridWorld-v0"]
_ROWS, _COLUMNS = int(_C["rows"]), int(_C["columns"])
_STEP_REWARD, _GOAL_REWARD = _C["step_reward"], _C["goal_reward"]


class GridWorld(NativeTwin):
    """State: row and column. Actions: 0 up, 1 right, 2 down, 3 left."""

    env_id = "GridWorld-v0"

    def start(self, words: torch.Tensor) -> torch.Tensor:
        # Uniform over all cells but the goal, the last one: the high half of the product with 64 random bits.
        n_cells = _ROWS * _COLUMNS - 1
        cell = (words[1] * n_cells + (words[0] * n_cells >> 32)) >> 32
        return torch.stack([cell // _COLUMNS, cell % _COLUMNS]).double()

    def step(
        self, state: torch.Tensor, actions: torch.Tensor, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sideways = actions & 1
        down, right = (actions - 1) * (1 - sideways), (2 - actions) * sideways
        row = (state[0] + down).clamp(0.0, _ROWS - 1)
        column = (state[1] + right).clamp(0.0, _COLUMNS - 1)
        terminated = (row == _ROWS - 1) & (column == _COLUMNS - 1)
        rewards = (_GOAL_REWARD - _STEP_REWARD) * terminated.double() + _STEP_REWARD
        return torch.stack([row, column]), rewards, terminated

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        # Divided in float32, as there.
        row, column = state.float().unbind(0)
        return torch.stack([row / (_ROWS - 1), column / (_COLUMNS - 1)], 1)
