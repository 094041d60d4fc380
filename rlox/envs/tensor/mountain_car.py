"""MountainCar-v0 and MountainCarContinuous-v0 as tensors, with the constants of kernels/envs/mountain_car*.pxd."""

from __future__ import annotations

import torch

from rlox.envs.tensor.base import NativeTwin
from rlox.envs.tensor.philox import open_unit
from rlox.kernels.envs.native_env import CONSTANTS

_C, _D = CONSTANTS["MountainCar-v0"], CONSTANTS["MountainCarContinuous-v0"]
_LEFT_WALL, _RIGHT_WALL, _MAX_SPEED, _GRAVITY = _C["left_wall"], _C["right_wall"], _C["max_speed"], _C["gravity"]
_START_LOW, _START_WIDTH = _C["start_low"], _C["start_width"]
_FORCE, _GOAL, _REWARD = _C["force"], _C["goal"], _C["reward"]
_STRENGTH, _MAX_ACTION, _ACTION_COST = _D["force"], _D["max_action"], _D["action_cost"]
_CONTINUOUS_GOAL, _GOAL_REWARD = _D["goal"], _D["goal_reward"]


class _Car(NativeTwin):
    """State and observation: position and velocity (position per step)."""

    def start(self, words: torch.Tensor) -> torch.Tensor:
        position = _START_WIDTH * open_unit(words[0]) + _START_LOW
        return torch.stack([position, torch.zeros_like(position)])

    def roll(self, state: torch.Tensor, push: torch.Tensor) -> torch.Tensor:
        """Let the car roll for a step under `push` (N,) and gravity."""
        position, velocity = state.unbind(0)
        force = torch.add(push, (3.0 * position).cos(), alpha=-_GRAVITY)
        v = (velocity + force).clamp(-_MAX_SPEED, _MAX_SPEED)
        p = (position + v).clamp(_LEFT_WALL, _RIGHT_WALL)
        # Only a car that moves left can be at the left wall.
        return torch.stack([p, v.masked_fill((p == _LEFT_WALL) & (v < 0.0), 0.0)])

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        return state.t()


class MountainCar(_Car):
    """Three actions: push left, do nothing, push right."""

    env_id = "MountainCar-v0"

    def step(
        self, state: torch.Tensor, actions: torch.Tensor, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, float, torch.Tensor]:
        new = self.roll(state, _FORCE * (actions.double() - 1.0))
        return new, _REWARD, (new[0] >= _GOAL) & (new[1] >= 0.0)


class MountainCarContinuous(_Car):
    """One force, clipped to [-1, 1], which costs its square before the clipping."""

    env_id = "MountainCarContinuous-v0"

    def step(
        self, state: torch.Tensor, actions: torch.Tensor, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        force = actions[:, 0].double()
        new = self.roll(state, _STRENGTH * force.clamp(-_MAX_ACTION, _MAX_ACTION))
        terminated = (new[0] >= _CONTINUOUS_GOAL) & (new[1] >= 0.0)
        return new, torch.add(_GOAL_REWARD * terminated, force.square(), alpha=-_ACTION_COST), terminated
