"""Functions that replace an environment's rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlox.envs import EnvSpec, env_name
from rlox.kernels.reward import NativeReward

# (obs, actions, raw_rewards) -> rewards, a "rlox.reward.v1" capsule, or a name in REWARDS.
RewardFn = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | Any


def sign(obs: np.ndarray, actions: np.ndarray, raw_rewards: np.ndarray) -> np.ndarray:
    """Return -1, 0 or 1, as Mnih et al. 2015 do to learn all Atari games with the same settings."""
    return np.sign(raw_rewards)


REWARDS = {"sign": sign}


def reward_name(reward_fn: Callable[..., np.ndarray]) -> str:
    """Return the name of `reward_fn` for checkpoints. For `REWARDS` it is ``rlox:NAME``, which no function can have."""
    ours = next((name for name, found in REWARDS.items() if found is reward_fn), None)
    return env_name(reward_fn) if ours is None else f"rlox:{ours}"


def as_reward_fn(reward_fn: RewardFn, spec: EnvSpec, where: str) -> Callable[..., np.ndarray]:
    """Return `reward_fn` as a callable. Names are looked up; a capsule becomes a `NativeReward` that fits `spec`.

    Raises
    ------
    TypeError
        If it is neither a callable nor a capsule nor a name in `REWARDS`.
    ValueError
        If a capsule breaks the contract of rlox_native.h, or is written for another environment.
    """
    if isinstance(reward_fn, str) and reward_fn in REWARDS:
        return REWARDS[reward_fn]
    if not callable(reward_fn):
        if type(reward_fn).__name__ != "PyCapsule":
            raise TypeError(
                f"{where}: reward_fn must be a callable or a 'rlox.reward.v1' capsule, got {type(reward_fn).__name__}"
            )
        reward_fn = NativeReward(reward_fn)
    if isinstance(reward_fn, NativeReward):
        if spec.obs_dtype != np.float32 or len(spec.obs_shape) != 1 or spec.n_choices is not None:
            raise ValueError(
                f"{where}: reward_fn {reward_fn.name} must be a Python function here: a native reward takes (N, D) "
                "float32 observations, and one integer or A floats as an action"
            )
        if reward_fn.obs_dim not in (None, spec.obs_dim):
            raise ValueError(
                f"{where}: reward_fn must fit observations of length {spec.obs_dim}, got {reward_fn.name} for "
                f"{reward_fn.obs_dim}"
            )
    return reward_fn
