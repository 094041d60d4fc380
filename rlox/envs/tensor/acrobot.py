"""Acrobot-v1 in tensor operations; equations as in kernels/envs/acrobot.pxd, whose constants it reads."""

from __future__ import annotations

import math

import torch

from rlox.envs.tensor.base import NativeTwin
from rlox.envs.tensor.philox import open_unit
from rlox.kernels.envs.native_env import CONSTANTS

_C = CONSTANTS["Acrobot-v1"]
_H, _START, _HEIGHT, _REWARD = _C["h"], _C["start"], _C["height"], _C["reward"]
_MAX_SPEED_1, _MAX_SPEED_2 = _C["max_speed_1"], _C["max_speed_2"]
_GRAVITY_1, _GRAVITY_2 = _C["gravity_1"], _C["gravity_2"]
_INERTIA_1, _INERTIA_2, _COUPLING = _C["inertia_1"], _C["inertia_2"], _C["coupling"]


def _derivative(state: torch.Tensor, torque: torch.Tensor) -> torch.Tensor:
    """Return the derivative (4, N) of `state` (4, N) under `torque` (N,)."""
    speed1, speed2 = state[2], state[3]
    (sin1, sin2), (cos1, cos2) = state[:2].sin().unbind(0), state[:2].cos().unbind(0)
    d1 = cos2 + _INERTIA_1
    d2 = torch.rsub(cos2, _INERTIA_2, alpha=-_COUPLING)
    phi2 = _GRAVITY_2 * torch.addcmul(sin1 * cos2, cos1, sin2)
    drag = sin2 * speed2 * torch.add(speed1, speed2, alpha=_COUPLING)
    phi1 = torch.add(phi2 - drag, sin1, alpha=_GRAVITY_1)
    turn = torch.addcmul(torque - phi2, speed1.square(), sin2, value=-_COUPLING)
    determinant = torch.addcmul(_INERTIA_2 * d1, d2, d2, value=-1.0)
    acc2 = torch.addcmul(d1 * turn, d2, phi1) / determinant
    acc1 = -torch.addcmul(phi1, d2, acc2) / d1
    return torch.stack([speed1, speed2, acc1, acc2])


class Acrobot(NativeTwin):
    """State: two angles (rad, 0 hangs down, in [-pi, pi]) and their speeds (rad/s)."""

    env_id = "Acrobot-v1"

    def start(self, words: torch.Tensor) -> torch.Tensor:
        # gymnasium rounds starts to float32.
        return (2.0 * _START * open_unit(words) - _START).float().double()

    def step(
        self, state: torch.Tensor, actions: torch.Tensor, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torque = actions.double() - 1.0
        # One Runge-Kutta step of fourth order.
        k1 = _derivative(state, torque)
        k2 = _derivative(torch.add(state, k1, alpha=0.5 * _H), torque)
        k3 = _derivative(torch.add(state, k2, alpha=0.5 * _H), torque)
        k4 = _derivative(torch.add(state, k3, alpha=_H), torque)
        slopes = torch.add(k1 + k4, k2 + k3, alpha=2.0)
        new = torch.add(state, slopes, alpha=_H / 6.0)
        angles = torch.remainder(new[:2] + math.pi, 2.0 * math.pi) - math.pi
        speed1 = new[2:3].clamp(-_MAX_SPEED_1, _MAX_SPEED_1)
        speed2 = new[3:].clamp(-_MAX_SPEED_2, _MAX_SPEED_2)
        height = -angles[0].cos() - (angles[0] + angles[1]).cos()
        terminated = height > _HEIGHT
        return torch.cat([angles, speed1, speed2]), _REWARD * (1.0 - terminated.double()), terminated

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        cos, sin = state[:2].cos(), state[:2].sin()
        return torch.stack([cos[0], sin[0], cos[1], sin[1], state[2], state[3]], 1)
