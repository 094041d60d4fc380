"""CartPole-v1 in tensor operations; equations as in kernels/envs/cartpole.pxd, whose constants it reads."""

from __future__ import annotations

import torch

from rlox.envs.tensor.base import NativeTwin
from rlox.envs.tensor.philox import open_unit
from rlox.kernels.envs.native_env import CONSTANTS

_C = CONSTANTS["CartPole-v1"]
_PER_MASS, _FORCE = _C["per_mass"], _C["force"] * _C["per_mass"]
_MOMENT = _C["pole_moment"] * _PER_MASS
_INERTIA = _C["half_length"] * _C["pole_mass"] * _PER_MASS
_GRAVITY, _TAU, _START, _REWARD = _C["gravity"], _C["tau"], _C["start"], _C["reward"]
_LENGTH = 4.0 / 3.0 * _C["half_length"]
_X_LIMIT, _THETA_LIMIT = _C["x_limit"], _C["theta_limit"]


class CartPole(NativeTwin):
    """State and observation: position (m), velocity, angle (rad, 0 is upright) and angular velocity."""

    env_id = "CartPole-v1"

    def start(self, words: torch.Tensor) -> torch.Tensor:
        return 2.0 * _START * open_unit(words) - _START

    def step(
        self, state: torch.Tensor, actions: torch.Tensor, words: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, float, torch.Tensor]:
        _, x_dot, theta, theta_dot = state.unbind(0)
        sin, cos = theta.sin(), theta.cos()
        # Factors in `value` and `alpha` halve the launches; the results of the native code differ by rounding.
        push = torch.addcmul(actions.double() * (2.0 * _FORCE) - _FORCE, theta_dot.square(), sin, value=_MOMENT)
        inertia = torch.rsub(cos.square(), _LENGTH, alpha=_INERTIA)
        theta_acc = torch.addcmul(_GRAVITY * sin, cos, push, value=-1.0) / inertia
        x_acc = torch.addcmul(push, theta_acc, cos, value=-_MOMENT)
        new = state.add(torch.stack([x_dot, x_acc, theta_dot, theta_acc]), alpha=_TAU)
        return new, _REWARD, (new[0].abs() > _X_LIMIT) | (new[2].abs() > _THETA_LIMIT)

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        return state.t()
