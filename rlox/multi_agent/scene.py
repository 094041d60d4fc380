"""Native environments with several agents as PettingZoo environments."""

from __future__ import annotations

import operator
import secrets
from typing import Any

import numpy as np
from gymnasium import spaces

from rlox.envs.registry import is_native_multi_agent
from rlox.kernels.envs.native_env import native_multi_agent_ids
from rlox.multi_agent.native import NativeMultiAgentVecEnv, draw_pursuit
from rlox.multi_agent.spec import MultiAgentStep

try:
    from pettingzoo import ParallelEnv
except ImportError as e:
    raise ImportError(
        'parallel_env needs pettingzoo, which is not installed; pip install "rlox-cli[multi-agent]"'
    ) from e


def parallel_env(env_id: str = "GridPursuit-v0", render_mode: str | None = None, **kwargs: Any) -> NativeParallelEnv:
    """Create a native environment with several agents as a PettingZoo environment with the parallel interface.

    Parameters
    ----------
    env_id : str
        Id of a native environment with several agents.
    render_mode : str, optional
        ``rgb_array``: `render` returns pictures (of GridPursuit-v0).
    **kwargs
        Arguments of the environment; see `NativeMultiAgentVecEnv`.

    Raises
    ------
    ValueError, TypeError
        If the id, the render mode or an argument is invalid.
    """
    if not is_native_multi_agent(env_id):
        raise ValueError(
            f"parallel_env: env_id must be a native environment with several agents, got {env_id!r}; try one of "
            f"{', '.join(native_multi_agent_ids())}"
        )
    return NativeParallelEnv(env_id, render_mode, kwargs)


class NativeParallelEnv(ParallelEnv):
    """One native environment with several agents; see `parallel_env`.

    ``reset(seed=s)`` starts the episodes of environment 0 of ``NativeMultiAgentVecEnv(env_id, n, s)``.
    """

    metadata: dict[str, Any]

    def __init__(self, env_id: str, render_mode: str | None, kwargs: dict[str, Any]):
        drawn = ["rgb_array"] if env_id == "GridPursuit-v0" else []
        if render_mode is not None and render_mode not in drawn:
            raise ValueError(
                f"parallel_env: render_mode must be None{' or rgb_array' if drawn else ''} for {env_id}, got "
                f"{render_mode!r}"
            )
        self._vec = NativeMultiAgentVecEnv(env_id, 1, secrets.randbits(63), kwargs)
        self._native, spec = self._vec.kernel, self._vec.spec
        self.metadata = {"name": env_id, "render_modes": drawn, "render_fps": 5, "is_parallelizable": True}
        self.render_mode = render_mode
        self.possible_agents = list(spec.agents)
        self.agents: list[str] = []
        own = spec.groups[0].spec  # of one agent
        low, high = (-1.0, 1.0) if env_id == "GridPursuit-v0" else (-np.inf, np.inf)
        # Each agent has its own spaces, which are seeded separately.
        self.observation_spaces = {
            agent: spaces.Box(low, high, own.obs_shape, np.float32) for agent in self.possible_agents
        }
        self.action_spaces = {
            agent: spaces.Discrete(own.n_actions)
            if own.discrete
            else spaces.Box(own.act_low, own.act_high, dtype=np.float32)
            for agent in self.possible_agents
        }
        self.state_space = spaces.Box(-np.inf, np.inf, (spec.state_dim,), np.float32)
        self._actions: np.ndarray = np.zeros((1, spec.n_agents, *own.action_shape), own.action_dtype)
        self._out = MultiAgentStep.empty(spec, 1)
        self._state = np.zeros(spec.state_dim, np.float32)  # the state after the last step, before an auto-reset
        self._waits = False  # whether the next episode has already started and waits for `reset`

    def observation_space(self, agent: str) -> spaces.Space:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
        """Start the next episode, or with a seed, the first episode of that seed; `options` are ignored.

        Returns the observations, (D,) float32 each, and empty infos, by agent.
        """
        obs = self._native.observe() if self._waits and seed is None else self._vec.reset_all(seed).obs[0]
        self._waits = False
        self._state = self._native.central()[0]
        self.agents = list(self.possible_agents)
        return dict(zip(self.agents, obs[0], strict=True)), {agent: {} for agent in self.agents}

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Take one step with an action of every agent.

        Returns observations, rewards, terminations, truncations and infos by agent.

        Raises
        ------
        ValueError
            If no episode is running, an agent has no action, or an action is out of range.
        """
        if not self.agents:
            raise ValueError("NativeParallelEnv.step: an episode must be running; call reset() first")
        for a, agent in enumerate(self.agents):
            if agent not in actions:
                raise ValueError(
                    f"NativeParallelEnv.step: actions must have every agent, got none for {agent!r}, only "
                    f"{list(actions)}"
                )
            # `operator.index` rejects fractions, which assignment to an array of integers would truncate.
            self._actions[0, a] = operator.index(actions[agent]) if self._native.discrete else actions[agent]
        out = self._vec.step_all([self._actions], self._out)
        agents, obs = self.agents, out.final_obs[0][0].copy()
        self._state = out.final_state[0].copy()
        terminated, truncated = bool(out.terminated[0][0, 0]), bool(out.truncated[0][0, 0])
        if terminated or truncated:
            self.agents, self._waits = [], True
        return (
            dict(zip(agents, obs, strict=True)),
            dict(zip(agents, out.rewards[0][0].tolist(), strict=True)),
            dict.fromkeys(agents, terminated),
            dict.fromkeys(agents, truncated),
            {agent: {} for agent in agents},
        )

    def state(self) -> np.ndarray:
        """Return the input of a central critic, (S,) float32."""
        return self._state.copy()

    def render(self) -> np.ndarray | None:
        """Return a picture (H, W, 3) uint8 with ``render_mode="rgb_array"``, else None."""
        return None if self.render_mode is None else draw_pursuit(self._state, self._native.params["size"])

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""

    def get_state(self) -> dict[str, Any]:
        """Return everything that the future of the running episode depends on."""
        return {"native": self._native.get_state(), "seen": self._state.copy(), "waits": self._waits}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly from the result of `get_state`; raise a ValueError if it does not fit."""
        seen = state.get("seen")
        if not isinstance(seen, np.ndarray) or seen.shape != self._state.shape or type(state.get("waits")) is not bool:
            raise ValueError(f"NativeParallelEnv.set_state: state must be a result of get_state, got {state!r:.80}")
        self._vec.set_state(state.get("native", {}))
        self._state, self._waits = seen.astype(np.float32), state["waits"]
        self.agents = [] if self._waits else list(self.possible_agents)
