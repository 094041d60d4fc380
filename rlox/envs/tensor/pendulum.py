"""Pendulum-v1 in tensor operations; equations and constants as in kernels/envs/pendulum.pxd."""

from __future__ import annotations

import math

import torch

from rlox.envs.tensor.base import NativeTwin
from rlox.envs.tensor.philox import open_unit

_DT = 0.05  # s per step
_GRAVITY_TERM = 15.0  # 3 g / (2 l) in 1/s^2
_TORQUE_TERM = 3.0  # 3 / (m l^2) in 1/(kg m^2)
_MAX_SPEED = 8.0  # rad/s
_MAX_TORQUE = 2.0  # N m


class Pendulum(NativeTwin):
    """State: angle (rad, 0 is upright, not wrapped) and angular velocity."""

    env_id = "Pendulum-v1"

    def start(self, words: torch.Tensor) -> torch.Tensor:
        angle, speed = open_unit(words[:2]).unbind(0)
        return torch.stack([math.pi * (2.0 * angle - 1.0), 2.0 * speed - 1.0])

    def step(
        self, state: torch.Tensor, actions: torch.Tensor, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        theta, theta_dot = state.unbind(0)
        torque = actions[:, 0].double().clamp(-_MAX_TORQUE, _MAX_TORQUE)
        angle = torch.remainder(theta + math.pi, 2.0 * math.pi) - math.pi
        cost = torch.add(angle.square(), theta_dot.square(), alpha=0.1).add(torque.square(), alpha=0.001)
        push = torch.add(_GRAVITY_TERM * theta.sin(), torque, alpha=_TORQUE_TERM)
        speed = torch.add(theta_dot, push, alpha=_DT).clamp(-_MAX_SPEED, _MAX_SPEED)
        return torch.stack([torch.add(theta, speed, alpha=_DT), speed]), -cost, False

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        theta, theta_dot = state.unbind(0)
        return torch.stack([theta.cos(), theta.sin(), theta_dot], 1)
