"""What an algorithm must know of an environment, and the one place that chooses its implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlox.kernels.envs import NATIVE_ENVS


@dataclass(frozen=True)
class EnvSpec:
    """Sizes and bounds; `n_actions` is None for continuous actions, `act_dim` and the bounds for discrete ones."""

    obs_dim: int
    n_actions: int | None
    act_dim: int | None
    act_low: np.ndarray | None  # (A,) f32
    act_high: np.ndarray | None  # (A,) f32

    @property
    def discrete(self) -> bool:
        return self.n_actions is not None


def env_name(env: str | Callable[..., Any]) -> str:
    """The id itself, or the name of a callable."""
    return env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)


def make_vec_env(env: str | Callable[[], Any], n_envs: int, seed: int, kwargs: dict[str, Any] | None = None):
    """A native `VecEnv` where `env` is one of ours and takes no arguments, else a `GymVecEnv`.

    Both have ``reset_all``, ``step_all(actions, out=None)`` and the same result arrays.

    Raises
    ------
    ValueError
        For an id that gymnasium does not know either, or a space that no policy serves.
    """
    if n_envs < 1:
        raise ValueError(f"make_vec_env: n_envs must be >= 1, got {n_envs}")
    if isinstance(env, str) and env in NATIVE_ENVS and not kwargs:
        from rlox.kernels.envs.vec_env import VecEnv

        return VecEnv(n_envs, seed, env)
    from rlox.gym_vec_env import GymVecEnv

    return GymVecEnv(env, n_envs, seed, kwargs=kwargs)


def spec_of(vec) -> EnvSpec:
    """The `EnvSpec` of a `VecEnv` or `GymVecEnv`."""
    if vec.discrete:
        return EnvSpec(vec.obs_dim, vec.n_actions, None, None, None)
    return EnvSpec(vec.obs_dim, None, vec.act_dim, vec.act_low, vec.act_high)
