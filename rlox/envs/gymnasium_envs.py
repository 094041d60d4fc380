"""Native environments with gymnasium's interfaces, for a batch of environments and for one.

They are registered as ``rlox/<id>`` (see `rlox.envs.gym`).
"""

from __future__ import annotations

import math
import secrets
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlox.envs.masks import MASK
from rlox.envs.registry import VecEnv, is_native
from rlox.envs.spec import EnvSpec

_CAR_LOW, _CAR_HIGH = [-1.2, -0.07], [0.6, 0.07]
# Bounds of observations, as in gymnasium's environments of these ids; other ids have none.
_BOUNDS: dict[str, tuple[list[float], list[float]]] = {
    "Acrobot-v1": ([-1, -1, -1, -1, -4 * math.pi, -9 * math.pi], [1, 1, 1, 1, 4 * math.pi, 9 * math.pi]),
    "CartPole-v1": (
        [-4.8, -math.inf, -24 * math.pi / 180, -math.inf],
        [4.8, math.inf, 24 * math.pi / 180, math.inf],
    ),
    "GridWorld-v0": ([0, 0], [1, 1]),
    "MountainCar-v0": (_CAR_LOW, _CAR_HIGH),
    "MountainCarContinuous-v0": (_CAR_LOW, _CAR_HIGH),
    "Pendulum-v1": ([-1, -1, -8], [1, 1, 8]),
}


def native_spaces(env_id: str, spec: EnvSpec) -> tuple[spaces.Box, spaces.Space]:
    """Return the gymnasium spaces of one environment: observations and actions."""
    bounds = _BOUNDS.get(env_id, (-math.inf, math.inf))
    low, high = (np.broadcast_to(np.asarray(bound, np.float32), spec.obs_shape).copy() for bound in bounds)
    observed = spaces.Box(low, high, dtype=np.float32)
    if spec.discrete:
        return observed, spaces.Discrete(spec.n_actions)
    return observed, spaces.Box(spec.act_low, spec.act_high, dtype=np.float32)


def _make_native(
    env_id: str, n: int, module: str | None, max_episode_steps: int | None, render_mode: str | None, where: str
):
    """Create `n` native environments with a seed from the operating system."""
    if module is not None and not is_native(env_id):
        import_module(module)
    if not is_native(env_id):
        raise ValueError(f"{where}: env_id must be native, got {env_id!r}; `rlox ls envs` lists the native ids")
    if render_mode is not None:
        raise ValueError(
            f"{where}: render_mode must be None, got {render_mode!r}; native environments cannot be rendered"
        )
    env = VecEnv(n, secrets.randbits(63), env_id)
    if max_episode_steps not in (None, -1, env.max_episode_steps):
        raise ValueError(
            f"{where}: max_episode_steps must be {env_id}'s own {env.max_episode_steps}, got {max_episode_steps}; "
            "gymnasium.make and vectorization_mode='sync' accept a shorter limit"
        )
    return env


class NativeVectorEnv(VectorEnv):
    """N native environments as a ``gymnasium.vector.VectorEnv``: ``gymnasium.make_vec("rlox/CartPole-v1", 8)``.

    Auto-reset happens in the same step, as in ``SyncVectorEnv(autoreset_mode=SAME_STEP)``. If an episode ends, the
    returned observation is the first of the next episode, and ``info`` contains ``final_obs`` (an object array with a
    row for each episode that ended), ``final_info``, and the masks ``_final_obs`` and ``_final_info``.
    ``final_info["episode"]`` has the return ``r`` and the length ``l`` of the episodes that ended, as with gymnasium's
    RecordEpisodeStatistics around each environment (without the time ``t``); the vector version of that wrapper can be
    applied too. Otherwise ``info`` is empty, except for ``action_mask`` (N, n) bool, the legal actions in the returned
    observations, if the environments have masks. Every step returns new arrays. gymnasium's vector wrappers of
    observations do not support same-step auto-reset; use ``vectorization_mode="sync"``, which steps single copies, with
    them.

    Parameters
    ----------
    num_envs : int
        N.
    env_id : str
        A native id.
    module : str, optional
        Module to import if the id is not known yet.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 1,
        env_id: str = "CartPole-v1",
        module: str | None = None,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ):
        self._env = _make_native(env_id, num_envs, module, max_episode_steps, render_mode, "NativeVectorEnv")
        self._id = env_id
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = native_spaces(env_id, self._env.spec)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self,
        *,
        seed: int | list[int | None] | tuple[int | None, ...] | np.ndarray | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a new episode in all copies, or in those that ``options["reset_mask"]``, (N,) bool, selects.

        An integer seeds each copy with a different mix, as in ``rlox.VecEnv(N, seed, env_id)``, and not with
        ``seed + i``. With a list, copy i is seeded as in ``rlox.VecEnv(1, seed[i], env_id)``. None continues the
        sequence of episodes, which is initially seeded by the operating system. Returns (N, D) f32 observations and an
        empty dict; raises ValueError or TypeError for wrong arguments.
        """
        mask = self._mask(options)
        before = {} if mask is None else self._env.get_state()
        if isinstance(seed, (list, tuple, np.ndarray)):
            self._rekey(list(seed))
            obs = self._env.reset_all()
        else:
            obs = self._env.reset_all(seed)
            super().reset(seed=None if seed is None else int(seed))
        if mask is not None:
            state = self._env.get_state()
            for name, array in state.items():
                array[..., ~mask] = before[name][..., ~mask]
            self._env.set_state(state)
            obs = self._env.observe()
        return obs, self._masks()

    def _masks(self) -> dict[str, np.ndarray]:
        """Return the legal actions of the current observations, as part of an info."""
        masks = self._env.action_masks()
        return {} if masks is None else {MASK: masks, f"_{MASK}": np.ones(self.num_envs, np.bool_)}

    def _mask(self, options: dict[str, Any] | None) -> np.ndarray | None:
        unknown = [key for key in options or () if key != "reset_mask"]
        if unknown:
            raise ValueError(f"NativeVectorEnv.reset: options must contain only reset_mask, got {unknown}")
        mask = (options or {}).get("reset_mask")
        if mask is None:
            return None
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            kind = getattr(mask, "dtype", type(mask).__name__)
            raise TypeError(f"NativeVectorEnv.reset: reset_mask must be a NumPy array of bool, got {kind}")
        if mask.shape != (self.num_envs,) or not mask.any():
            raise ValueError(
                f"NativeVectorEnv.reset: reset_mask must have shape ({self.num_envs},) with some True, got {mask}"
            )
        if not self._env.get_state()["episodes"].all():
            raise ValueError("NativeVectorEnv.reset: reset_mask must be used after a reset of all environments")
        return mask

    def _rekey(self, seeds: list[int | None]) -> None:
        if len(seeds) != self.num_envs:
            raise ValueError(f"NativeVectorEnv.reset: seed must have length {self.num_envs}, got {len(seeds)}")
        state = self._env.get_state()
        for i, seed in enumerate(seeds):
            if seed is not None:
                state["keys"][i] = VecEnv(1, seed, self._id).get_state()["keys"][0]
                state["episodes"][i] = 0
        self._env.set_state(state)

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all copies once with actions (N,) int or (N, A) f32; raises ValueError or TypeError for any others.

        Returns observations (N, D) f32, rewards (N,) f64, terminated and truncated (N,) bool, info.
        """
        out = self._env.step_all(actions)
        terminated, truncated = out["terminated"], out["truncated"]
        ended = terminated | truncated
        info = {**self._masks(), **(self._info(out, ended) if np.count_nonzero(ended) else {})}
        return out["obs"], out["rewards"], terminated, truncated, info

    def _info(self, out: dict[str, np.ndarray], ended: np.ndarray) -> dict[str, Any]:
        final_obs = np.empty(self.num_envs, object)  # filled with None
        for i, row in zip(np.flatnonzero(ended).tolist(), out["final_obs"][ended], strict=True):
            final_obs[i] = row
        episode = {
            "r": np.where(ended, out["episode_return"], 0.0),
            "_r": ended,
            "l": np.where(ended, out["episode_length"], 0),
            "_l": ended.copy(),
        }
        return {
            "final_obs": final_obs,
            "_final_obs": ended.copy(),
            "final_info": {"episode": episode, "_episode": ended.copy()},
            "_final_info": ended.copy(),
        }


class NativeEnv(gymnasium.Env):
    """One native environment as a ``gymnasium.Env``: ``gymnasium.make("rlox/CartPole-v1")``.

    ``reset(seed=s)`` gives the episodes of ``rlox.VecEnv(1, s, env_id)``. This class is for wrappers, checkers and
    evaluation; `NativeVectorEnv` is faster.

    Parameters
    ----------
    env_id, module
        Same as in `NativeVectorEnv`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        env_id: str = "CartPole-v1",
        module: str | None = None,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ):
        self._env = _make_native(env_id, 1, module, max_episode_steps, render_mode, "NativeEnv")
        self.observation_space, self.action_space = native_spaces(env_id, self._env.spec)
        self._running = False
        self._next: np.ndarray | None = None  # first observation of the episode that auto-reset started

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start the next episode, or with a seed its first one; return the observation (D,) f32 and an empty dict."""
        if options:
            raise ValueError(f"NativeEnv.reset: options must be empty, got {options}")
        obs = self._next if seed is None and self._next is not None else self._env.reset_all(seed)
        super().reset(seed=None if seed is None else int(seed))
        self._running, self._next = True, None
        masks = self._env.action_masks()
        return obs[0], {} if masks is None else {MASK: masks[0]}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take one step. Raises ``gymnasium.error.ResetNeeded`` if no episode is running."""
        if not self._running:
            raise gymnasium.error.ResetNeeded("NativeEnv.step: an episode must be running; call reset()")
        out = self._env.step_all(np.asarray(action)[None])
        terminated, truncated = bool(out["terminated"][0]), bool(out["truncated"][0])
        if terminated or truncated:
            self._running, self._next = False, out["obs"]
        info = {MASK: out["final_action_mask"][0]} if self._env.spec.masked else {}
        return out["final_obs"][0], float(out["rewards"][0]), terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        """Return the complete state, for `set_state` of any `NativeEnv` of this id."""
        return {"env": self._env.get_state(), "running": self._running}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly from a state that `get_state` returned (see `rlox.VecEnv.set_state`)."""
        self._env.set_state(state["env"])
        self._running = bool(state["running"])
        started = self._env.get_state()["episodes"].all()
        self._next = self._env.observe() if started and not self._running else None
