"""N copies of a PettingZoo environment, in this process and as a base for copies in workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlox.envs.state import ForeignEnvs, first_seeds
from rlox.multi_agent.spec import MultiAgentSpec, MultiAgentStep, check_group_actions
from rlox.multi_agent.zoo_copies import ZooCopies


class ForeignMultiAgentVecEnv(ForeignEnvs):
    """Base class of `PettingZooVecEnv` and `ParallelPettingZooVecEnv`, with the handling of input and output arrays."""

    spec: MultiAgentSpec

    def __init__(self, env: Any, n_envs: int, seed: int):
        super().__init__(env, n_envs)
        self.seed = seed
        self._alive: list[np.ndarray] | None = None  # agents that act next, after the last step

    def reset_all(self, seed: int | None = None) -> MultiAgentStep:
        """Start a new episode in all copies; only the first call, and calls with `seed`, seed them."""
        if seed is not None:
            self.seed, self.n_skipped = seed, 0
        seeds: list[int | None] = [None] * self.n_envs
        if seed is not None or not self._started:
            seeds = [*first_seeds(self.seed, self.n_envs, self.n_skipped)]
        out = MultiAgentStep.empty(self.spec, self.n_envs)
        self._at_rest = False
        self._reset(seeds, out)
        self._started = self._at_rest = True
        self._alive = [alive.copy() for alive in out.alive]
        return out

    def step_all(self, actions: Sequence[Any], out: MultiAgentStep | None = None) -> MultiAgentStep:
        """Step every copy once; see `MultiAgentVecEnv.step_all`."""
        actions = check_group_actions(self.spec, actions, self.n_envs, self._alive, f"{type(self).__name__}.step_all")
        if not self._started:
            self.reset_all()
        if out is None:
            out = MultiAgentStep.empty(self.spec, self.n_envs)
        at_rest, self._at_rest = self._at_rest, False
        self._step(actions, out)
        self._at_rest = at_rest
        self._alive = [alive.copy() for alive in out.alive]
        return out

    def action_masks(self) -> None:
        """Return None: masks of legal actions are part of what `reset_all` and `step_all` return."""

    def render(self) -> np.ndarray | None:
        """Return a picture of environment 0, (H, W, 3) uint8; None without ``render_mode="rgb_array"``."""
        return self._group.render()

    def _set_state(self, states: list[Any]) -> None:
        super()._set_state(states)
        self._alive = [np.zeros((self.n_envs, len(group.agents)), np.bool_) for group in self.spec.groups]
        places = {slot: (g, a) for g, group in enumerate(self.spec.groups) for a, slot in enumerate(group.slots)}
        for i, state in enumerate(states):
            for slot in state["live"]:
                g, a = places[slot]
                self._alive[g][i, a] = True


class PettingZooVecEnv(ForeignMultiAgentVecEnv):
    """N copies of a PettingZoo environment in this process, with same-step auto-reset.

    Parameters
    ----------
    env : str or callable
        See `rlox.multi_agent.zoo_make.make_zoo_env`.
    n_envs : int
        Number of copies N.
    seed : int
        Copy i is seeded with an independent mix of (seed, i).
    kwargs : dict, optional
        Arguments of the environment.
    state : str
        ``environment``, ``observations`` or ``auto``; see `rlox.multi_agent.make_multi_agent_env`.

    Raises
    ------
    ValueError
        If the environment breaks PettingZoo's interface, or no policy supports its spaces.
    """

    def __init__(
        self,
        env: str | Callable[..., Any],
        n_envs: int = 1,
        seed: int = 0,
        kwargs: Mapping[str, Any] | None = None,
        state: str = "auto",
    ):
        super().__init__(env, n_envs, seed)
        self._hold(ZooCopies(env, kwargs, first_seeds(seed, n_envs), "PettingZooVecEnv", state=state))
        self.envs = self._group.envs
