"""What an algorithm must know of an environment, and the one place that chooses its implementation."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from rlox.config import ENV_BACKENDS, integer, nearest
from rlox.gym_registration import announce, gym_id
from rlox.kernels.envs import NATIVE_ENVS
from rlox.kernels.envs.vec_env import native_ids, register_native
from rlox.kernels.rng import Rng
from rlox.plugins import ENV_GROUP, offers, register_offered

# (namespace/)name-vN, which gymnasium and the command line take; a colon would stand for a module to import.
_ID = re.compile(r"([\w-]+/)?[\w.-]+-v\d+")

# Of each id from outside the module that registered it, for processes that must import it.
_ORIGINS: dict[str, str] = {}


@dataclass(frozen=True, eq=False)
class EnvSpec:
    """Shapes, sizes and bounds; what does not apply to the environment's actions is None.

    Exactly one kind of action: `n_actions` (one integer), `n_choices` (K integers), or `act_dim` with its bounds.
    """

    obs_shape: tuple[int, ...]  # (D,), or (C, H, W) for images
    obs_dtype: type = np.float32  # np.float32, or np.uint8 for images
    n_stacked: int = 1  # frames in an image that moves on by one frame a step (gymnasium's FrameStackObservation)
    obs_bytes: tuple[int, ...] | None = None  # shape of a uint8 Box that is no image: its numbers are taken as they are
    n_actions: int | None = None  # Discrete: how many actions
    n_choices: tuple[int, ...] | None = None  # MultiDiscrete: how many choices each of the K components has
    act_dim: int | None = None  # Box: length A of an action
    act_low: np.ndarray | None = None  # (A,) f32, -inf where unbounded
    act_high: np.ndarray | None = None  # (A,) f32, inf where unbounded
    # What an observation of several parts is made of: the key of each, and how many numbers it has.
    parts: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EnvSpec) and all(
            np.array_equal(getattr(self, item.name), getattr(other, item.name)) for item in fields(self) if item.compare
        )

    def part(self, i: int) -> str:
        """Where number `i` of an observation comes from: the key of its part and the place in there."""
        for key, size in self.parts:
            if i < size:
                return f"number {i} of {key!r}"
            i -= size
        return f"number {i}"

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

    def random_actions(self, rng: Rng, n: int) -> np.ndarray:
        """`n` uniformly random actions; continuous ones must be bounded."""
        if self.discrete:
            return rng.integers(self.n_actions, n)
        if self.n_choices is not None:
            return (rng.uniform((n, len(self.n_choices)), dtype=np.float64) * self.n_choices).astype(np.int64)
        return self.act_low + (self.act_high - self.act_low) * rng.uniform((n, self.act_dim))


def register_env(capsule: Any, module: str | None = None) -> str:
    """Add a native environment of one's own, by a ``rlox.env.v1`` capsule (rlox_native.h).

    From then on its id is native wherever one is taken: `VecEnv`, `make_vec_env`, algorithms, evaluation,
    ``rlox train --import``, and ``gymnasium.make_vec("rlox/<id>")``. A package that is installed needs no call: it
    offers ids by entry points in the group ``rlox.envs``, ``"<id>" = "module:capsule"`` or a function that returns one.

    Parameters
    ----------
    capsule : PyCapsule
        Holds the address of a `rlox_env_v1`. It is kept.
    module : str, optional
        What a worker process imports to have the id as well; by default the module that calls.

    Returns
    -------
    str
        The id.

    Raises
    ------
    TypeError
        If `capsule` is no PyCapsule.
    ValueError
        For a capsule of another kind, a struct that breaks the contract, or an id that is taken or no id.
    """
    from rlox.kernels.envs.vec_env import VecEnv

    if module is None:
        module = sys._getframe(1).f_globals.get("__name__")
    env_id = VecEnv(1, 0, capsule).env_id if type(capsule).__name__ == "PyCapsule" else ""
    if env_id and not _ID.fullmatch(env_id):
        raise ValueError(
            f"register_env: env_id must be a name and a version such as 'Mine-v0' or 'my_lab/Mine-v0', got {env_id!r}"
        )
    env_id = register_native(capsule)
    if module is not None and module != "__main__":
        _ORIGINS[env_id] = module
    announce(env_id, origin(env_id))
    return env_id


def origin(env_id: str) -> str | None:
    """The module that registered an id from outside, where another process must import it to have the id."""
    return _ORIGINS.get(env_id)


def native_env_ids() -> list[str]:
    """Every native id: built in, registered in this process, or offered by an installed package."""
    return [env_id for env_id in dict.fromkeys([*native_ids(), *offers(ENV_GROUP)]) if _ID.fullmatch(env_id)]


def is_native(env: Any) -> bool:
    """Whether `env` is a native id; what an installed package offers under it is registered on the way.

    Raises
    ------
    ValueError
        If the package's object is no environment of this id.
    ImportError
        If the package's code fails.
    """
    if not isinstance(env, str):
        return False
    if env not in native_ids():
        if not _ID.fullmatch(env) or not register_offered(env):
            return False
        announce(env)
    return True


def foreign_id(env_id: str) -> str:
    """The id that gymnasium knows: that of a native environment from outside, which is gymnasium's only by rlox."""
    if env_id in NATIVE_ENVS or not is_native(env_id):
        return env_id
    import gymnasium  # whose import brings every native id along

    return gym_id(env_id) if gym_id(env_id) in gymnasium.registry else env_id


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
        An id, a callable that returns an environment, or (for `n_envs` 1, without workers) an environment. A native id
        from outside (see `register_env`) that comes with arguments, wrappers or workers is played by
        `rlox.gym_envs.NativeEnv`.
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
    n_envs = integer("make_vec_env", "n_envs", n_envs, 1)
    seed = integer("make_vec_env", "seed", seed, 0, 2**64 - 1)
    if not 0 <= integer("make_vec_env", "workers", workers, 0) <= n_envs:
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
    if backend == "auto" and not (kwargs or wrappers or workers) and is_native(env):
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
