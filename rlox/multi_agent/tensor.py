"""Environments with several agents in tensor operations: their specification, and copies that the host steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlox.envs.tensor.base import TensorEnv
from rlox.envs.tensor.table import create, tensor_agent_ids
from rlox.envs.tensor.vec_env import TensorVecEnv
from rlox.multi_agent.spec import MultiAgentSpec, MultiAgentStep, check_group_actions, group_agents


def spec_of(env: TensorEnv) -> MultiAgentSpec:
    """Return what describes a tensor environment with several agents, which are one group.

    Raises
    ------
    ValueError
        If it has one agent.
    """
    agents = env.agents
    if agents is None:
        raise ValueError(
            f"spec_of: env must have several agents, got {env.env_id}, which has one; those that have several are "
            f"{', '.join(tensor_agent_ids())}"
        )
    n = len(agents.names)
    groups = group_agents(agents.names, [0] * n, [agents.spec] * n)
    if agents.state_dim:
        return MultiAgentSpec(agents.names, groups, agents.state_dim, "environment")
    return MultiAgentSpec(agents.names, groups, n * agents.spec.obs_dim, "observations")


def split_rows(rows: Any, spec: MultiAgentSpec) -> tuple[Any, Any]:
    """Split observations (N, …) of all agents as one, arrays or tensors.

    Returns
    -------
    obs, state
        (N, A, D), and (N, S) for a central critic; both may be views.
    """
    n = spec.n_agents * spec.groups[0].spec.obs_dim
    obs = rows[:, :n].reshape(len(rows), spec.n_agents, -1)
    return obs, rows[:, n:] if spec.state_source == "environment" else rows


def merge_state(state: dict[str, np.ndarray], n_agents: int) -> dict[str, np.ndarray]:
    """Return a state of native environments with several agents as one of `TensorVecEnv`, with one return for all."""
    if getattr(state.get("returns"), "shape", (0, 0))[1:] != (n_agents,):
        raise ValueError(f"merge_state: the state must be one with {n_agents} agents")
    return state | {"returns": np.ascontiguousarray(state["returns"][:, 0])}


def spread_state(state: dict[str, np.ndarray], n_agents: int) -> dict[str, np.ndarray]:
    """Return a state of `TensorVecEnv` as one of native environments with several agents, with a return for each."""
    return state | {"returns": np.repeat(state["returns"][:, None], n_agents, 1)}


class TensorMultiAgentVecEnv:
    """N copies of a tensor environment with A agents on the CPU, as `NativeMultiAgentVecEnv` steps native ones.

    Evaluation uses it. Trainings with ``env_backend=tensor`` stay on their device, see
    `rlox.multi_agent.tensor_rollout`. States are interchangeable with those of a native environment of the same id.

    Parameters
    ----------
    env_id : str
        An id of `rlox.envs.tensor.table.tensor_agent_ids`.
    n_envs : int
        N.
    seed : int
        Copy i is seeded with an independent mix of (seed, i).
    kwargs : dict, optional
        Arguments of the environment; those of users have none.

    Raises
    ------
    ValueError, TypeError
        If the id has no tensor version with several agents, a number is out of range, or an argument is unknown.
    """

    native = False
    device: str | None = None
    unrestorable_reason: str | None = None

    def __init__(self, env_id: str, n_envs: int = 1, seed: int = 0, kwargs: dict[str, Any] | None = None):
        if env_id not in tensor_agent_ids():
            raise ValueError(
                "TensorMultiAgentVecEnv: env_id must have a tensor version with several agents, got "
                f"{env_id!r}; those that have one are {', '.join(tensor_agent_ids())}"
            )
        env = create(env_id, **(kwargs or {}))
        self.spec = spec_of(env)
        self._copies = TensorVecEnv(n_envs, seed, env)
        self.env_id, self.n_envs = env_id, n_envs
        self.max_episode_steps = env.max_episode_steps
        self._started = False

    @property
    def seed(self) -> int:
        return self._copies.seed

    def __len__(self) -> int:
        return self.n_envs

    def __repr__(self) -> str:
        return f"TensorMultiAgentVecEnv(env={self.env_id!r}, n={self.n_envs})"

    def reset_all(self, seed: int | None = None) -> MultiAgentStep:
        """See `MultiAgentVecEnv.reset_all`."""
        step = MultiAgentStep.empty(self.spec, self.n_envs)
        step.obs[0][...], step.state[...] = split_rows(self._copies.reset_all(seed).numpy(), self.spec)
        step.alive[0].fill(True)
        self._started = True
        return step

    def step_all(self, actions: Sequence[np.ndarray], out: MultiAgentStep | None = None) -> MultiAgentStep:
        """See `MultiAgentVecEnv.step_all`."""
        if not self._started:
            self.reset_all()
        (own,) = check_group_actions(self.spec, actions, self.n_envs, None, "TensorMultiAgentVecEnv.step_all")
        joined = torch.from_numpy(own.reshape(self.n_envs, -1))
        arrays = {name: tensor.numpy() for name, tensor in self._copies.step_all(joined, copy=False).items()}
        out = MultiAgentStep.empty(self.spec, self.n_envs) if out is None else out
        out.obs[0][...], out.state[...] = split_rows(arrays["obs"], self.spec)
        out.final_obs[0][...], out.final_state[...] = split_rows(arrays["final_obs"], self.spec)
        # What holds for an environment holds for each of its agents.
        for name in ("rewards", "terminated", "truncated"):
            getattr(out, name)[0][...] = arrays[name][:, None]
        out.alive[0].fill(True)
        np.logical_or(arrays["terminated"], arrays["truncated"], out=out.ended)
        out.episode_returns[...] = np.where(out.ended, arrays["episode_return"], np.nan)[:, None]
        out.episode_lengths[...] = np.where(out.ended, arrays["episode_length"], 0)
        return out

    def get_state(self) -> dict[str, np.ndarray] | None:
        """Return everything that the future of the running episodes depends on; None before the first episode."""
        return spread_state(self._copies.get_state(), self.spec.n_agents) if self._started else None

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
        self._copies.set_state(merge_state(state, self.spec.n_agents))
        self._started = True

    def action_masks(self) -> None:
        """Return None: there are no masks of legal actions."""

    def render(self) -> None:
        """Return None: tensor environments are not drawn."""

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""
