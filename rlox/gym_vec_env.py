"""Any gymnasium environment, N of them stepped in this process, with the arrays of the native `VecEnv`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlox.config import nearest
from rlox.kernels.rng import Rng
from rlox.streams import Stream

# Which extra brings the library that a package-less gymnasium id needs; gymnasium names the module it misses.
_EXTRAS = {"Box2D": "box2d", "mujoco": "mujoco", "ale_py": "atari"}


def make_gym_env(env: str | Callable[[], Any], kwargs: dict[str, Any] | None = None):
    """One gymnasium environment from an id or a callable.

    Raises
    ------
    ValueError
        If the id is unknown (with the nearest known one), or gymnasium refuses the arguments.
    ImportError
        If the id needs a package that is not installed; names the extra that brings it.
    """
    import gymnasium
    from gymnasium import error

    if callable(env):
        made = env(**(kwargs or {}))
        if not isinstance(made, gymnasium.Env):
            raise TypeError(f"make_gym_env: env must return a gymnasium.Env, got {type(made).__name__}")
        return made
    try:
        return gymnasium.make(env, **(kwargs or {}))
    except (
        error.NameNotFound,
        error.NamespaceNotFound,
        error.VersionNotFound,
        error.DeprecatedEnv,
        error.Error,
    ) as e:
        if isinstance(e, error.DependencyNotInstalled) or isinstance(e.__cause__, ImportError):
            text = f"{e} {e.__cause__}"
            extra = next((extra for module, extra in _EXTRAS.items() if module.lower() in text.lower()), None)
            remedy = f'pip install "rlox-cli[{extra}]"' if extra else str(e)
            raise ImportError(f"make_gym_env: {env} needs a package that is not installed; {remedy}") from e
        if isinstance(e, error.UnregisteredEnv):
            raise ValueError(f"make_gym_env: env must be a registered id, got {env!r}; {_nearest_id(env)}") from e
        raise ValueError(f"make_gym_env: {env} cannot be made: {e}") from e
    except TypeError as e:
        raise ValueError(f"make_gym_env: {env} does not take kwargs {kwargs!r}: {e}") from e


def _nearest_id(env: str) -> str:
    import gymnasium

    ids = sorted(gymnasium.registry)
    hint = nearest(env, ids)
    return hint if hint.startswith("did") else "`rlox ls envs` lists the ids"


class GymVecEnv:
    """N copies of a gymnasium environment in this process, with same-step auto-reset.

    Parameters
    ----------
    env_id : str or callable
        A gymnasium id, or a callable that returns a ``gymnasium.Env``.
    n_envs : int
        Number of copies N.
    seed : int
        Copy i is seeded with an independent mix of (seed, i).
    kwargs : dict, optional
        Passed to ``gymnasium.make`` or the callable.

    Raises
    ------
    ValueError
        For observations that are not a flat Box, or actions that are neither Discrete nor a flat bounded Box.
    """

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_envs: int = 1,
        seed: int = 0,
        kwargs: dict[str, Any] | None = None,
    ):
        from gymnasium import spaces

        if n_envs < 1:
            raise ValueError(f"GymVecEnv: n_envs must be >= 1, got {n_envs}")
        self.env_id = env_id
        self.n_envs = n_envs
        self.envs = [make_gym_env(env_id, kwargs) for _ in range(n_envs)]
        obs_space, act_space = self.envs[0].observation_space, self.envs[0].action_space
        if not isinstance(obs_space, spaces.Box) or len(obs_space.shape) != 1:
            raise ValueError(
                f"GymVecEnv: the observation space must be a Box of one dimension, got {obs_space}; "
                "wrap the environment in gymnasium.wrappers.FlattenObservation"
            )
        self.obs_dim = int(obs_space.shape[0])
        self.discrete = isinstance(act_space, spaces.Discrete)
        if self.discrete:
            self.n_actions: int | None = int(act_space.n)
            self._first_action = int(act_space.start)
            self.act_dim = self.act_low = self.act_high = None
        elif isinstance(act_space, spaces.Box) and len(act_space.shape) == 1:
            self.n_actions = None
            self.act_dim = int(act_space.shape[0])
            self.act_low = act_space.low.astype(np.float32)
            self.act_high = act_space.high.astype(np.float32)
        else:
            raise ValueError(
                f"GymVecEnv: the action space must be Discrete or a Box of one dimension, got {act_space}; "
                "wrap the environment in gymnasium.wrappers.TransformAction"
            )
        self._seed = seed
        self._returns = np.zeros(n_envs)
        self._lengths = np.zeros(n_envs, np.int64)
        self._started = False

    def __len__(self) -> int:
        return self.n_envs

    def reset_all(self, seed: int | None = None) -> np.ndarray:
        """Start a new episode everywhere; the first call seeds the copies, a later one only with `seed`. (N, D) f32."""
        if seed is not None:
            self._seed = seed
        reseed = seed is not None or not self._started
        seeds = Rng(self._seed, Stream.FOREIGN_ENVS).integers(2**31, self.n_envs).tolist()
        self._started = True
        self._returns[:] = 0.0
        self._lengths[:] = 0
        first = [env.reset(seed=s if reseed else None)[0] for env, s in zip(self.envs, seeds, strict=True)]
        return np.stack(first).astype(np.float32)

    def step_all(self, actions, out: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Step every copy once; the first call starts the first episodes if `reset_all` did not.

        Parameters
        ----------
        actions : sequence or array
            (N,) integers for discrete actions, (N, A) or (N,) floats for continuous ones.
        out : dict, optional
            Arrays to write into, by key; only these keys are filled, and `out` is returned.

        Returns
        -------
        dict
            ``obs`` (N, D) f32, of the next episode where one ended; ``rewards`` (N,) f64; ``terminated`` and
            ``truncated``
            (N,) bool; ``final_obs`` (N, D) f32, what each step really led to; ``episode_return`` (N,) f64 and
            ``episode_length`` (N,) int64, totals of the episode the step belongs to.

        Raises
        ------
        ValueError
            For a wrong number of actions, or an action out of range.
        """
        actions = self._checked(actions)
        if not self._started:
            self.reset_all()
        n = self.n_envs
        if out is None:
            out = {
                "obs": np.empty((n, self.obs_dim), np.float32),
                "rewards": np.empty(n),
                "terminated": np.empty(n, np.bool_),
                "truncated": np.empty(n, np.bool_),
                "final_obs": np.empty((n, self.obs_dim), np.float32),
                "episode_return": np.empty(n),
                "episode_length": np.empty(n, np.int64),
            }
        for i, env in enumerate(self.envs):
            obs, reward, terminated, truncated, _ = env.step(actions[i])
            self._returns[i] += reward
            self._lengths[i] += 1
            row = {
                "rewards": reward,
                "terminated": terminated,
                "truncated": truncated,
                "final_obs": obs,
                "episode_return": self._returns[i],
                "episode_length": self._lengths[i],
            }
            if terminated or truncated:
                obs, _ = env.reset()
                self._returns[i] = 0.0
                self._lengths[i] = 0
            row["obs"] = obs
            for key, array in out.items():
                array[i] = row[key]
        return out

    def _checked(self, actions) -> np.ndarray | list[int]:
        n = self.n_envs
        if not self.discrete:
            actions = np.asarray(actions, np.float32)
            if actions.size != n * self.act_dim:
                raise ValueError(
                    f"GymVecEnv.step_all: actions must have shape ({n}, {self.act_dim}), got {actions.shape}"
                )
            return actions.reshape(n, self.act_dim)
        actions = np.asarray(actions).reshape(-1)
        if actions.dtype.kind not in "iub":
            raise TypeError(f"GymVecEnv.step_all: discrete actions must be integers, got dtype {actions.dtype}")
        if len(actions) != n:
            raise ValueError(f"GymVecEnv.step_all: actions must have length {n}, got {len(actions)}")
        if actions.min() < 0 or actions.max() >= self.n_actions:
            raise ValueError(f"GymVecEnv.step_all: actions must be in [0, {self.n_actions}), got {actions.tolist()}")
        return [int(a) + self._first_action for a in actions]

    def close(self) -> None:
        for env in self.envs:
            env.close()
