"""Pendulum-v1 in tensor operations; equations as in kernels/envs/pendulum.pxd, whose constants it reads."""

from __future__ import annotations

import math

import torch

from rlox.envs.tensor.base import NativeTwin
from rlox.envs.tensor.philox import open_unit
from rlox.kernels.envs.native_env import CONSTANTS

_C = CONSTANTS["Pendulum-v1"]
_DT, _MAX_SPEED, _MAX_TORQUE = _C["dt"], _C["max_speed"], _C["max_torque"]
_GRAVITY_TERM, _TORQUE_TERM = _C["gravity_term"], _C["torque_term"]
_SPEED_COST, _TORQUE_COST = _C["speed_cost"], _C["torque_cost"]
_START_ANGLE, _START_SPEED = _C["start_angle"], _C["start_speed"]


class Pendulum(NativeTwin):
    """State: angle (rad, 0 is upright, not wrapped) and angular velocity."""

    env_id = "Pendulum-v1"

    def start(self, words: torch.Tensor) -> torch.Tensor:
        angle, speed = open_unit(words[:2]).unbind(0)
        return torch.stack([_START_ANGLE * (2.0 * angle - 1.0), _START_SPEED * (2.0 * speed - 1.0)])

    def step(
        self, state: torch.Tensor, actions: torch.Tensor, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        theta, theta_dot = state.unbind(0)
        torque = actions[:, 0].double().clamp(-_MAX_TORQUE, _MAX_TORQUE)
        angle = torch.remainder(theta + math.pi, 2.0 * math.pi) - math.pi
        cost = torch.add(angle.square(), theta_dot.square(), alpha=_SPEED_COST).add(torque.square(), alpha=_TORQUE_COST)
        push = torch.add(_GRAVITY_TERM * theta.sin(), torque, alpha=_TORQUE_TERM)
        speed = torch.add(theta_dot, push, alpha=_DT).clamp(-_MAX_SPEED, _MAX_SPEED)
        return torch.stack([torch.add(theta, speed, alpha=_DT), speed]), -cost, False

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        theta, theta_dot = state.unbind(0)
        return torch.stack([theta.cos(), theta.sin(), theta_dot], 1)
