"""Environments with several agents whose copies live on a device as tensors, stepped from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlox.envs.tensor.pursuit import GridPursuit
from rlox.envs.tensor.table import TENSOR_AGENT_IDS
from rlox.envs.tensor.vec_env import TensorVecEnv
from rlox.multi_agent.native import NativeMultiAgentVecEnv
from rlox.multi_agent.spec import MultiAgentStep, check_group_actions

# Environments with several agents that have a tensor version, by id.
TENSOR_AGENT_ENVS = dict(zip(TENSOR_AGENT_IDS, (GridPursuit,), strict=True))


class TensorMultiAgentVecEnv:
    """N copies of an environment with A agents on one device, as `NativeMultiAgentVecEnv` steps them on the host.

    A step copies the actions to the device and the results back. The trajectories are the native ones to float32, and
    the states of both are interchangeable.

    Parameters
    ----------
    env_id : str
        An id in `TENSOR_AGENT_ENVS`.
    n_envs, seed, kwargs
        As for `NativeMultiAgentVecEnv`.
    device : str or torch.device
        Where the copies live.

    Attributes
    ----------
    on : str
        That device. `device` is None, because observations and actions are on the host.

    Raises
    ------
    ValueError, TypeError
        If the id has no tensor version, a number is out of range, or an argument is unknown.
    """

    native = False
    device: str | None = None
    unrestorable_reason: str | None = None

    def __init__(
        self,
        env_id: str,
        n_envs: int = 1,
        seed: int = 0,
        kwargs: dict[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ):
        if env_id not in TENSOR_AGENT_ENVS:
            raise ValueError(
                f"TensorMultiAgentVecEnv: env_id must have a tensor version, got {env_id!r}; those that have one are "
                f"{', '.join(TENSOR_AGENT_ENVS)}"
            )
        arguments = dict(kwargs or {})
        self.spec = NativeMultiAgentVecEnv(env_id, 1, 0, arguments).spec
        arguments.pop("render_mode", None)
        self._env = TENSOR_AGENT_ENVS[env_id](**arguments)
        self._copies = TensorVecEnv(n_envs, seed, self._env, device)
        self.env_id, self.n_envs, self.on = env_id, n_envs, str(device)
        self.max_episode_steps = self._env.max_episode_steps
        self._started = False

    @property
    def seed(self) -> int:
        return self._copies.seed

    def __len__(self) -> int:
        return self.n_envs

    def __repr__(self) -> str:
        return f"TensorMultiAgentVecEnv(env={self.env_id!r}, n={self.n_envs}, device={self.on!r})"

    def reset_all(self, seed: int | None = None) -> MultiAgentStep:
        """See `MultiAgentVecEnv.reset_all`."""
        step = MultiAgentStep.empty(self.spec, self.n_envs)
        self._divide(self._copies.reset_all(seed).cpu().numpy(), step.obs[0], step.state)
        step.alive[0].fill(True)
        self._started = True
        return step

    def step_all(self, actions: Sequence[np.ndarray], out: MultiAgentStep | None = None) -> MultiAgentStep:
        """See `MultiAgentVecEnv.step_all`."""
        if not self._started:
            self.reset_all()
        (own,) = check_group_actions(self.spec, actions, self.n_envs, None, "TensorMultiAgentVecEnv.step_all")
        results = self._copies.step_all(torch.from_numpy(own).to(self._copies.state.device), copy=False)
        arrays = {name: tensor.cpu().numpy() for name, tensor in results.items()}
        out = MultiAgentStep.empty(self.spec, self.n_envs) if out is None else out
        self._divide(arrays["obs"], out.obs[0], out.state)
        self._divide(arrays["final_obs"], out.final_obs[0], out.final_state)
        # What holds for an environment holds for each of its agents.
        for name in ("rewards", "terminated", "truncated"):
            getattr(out, name)[0][...] = arrays[name][:, None]
        out.alive[0].fill(True)
        np.logical_or(arrays["terminated"], arrays["truncated"], out=out.ended)
        out.episode_returns[...] = np.where(out.ended, arrays["episode_return"], np.nan)[:, None]
        out.episode_lengths[...] = np.where(out.ended, arrays["episode_length"], 0)
        return out

    def _divide(self, rows: np.ndarray, obs: np.ndarray, state: np.ndarray) -> None:
        """Write rows (N, A * D + C) of the tensor environment to observations (N, A, D) and states (N, C)."""
        n = obs[0].size
        obs[...] = rows[:, :n].reshape(obs.shape)
        state[...] = rows[:, n:]

    def get_state(self) -> dict[str, np.ndarray] | None:
        """Return everything that the future of the running episodes depends on; None before the first episode."""
        if not self._started:
            return None
        state = self._copies.get_state()
        return state | {"returns": np.repeat(state["returns"][:, None], self.spec.n_agents, 1)}

    def fits(self, state: dict[str, np.ndarray]) -> bool:
        """Return whether `state` comes from environments like these, so that `set_state` may succeed."""
        shapes = {"state": tuple(self._copies.state.shape), "returns": (self.n_envs, self.spec.n_agents)}
        return all(getattr(state.get(name), "shape", None) == shape for name, shape in shapes.items())

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue exactly from the result of `get_state`, here or of native environments.

        Raises
        ------
        ValueError, TypeError
            If it does not fit the environments.
        """
        if not self.fits(state):
            raise ValueError(
                f"TensorMultiAgentVecEnv.set_state: the state must be of {self.n_envs} copies of {self.env_id} with "
                f"{self.spec.n_agents} agents"
            )
        self._copies.set_state(state | {"returns": np.ascontiguousarray(state["returns"][:, 0])})
        self._started = True

    def action_masks(self) -> None:
        """Return None: there are no masks of legal actions."""

    def render(self) -> None:
        """Return None: copies on a device are not drawn."""

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""
