"""Vectorised environments of other packages whose copies live on a device, as `rlox.envs.protocols.VecEnv`.

`TorchVecEnv` takes those that speak gymnasium's vector interface with tensors (Isaac Lab, ManiSkill, mjlab), and
`JaxVecEnv` those with Brax's functions, which exchange arrays with PyTorch through DLPack, without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlox.config import integer
from rlox.envs.protocols import step_layout
from rlox.envs.spec import EnvSpec
from rlox.envs.tensor.vec_env import step_tensors

# Names of the part of an observation that a policy reads, in environments that have several.
_POLICY_KEYS = ("policy", "actor", "state")
# Where environments put the observations before a reset: gymnasium 1 and its predecessors, and ManiSkill.
_FINAL_KEYS = ("final_obs", "final_observation")


class DeviceVecEnv:
    """Base class of the adapters: statistics of episodes, and the tensors of a step.

    Attributes
    ----------
    spec : EnvSpec
        Shapes, sizes and bounds.
    n_envs : int
        N.
    device : str
        Where observations, results and actions are.
    capturable : bool
        False: their code runs in every step, so no CUDA graph records it.
    """

    native = False
    capturable = False
    max_episode_steps: int | None = None
    unrestorable_reason: str | None = "their package does not expose the state of a simulation"
    device: str | None

    def __init__(self, spec: EnvSpec, n: int, device: torch.device | str):
        self.spec, self.n_envs = spec, n
        self._returns = torch.zeros(n, dtype=torch.float64, device=device)
        self._steps = torch.zeros(n, dtype=torch.int64, device=device)
        self._device = self._returns.device
        self.device = str(self._device)
        self._obs: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.n_envs

    def reset_all(self, seed: int | None = None) -> torch.Tensor:
        """Start a new episode in every copy and return the observations (N, D) float32."""
        self._obs = self._reset(seed)
        self._returns.zero_()
        self._steps.zero_()
        return self._obs

    def step_all(self, actions: torch.Tensor, out: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Take one step in every copy; see `rlox.envs.tensor.vec_env.TensorVecEnv.step_all`."""
        if self._obs is None:
            self.reset_all()
        out = step_tensors(self.spec, self.n_envs, self._device) if out is None else out
        if wrong := [name for name in out if name not in step_layout(self.spec, self.n_envs)]:
            raise ValueError(f"{type(self).__name__}.step_all: out must have other keys than {wrong}")
        obs, final_obs, rewards, terminated, truncated = self._step(actions)
        self._obs = obs
        self._returns += rewards
        self._steps += 1
        results = {
            "obs": obs, "rewards": rewards, "terminated": terminated, "truncated": truncated, "final_obs": final_obs,
            "episode_return": self._returns, "episode_length": self._steps,
        }  # fmt: skip
        for name, to in out.items():
            to.copy_(results[name])
        ended = terminated | truncated
        self._returns.masked_fill_(ended, 0.0)
        self._steps.masked_fill_(ended, 0)
        return out

    def observe(self) -> torch.Tensor:
        """Return the current observations (N, D) float32; raise a ValueError before the first `reset_all`."""
        if self._obs is None:
            raise ValueError(f"{type(self).__name__}.observe: the environments must be reset first; call reset_all()")
        return self._obs

    def action_masks(self) -> None:
        """Return None: these environments have no masks of legal actions."""

    def prepare(self, n_steps: int) -> None:
        """Do nothing: these environments start their episodes themselves."""

    def get_state(self) -> None:
        """Return None: the state cannot be read."""

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Raise a ValueError: the state cannot be restored."""
        raise ValueError(f"{type(self).__name__}.set_state: {self.unrestorable_reason}")

    def fits(self, state: dict[str, np.ndarray]) -> bool:
        """Return False."""
        return False

    def render(self) -> None:
        """Return None: they draw in windows of their own."""

    def close(self) -> None:
        """Do nothing."""

    def _reset(self, seed: int | None) -> torch.Tensor:
        raise NotImplementedError

    def _step(self, actions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return observations after and before any reset, rewards, terminated and truncated."""
        raise NotImplementedError


class TorchVecEnv(DeviceVecEnv):
    """Copies that speak gymnasium's vector interface and return tensors: Isaac Lab, ManiSkill, mjlab.

    They must reset a copy in the step in which its episode ends. ManiSkill says what that step had led to
    (``final_observation``); Isaac Lab and mjlab do not, and the observation *before* the step takes its place where an
    episode ended, as in RSL-RL: the value of a truncated episode is then that of one step earlier.

    Parameters
    ----------
    env
        The environment: ``num_envs``, ``single_observation_space``, ``single_action_space`` of one copy,
        ``reset(seed=…)`` and ``step(actions)``.
    seed : int, optional
        Passed to the first ``reset``.
    obs_key : str, optional
        The part of a Dict of observations that the policy reads; by default ``policy``, ``actor``, ``state`` or the
        only one.

    Raises
    ------
    ValueError
        If the environment has no such attributes, resets in the step after the end, has spaces other than Box (and
        Discrete for actions), or a Dict without `obs_key`.
    """

    def __init__(self, env: Any, seed: int | None = None, obs_key: str | None = None):
        where = "TorchVecEnv"
        inner = getattr(env, "unwrapped", env)

        def read(name: str, default: Any = None) -> Any:
            value = getattr(env, name, getattr(inner, name, default))
            if value is None:
                raise ValueError(f"{where}: env must have the attribute {name}, got {type(env).__name__} without it")
            return value

        metadata = getattr(env, "metadata", None) or {}
        mode = getattr(metadata.get("autoreset_mode"), "value", None)
        if mode not in (None, "SameStep"):
            raise ValueError(f"{where}: env must reset copies in the step in which they end, got autoreset mode {mode}")
        self.env, self._seed = env, seed
        space = read("single_observation_space")
        parts = getattr(space, "spaces", space if isinstance(space, Mapping) else None)
        self._key = None if parts is None else _choose_key(parts, obs_key, where)
        box = space if parts is None else parts[self._key]
        if getattr(box, "shape", None) is None or len(box.shape) == 0:
            raise ValueError(f"{where}: observations must be a Box, got {box}")
        action = read("single_action_space")
        obs_shape = (int(np.prod(box.shape)),)
        self._first_action = int(getattr(action, "start", 0))
        if hasattr(action, "n"):
            spec = EnvSpec(obs_shape, n_actions=int(action.n))
        elif hasattr(action, "low") and len(action.shape) == 1:
            low, high = (np.asarray(bound, np.float32) for bound in (action.low, action.high))
            spec = EnvSpec(obs_shape, act_dim=action.shape[0], act_low=low, act_high=high)
        else:
            raise ValueError(f"{where}: actions must be Discrete or a Box of one dimension, got {action}")
        super().__init__(spec, int(read("num_envs")), read("device", "cpu"))

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _reset(self, seed: int | None) -> torch.Tensor:
        seed, self._seed = (self._seed if seed is None else seed), None
        obs, _ = self.env.reset(seed=seed)
        return self._rows(obs)

    def _step(self, actions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raw, rewards, terminated, truncated, info = self.env.step(
            actions + self._first_action if self._first_action else actions
        )
        terminated, truncated = terminated.bool(), truncated.bool()
        obs = self._rows(raw)
        final = next((info[key] for key in _FINAL_KEYS if info.get(key) is not None), None)
        # Full tensors, of which only the rows of ended episodes count.
        before: Any = self._obs if final is None else self._rows(final)
        return obs, torch.where((terminated | truncated).unsqueeze(1), before, obs), rewards, terminated, truncated

    def _rows(self, obs: Any) -> torch.Tensor:
        """Return observations as (N, D) float32. A copy: simulators write the next ones to the same memory."""
        obs = obs if self._key is None else obs[self._key]
        return obs.reshape(self.n_envs, -1).to(torch.float32, copy=True)


class JaxVecEnv(DeviceVecEnv):
    """Copies of an environment with Brax's functions, compiled by JAX: Brax, MuJoCo Playground.

    A copy whose episode ends returns to its own first state, as in Brax's ``AutoResetWrapper``, so that no step
    computes a reset of all copies. Only its random key, ``info["rng"]``, goes on, if its state has one.

    Parameters
    ----------
    env
        One environment, without wrappers for batches or resets: ``action_size``,
        ``reset(key) -> state`` and ``step(state, action) -> state`` with ``obs``, ``reward`` and ``done``. Actions are
        in [-1, 1].
    n : int
        Number of copies.
    seed : int
        Seed of the first states.
    max_episode_steps : int
        The time limit.
    obs_key : str, optional
        As for `TorchVecEnv`.

    Raises
    ------
    ImportError
        If JAX is not installed.
    ValueError
        If the observation has several parts and `obs_key` does not name one.
    """

    def __init__(self, env: Any, n: int, seed: int = 0, max_episode_steps: int = 1000, obs_key: str | None = None):
        try:
            import jax
        except ImportError as e:
            raise ImportError("JaxVecEnv needs JAX; install jax, for a GPU jax[cuda13]") from e
        self._jax, self._seed = jax, integer("JaxVecEnv", "seed", seed, 0, 2**64 - 1)
        self._limit = self.max_episode_steps = integer("JaxVecEnv", "max_episode_steps", max_episode_steps, 1)
        self.env, self._n, self._n_resets = env, integer("JaxVecEnv", "n", n, 1), 0
        self._reset_jax, self._step_jax = jax.jit(jax.vmap(env.reset)), jax.jit(self._advance)
        self._key: str | None = None
        first = self._reset_jax(self._draw_keys())
        if isinstance(first.obs, Mapping):
            self._key = _choose_key(first.obs, obs_key, "JaxVecEnv")
        obs, bound = self._rows(first.obs), np.ones(int(env.action_size), np.float32)
        spec = EnvSpec((obs.shape[1],), act_dim=len(bound), act_low=-bound, act_high=bound)
        super().__init__(spec, self._n, obs.device)

    def _draw_keys(self) -> Any:
        random = self._jax.random
        return random.split(random.fold_in(random.PRNGKey(self._seed % 2**31), self._n_resets), self._n)

    def _reset(self, seed: int | None) -> torch.Tensor:
        if seed is not None:
            self._seed, self._n_resets = integer("JaxVecEnv.reset_all", "seed", seed, 0, 2**64 - 1), 0
        self._first = self._state = self._reset_jax(self._draw_keys())
        self._n_resets += 1
        self._taken = self._jax.numpy.zeros(self._n, "int32")
        return self._rows(self._first.obs)

    def _advance(self, state: Any, first: Any, taken: Any, actions: Any) -> tuple[Any, ...]:
        """Step all copies, and return those that ended to their first state. This function is compiled by JAX."""
        jnp = self._jax.numpy
        new = self._jax.vmap(self.env.step)(state, actions)
        taken = taken + 1
        terminated, truncated = new.done.astype(bool), taken >= self._limit
        ended = terminated | truncated

        def choose(a: Any, b: Any) -> Any:
            return jnp.where(ended.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)

        following = self._jax.tree.map(choose, first, new)
        if isinstance(info := getattr(following, "info", None), dict) and "rng" in info:
            info["rng"] = new.info["rng"]  # or every episode would draw the random numbers of the first one
        # PyTorch reads bytes from DLPack in more versions than flags.
        flags = terminated.astype("uint8"), truncated.astype("uint8")
        return following, jnp.where(ended, 0, taken), new.obs, new.reward, *flags

    def _step(self, actions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = self._jax.dlpack.from_dlpack(actions.detach().to(torch.float32).contiguous())
        self._state, self._taken, final, rewards, *flags = self._step_jax(self._state, self._first, self._taken, given)
        terminated, truncated = (torch.from_dlpack(flag).bool() for flag in flags)
        return self._rows(self._state.obs), self._rows(final), torch.from_dlpack(rewards), terminated, truncated

    def _rows(self, obs: Any) -> torch.Tensor:
        return torch.from_dlpack(obs if self._key is None else obs[self._key]).reshape(self._n, -1).float()


class ArrayVecEnv:
    """Copies that live on a device with the arrays of other environments, for evaluations: each step copies.

    Parameters
    ----------
    env
        A `TorchVecEnv`, `JaxVecEnv`, or another environment with their methods.
    """

    def __init__(self, env: Any):
        self.env, self.spec, self.n_envs = env, env.spec, env.n_envs
        self.max_episode_steps: int | None = getattr(env, "max_episode_steps", None)

    def reset_all(self) -> np.ndarray:
        """Start a new episode in every copy and return the observations (N, D) float32."""
        return self.env.reset_all().cpu().numpy()

    def step_all(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """Take one step in every copy, see `rlox.envs.tensor.vec_env.TensorVecEnv.step_all`."""
        results = self.env.step_all(torch.from_numpy(np.ascontiguousarray(actions)).to(self.env.device))
        return {name: tensor.cpu().numpy() for name, tensor in results.items()}

    def action_masks(self) -> None:
        """Return None: these environments have no masks of legal actions."""

    def close(self) -> None:
        """Close the environments."""
        self.env.close()


def _choose_key(parts: Mapping[str, Any], key: str | None, where: str) -> str:
    """Return the name of the part of an observation that the policy reads."""
    names = [key] if key is not None else [*_POLICY_KEYS, *(parts if len(parts) == 1 else ())]
    for name in names:
        if name in parts:
            return name
    raise ValueError(f"{where}: obs_key must be one of {', '.join(parts)}, got {key}")
