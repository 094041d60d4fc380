"""GridPursuit-v0 in tensor operations; see kernels/envs/pursuit.pxd, whose constants it reads."""

from __future__ import annotations

import torch

from rlox.envs.spec import native_spec
from rlox.envs.tensor.base import TensorAgents, TensorEnv
from rlox.kernels.envs.multi_agent import AgentVecEnv
from rlox.kernels.envs.native_env import CONSTANTS

_C = CONSTANTS["GridPursuit-v0"]
_STEP_REWARD, _CATCH_REWARD = _C["step_reward"], _C["catch_reward"]
_REACH, _FAR = int(_C["reach"]), int(_C["far"])


class GridPursuit(TensorEnv):
    """The state has row and column of each pursuer, then of the prey; so has what a central critic sees.

    Parameters
    ----------
    **params
        ``size``, ``n_pursuers``, ``n_catchers``, ``max_cycles`` and ``randomness``, which the native environment
        checks, and whose defaults it has.
    """

    env_id = "GridPursuit-v0"
    random_steps = True

    def __init__(self, **params: float):
        kernel = AgentVecEnv(1, 0, self.env_id, params)
        given = kernel.params
        self.size, self.n_pursuers, self.n_catchers = given["size"], given["n_pursuers"], given["n_catchers"]
        self.max_episode_steps = given["max_cycles"]
        self._random_below = int(given["randomness"] * 2**32)
        self.state_size = kernel.central_dim
        self.start_blocks = -(-(self.n_pursuers + 1) // 4)  # type: ignore[misc]  # it depends on the number
        names = tuple(f"pursuer_{a}" for a in range(self.n_pursuers))
        self.agents = TensorAgents(names, native_spec(kernel), kernel.central_dim)
        self.spec = self.agents.join()

    def start(self, words: torch.Tensor) -> torch.Tensor:
        # Uniform over all cells, from one word for each position.
        cells = (words[: self.n_pursuers + 1] * self.size**2) >> 32
        return torch.stack([cells // self.size, cells % self.size], 1).flatten(0, 1).double()

    def step(
        self, state: torch.Tensor, actions: torch.Tensor, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert words is not None
        cells = state.long().view(self.n_pursuers + 1, 2, -1)
        pursuers, prey = self._move(cells[:-1], actions.t().clamp(0, 4)), cells[-1]
        beside = (pursuers - prey).abs().sum(1) <= _REACH
        caught = beside.sum(0) >= self.n_catchers
        prey = torch.where(caught, prey, self._flee(pursuers, prey, words))
        new = torch.cat([pursuers, prey.unsqueeze(0)]).flatten(0, 1).double()
        return new, _CATCH_REWARD * caught.double() + _STEP_REWARD, caught

    def _move(self, cells: torch.Tensor, moves: torch.Tensor) -> torch.Tensor:
        """Return the cells (..., 2, N) that `moves` (..., N) lead to: stay, up, right, down, left."""
        down = (moves == 3).long() - (moves == 1).long()
        right = (moves == 2).long() - (moves == 4).long()
        return (cells + torch.stack([down, right], -2)).clamp(0, self.size - 1)

    def _flee(self, pursuers: torch.Tensor, prey: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Return the prey's next cell (2, N): the farthest one, or that of its first move where it moves at random."""
        order = torch.arange(5, device=prey.device).unsqueeze(1)
        first = (words[1] * 5) >> 32
        reached = self._move(prey.expand(5, 2, -1), (first + order) % 5)  # (5, 2, N)
        distances = (reached.unsqueeze(1) - pursuers).abs().sum(2)  # (5, A, N)
        scores = distances.amin(1) * _FAR + distances.sum(1)
        scores = scores.where((order == 0) | (words[0] >= self._random_below), -1)
        # The first of equal scores, which argmax alone does not promise.
        best = (scores * 5 - order).argmax(0)
        return reached.gather(0, best.expand(1, 2, -1))[0]

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        # Multiplied in float32, as there; differences of whole numbers are exact.
        n = self.n_pursuers
        cells = state.float().view(n + 1, 2, -1)
        own = cells[:-1]
        others = [own.roll(-k, 0) - own for k in range(1, n)]
        views = torch.stack([own, cells[-1] - own, *others], 1).flatten(1, 2)  # (A, D, N)
        scale = (torch.ones((), dtype=torch.float32) / (self.size - 1)).item()
        return torch.cat([views.flatten(0, 1), cells.flatten(0, 1)]).mul(scale).t()
