"""MountainCar-v0 and MountainCarContinuous-v0 in tensor operations; see kernels/envs/mountain_car*.pxd."""

from __future__ import annotations

import torch

from rlox.envs.tensor.base import NativeTwin
from rlox.envs.tensor.philox import open_unit

_LEFT_WALL, _RIGHT_WALL = -1.2, 0.6
_MAX_SPEED = 0.07
_GRAVITY = 0.0025


class _Car(NativeTwin):
    """State and observation: position and velocity (position per step)."""

    def start(self, words: torch.Tensor) -> torch.Tensor:
        position = 0.2 * open_unit(words[0]) - 0.6
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
        new = self.roll(state, 0.001 * (actions.double() - 1.0))
        return new, -1.0, (new[0] >= 0.5) & (new[1] >= 0.0)


class MountainCarContinuous(_Car):
    """One force, clipped to [-1, 1], which costs its square before the clipping."""

    env_id = "MountainCarContinuous-v0"

    def step(
        self, state: torch.Tensor, actions: torch.Tensor, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        force = actions[:, 0].double()
        new = self.roll(state, 0.0015 * force.clamp(-1.0, 1.0))
        terminated = (new[0] >= 0.45) & (new[1] >= 0.0)
        return new, torch.add(100.0 * terminated, force.square(), alpha=-0.1), terminated
