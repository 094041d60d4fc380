"""The trainers of the documents: an algorithm under one name, whatever it is."""

from __future__ import annotations

from typing import Any

import numpy as np


class PPOTrainer:
    """``PPOTrainer(env="CartPole-v1", seed=42).train(total_timesteps=50_000)``; the algorithm itself is ``.algorithm``.

    Parameters
    ----------
    env : str or callable
        Environment id, or a callable that returns a ``gymnasium.Env``.
    **kwargs
        Everything `rlox.algorithms.PPO` takes: ``n_envs seed policy logger callbacks device threads`` and every field
        of `rlox.config.PPOConfig`.
    """

    def __init__(self, env: Any, **kwargs: Any):
        from rlox.algorithms.ppo import PPO

        self.algorithm = PPO(env, **kwargs)

    def train(self, total_timesteps: int) -> dict[str, float]:
        """Train for `total_timesteps` environment steps; returns the last metrics (see `OnlineAlgorithm.train`)."""
        return self.algorithm.train(total_timesteps)

    def predict(self, obs: Any, deterministic: bool = True) -> np.ndarray | int:
        """Action for an observation (see `OnlineAlgorithm.predict`)."""
        return self.algorithm.predict(obs, deterministic)

    def save(self, path: str) -> None:
        """Write a checkpoint."""
        self.algorithm.save(path)
