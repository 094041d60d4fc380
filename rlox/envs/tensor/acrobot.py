"""Acrobot-v1 in tensor operations; equations and constants as in kernels/envs/acrobot.pxd."""

from __future__ import annotations

import math

import torch

from rlox.envs.tensor.base import NativeTwin
from rlox.envs.tensor.philox import open_unit

_H = 0.2  # s per step
_MAX_SPEED_1, _MAX_SPEED_2 = 4.0 * math.pi, 9.0 * math.pi


def _derivative(state: torch.Tensor, torque: torch.Tensor) -> torch.Tensor:
    """Return the derivative (4, N) for links of length 1, mass 1, centre of mass at 1/2, inertia 1, for g = 9.8."""
    speed1, speed2 = state[2], state[3]
    (sin1, sin2), (cos1, cos2) = state[:2].sin().unbind(0), state[:2].cos().unbind(0)
    d1 = cos2 + 3.5
    d2 = torch.rsub(cos2, 1.25, alpha=-0.5)
    phi2 = 4.9 * torch.addcmul(sin1 * cos2, cos1, sin2)
    drag = sin2 * speed2 * torch.add(speed1, speed2, alpha=0.5)
    phi1 = torch.add(phi2 - drag, sin1, alpha=14.7)
    turn = torch.addcmul(torque - phi2, speed1.square(), sin2, value=-0.5)
    determinant = torch.addcmul(1.25 * d1, d2, d2, value=-1.0)
    acc2 = torch.addcmul(d1 * turn, d2, phi1) / determinant
    acc1 = -torch.addcmul(phi1, d2, acc2) / d1
    return torch.stack([speed1, speed2, acc1, acc2])


class Acrobot(NativeTwin):
    """State: two angles (rad, 0 hangs down, in [-pi, pi]) and their speeds (rad/s)."""

    env_id = "Acrobot-v1"

    def start(self, words: torch.Tensor) -> torch.Tensor:
        # gymnasium rounds starts to float32.
        return (0.2 * open_unit(words) - 0.1).float().double()

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
        terminated = height > 1.0
        return torch.cat([angles, speed1, speed2]), terminated.double() - 1.0, terminated

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        cos, sin = state[:2].cos(), state[:2].sin()
        return torch.stack([cos[0], sin[0], cos[1], sin[1], state[2], state[3]], 1)
