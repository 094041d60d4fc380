"""CartPole-v1 in tensor operations; equations and constants as in kernels/envs/cartpole.pxd."""

from __future__ import annotations

import torch

from rlox.envs.tensor.base import NativeTwin
from rlox.envs.tensor.philox import open_unit

_GRAVITY = 9.8  # m/s^2
_PER_MASS = 1.0 / 1.1  # 1/kg, of the cart's 1.0 and the pole's 0.1
_HALF_LENGTH = 0.5  # m, half of the pole
_POLE_MOMENT = 0.05  # kg m, mass of the pole times half its length
_FORCE = 10.0  # N
_TAU = 0.02  # s per step
_X_LIMIT = 2.4  # m
_THETA_LIMIT = 0.20943951023931953  # rad, 12 degrees


class CartPole(NativeTwin):
    """State and observation: position (m), velocity, angle (rad, 0 is upright) and angular velocity."""

    env_id = "CartPole-v1"

    def start(self, words: torch.Tensor) -> torch.Tensor:
        return 0.1 * open_unit(words) - 0.05

    def step(
        self, state: torch.Tensor, actions: torch.Tensor, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, float, torch.Tensor]:
        _, x_dot, theta, theta_dot = state.unbind(0)
        sin, cos = theta.sin(), theta.cos()
        # Factors in `value` and `alpha` halve the launches; the results of the native code differ by rounding.
        moment = _POLE_MOMENT * _PER_MASS
        force = actions.double() * (2.0 * _FORCE * _PER_MASS) - _FORCE * _PER_MASS
        push = torch.addcmul(force, theta_dot.square(), sin, value=moment)
        inertia = torch.rsub(cos.square(), 4.0 / 3.0 * _HALF_LENGTH, alpha=0.1 * _PER_MASS * _HALF_LENGTH)
        theta_acc = torch.addcmul(_GRAVITY * sin, cos, push, value=-1.0) / inertia
        x_acc = torch.addcmul(push, theta_acc, cos, value=-moment)
        new = state.add(torch.stack([x_dot, x_acc, theta_dot, theta_acc]), alpha=_TAU)
        return new, 1.0, (new[0].abs() > _X_LIMIT) | (new[2].abs() > _THETA_LIMIT)

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        return state.t()
