"""Native environments as a `rlox.envs.protocols.VecEnv`."""

from __future__ import annotations

import functools

import numpy as np

from rlox.envs.spec import EnvSpec
from rlox.kernels.envs import vec_env


class VecEnv(vec_env.VecEnv):
    __doc__ = vec_env.VecEnv.__doc__

    native = True
    unrestorable_reason = None

    def __reduce__(self):
        return type(self), (self.n_envs, self.seed, self.env_id), self.get_state()

    @functools.cached_property
    def spec(self) -> EnvSpec:
        """Shapes, sizes and bounds."""
        return native_spec(self)

    def fits(self, state: dict[str, np.ndarray]) -> bool:
        """Return whether `state` comes from native environments."""
        return not state.keys().isdisjoint(self.get_state())

    def render(self) -> None:
        """Return None: native environments are not drawn."""

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""


def native_spec(env) -> EnvSpec:
    """Return the `EnvSpec` of a native environment, or of one of its agents if it has several."""
    if env.discrete:
        return EnvSpec((env.obs_dim,), n_actions=env.n_actions)
    return EnvSpec((env.obs_dim,), act_dim=env.act_dim, act_low=env.act_low, act_high=env.act_high)
