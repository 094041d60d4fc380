"""What an algorithm must know of an environment, and the one place that chooses its implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rlox.config import ENV_BACKENDS, nearest
from rlox.kernels.envs import NATIVE_ENVS


@dataclass(frozen=True, eq=False)
class EnvSpec:
    """Shapes, sizes and bounds; what does not apply to the environment's actions is None.

    Exactly one kind of action: `n_actions` (one integer), `n_choices` (K integers), or `act_dim` with its bounds.
    """

    obs_shape: tuple[int, ...]  # (D,), or (C, H, W) for images
    obs_dtype: type = np.float32  # np.float32, or np.uint8 for images
    n_stacked: int = 1  # frames in an image that moves on by one frame a step (gymnasium's FrameStackObservation)
    n_actions: int | None = None  # Discrete: how many actions
    n_choices: tuple[int, ...] | None = None  # MultiDiscrete: how many choices each of the K components has
    act_dim: int | None = None  # Box: length A of an action
    act_low: np.ndarray | None = None  # (A,) f32, -inf where unbounded
    act_high: np.ndarray | None = None  # (A,) f32, inf where unbounded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EnvSpec) and all(
            np.array_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self)
        )

    @property
    def obs_dim(self) -> int:
        """D; for images the number of values in one."""
        return math.prod(self.obs_shape)

    @property
    def image(self) -> bool:
        return len(self.obs_shape) == 3 and self.obs_dtype == np.uint8

    @property
    def discrete(self) -> bool:
        return self.n_actions is not None

    @property
    def continuous(self) -> bool:
        return self.act_dim is not None

    @property
    def action_kind(self) -> str:
        """``discrete``, ``multi-discrete`` or ``continuous``."""
        return "discrete" if self.discrete else "continuous" if self.continuous else "multi-discrete"

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action: () for Discrete, (K,) for MultiDiscrete, (A,) for Box."""
        if self.n_choices is not None:
            return (len(self.n_choices),)
        return (self.act_dim,) if self.continuous else ()

    @property
    def action_dtype(self) -> type:
        return np.float32 if self.continuous else np.int64

    def describe_actions(self) -> str:
        """For messages: ``2 discrete actions``, ``3 components of 2, 2, 5 choices``, ``1 action component``."""
        if self.discrete:
            return f"{self.n_actions} discrete actions"
        if self.n_choices is not None:
            return f"{len(self.n_choices)} components of {', '.join(map(str, self.n_choices))} choices"
        return f"{self.act_dim} action component{'' if self.act_dim == 1 else 's'}"

    def clip(self, actions: np.ndarray) -> np.ndarray:
        """Continuous actions within their bounds; other actions as they are."""
        return np.clip(actions, self.act_low, self.act_high) if self.continuous else actions


def env_name(env: Any) -> str:
    """The id itself, or the name of a callable or of an environment's class."""
    return env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)


def make_vec_env(
    env: str | Callable[..., Any],
    n_envs: int,
    seed: int,
    kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Any] = (),
    workers: int = 0,
    backend: str = "auto",
):
    """N environments behind ``reset_all`` and ``step_all(actions, out=None)``, whatever implements them.

    Parameters
    ----------
    env : str, callable or gymnasium.Env
        An id, a callable that returns an environment, or (for `n_envs` 1, without workers) an environment.
    n_envs, seed : int
        Number of copies N, and what decides their randomness.
    kwargs : dict, optional
        Arguments of ``gymnasium.make``, of the callable or of ``envpool.make``.
    wrappers : sequence
        See `rlox.gym_vec_env.make_gym_env`.
    workers : int
        Processes that step the copies; 0: this one does.
    backend : str
        ``gymnasium``, ``envpool`` (see `rlox.envpool_env`), or ``auto``: native where there is one, else gymnasium.

    Returns
    -------
    VecEnv, GymVecEnv, ParallelGymVecEnv or EnvPoolVecEnv
        With ``auto`` the native one where `env` is a native id and comes without arguments, wrappers and
        workers. A seed gives the same trajectories with and without workers.

    Raises
    ------
    ValueError
        For an id that gymnasium does not know either, a space that no policy serves, an unknown backend, or wrappers
        or workers with ``envpool``.
    """
    if n_envs < 1:
        raise ValueError(f"make_vec_env: n_envs must be >= 1, got {n_envs}")
    if not 0 <= workers <= n_envs:
        raise ValueError(f"make_vec_env: workers must be between 0 and n_envs ({n_envs}), got {workers}")
    if backend not in ENV_BACKENDS:
        raise ValueError(
            f"make_vec_env: backend must be one of {', '.join(ENV_BACKENDS)}, got {backend!r}; "
            f"{nearest(str(backend), ENV_BACKENDS)}"
        )
    if backend == "envpool":
        if wrappers or workers:
            raise ValueError(
                "make_vec_env: wrappers must be empty and workers 0 with envpool, which has threads of its own "
                f"(kwargs num_threads), got {list(wrappers)} and {workers}; or pass backend='gymnasium'"
            )
        from rlox.envpool_env import EnvPoolVecEnv

        return EnvPoolVecEnv(env, n_envs, seed, kwargs)
    if backend == "auto" and isinstance(env, str) and env in NATIVE_ENVS and not (kwargs or wrappers or workers):
        from rlox.kernels.envs.vec_env import VecEnv

        return VecEnv(n_envs, seed, env)
    if workers:
        from rlox.parallel_env import ParallelGymVecEnv

        return ParallelGymVecEnv(env, n_envs, seed, kwargs, wrappers, workers)
    from rlox.gym_vec_env import GymVecEnv

    return GymVecEnv(env, n_envs, seed, kwargs, wrappers)


def spec_of(vec) -> EnvSpec:
    """The `EnvSpec` of what `make_vec_env` made."""
    from rlox.kernels.envs.vec_env import VecEnv

    if not isinstance(vec, VecEnv):
        return vec.spec
    if vec.discrete:
        return EnvSpec((vec.obs_dim,), n_actions=vec.n_actions)
    return EnvSpec((vec.obs_dim,), act_dim=vec.act_dim, act_low=vec.act_low, act_high=vec.act_high)
