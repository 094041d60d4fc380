"""Acting step by step with a trained agent, outside of training and evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlox.checkpoint.streams import Stream
from rlox.config import MOST_AT_ONCE, integer, require
from rlox.envs.spec import read_mask, read_observations, split_mask, write_actions
from rlox.kernels.rng import Rng
from rlox.nn.acting import EpisodeActor, acting_policy


class Session:
    """An agent in N environments that the caller steps; it keeps the state of the agent's memory for each of them.

    The agent is not copied: when it trains on, the session acts with the new weights.

    Parameters
    ----------
    agent : rlox.training.Agent
        The agent, with a memory or without.
    n : int
        Number of environments N.
    deterministic : bool
        Whether to take the most likely actions instead of sampling; a deterministic policy takes the same either way.
    seed : int
        Determines sampled actions; a custom module draws from PyTorch's own generators, which are not seeded.

    Raises
    ------
    TypeError, ValueError
        If `n` is not a positive integer, or `deterministic` not a boolean; if the agent can only sample; if there are
        several agents.
    """

    def __init__(self, agent: Any, n: int = 1, deterministic: bool = True, seed: int = 0):
        self._agent, self._n = agent, integer("session", "n", n, 1, MOST_AT_ONCE)
        require("session", "deterministic", deterministic, bool)
        if getattr(agent, "several", False):
            raise ValueError(
                "session: agent must be the only one of its environment; predict_all acts for several agents"
            )
        self._deterministic, self._rng = deterministic or not agent._samples, Rng(seed, Stream.EVALUATION)
        self._actor = self._begin()

    def predict(self, obs: Any, mask: Any = None) -> Any:
        """Return the actions for the next observations, and remember what was seen.

        Parameters
        ----------
        obs : Any
            One observation (only if N is 1) or a batch of N, as in `rlox.PPO.predict`.
        mask : array, optional
            The legal actions, (n,) or (N, n) bool, as in `rlox.PPO.predict`.

        Returns
        -------
        int or array
            As the environment's ``step`` takes it; actions for a batch if `obs` is one.

        Raises
        ------
        ValueError, TypeError
            As `rlox.PPO.predict`; also for another number of observations.
        """
        spec, agent = self._agent.spec, self._agent
        agent.backend.require_unchanged("predict")
        obs, mask = split_mask(spec, obs, mask)
        rows, single = read_observations("session.predict", spec, obs)
        if len(rows) != self._n:
            raise ValueError(f"session.predict: obs must be of {self._n} environments, got {len(rows)}")
        actions = self._actor.act(rows, read_mask("session.predict", spec, mask, self._n))
        return write_actions(spec, spec.clip(actions), single)

    def reset(self, ended: Any = None) -> None:
        """Start new episodes: in the environments that `ended`, (N,) bool, marks, or in all."""
        if ended is None:
            self._actor = self._begin()
            return
        flags = np.atleast_1d(np.asarray(ended))
        if flags.shape != (self._n,) or flags.dtype != np.bool_:
            raise ValueError(f"session.reset: ended must be {self._n} flags, got {ended!r}")
        self._actor.end(flags)

    def _begin(self) -> EpisodeActor:
        agent = self._agent
        policy = acting_policy(agent.actor, agent.device)
        if self._deterministic:
            policy.require_mode("session")
        transform = None if agent.normalizer is None else agent.normalizer.normalize
        return EpisodeActor(policy, self._n, self._rng, self._deterministic, transform)
