"""The trainers of the documents: an algorithm under one name, whatever it is."""

from __future__ import annotations

from typing import Any

import numpy as np


class Trainer:
    """What the trainers share: the algorithm, and its verbs under the same names."""

    algorithm: Any

    def train(self, total_timesteps: int | None = None) -> dict[str, float]:
        """Train for `total_timesteps` environment steps; returns the last metrics (see `OnlineAlgorithm.train`)."""
        return self.algorithm.train(total_timesteps)

    def predict(self, obs: Any, deterministic: bool = True) -> np.ndarray | int:
        """Action for an observation (see `OnlineAlgorithm.predict`)."""
        return self.algorithm.predict(obs, deterministic)

    def save(self, path: str) -> None:
        """Write a checkpoint."""
        self.algorithm.save(path)


class PPOTrainer(Trainer):
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


class A2CTrainer(Trainer):
    """`A2C` as `PPOTrainer` is PPO; every field of `rlox.config.A2CConfig`."""

    def __init__(self, env: Any, **kwargs: Any):
        from rlox.algorithms.a2c import A2C

        self.algorithm = A2C(env, **kwargs)


class DQNTrainer(Trainer):
    """`DQN` as `PPOTrainer` is PPO; every field of `rlox.config.DQNConfig`, and ``buffer`` and its short forms."""

    def __init__(self, env: Any, **kwargs: Any):
        from rlox.algorithms.dqn import DQN

        self.algorithm = DQN(env, **kwargs)


class SACTrainer(Trainer):
    """`SAC` as `PPOTrainer` is PPO; every field of `rlox.config.SACConfig`, and ``buffer`` and its short forms."""

    def __init__(self, env: Any, **kwargs: Any):
        from rlox.algorithms.sac import SAC

        self.algorithm = SAC(env, **kwargs)


class TD3Trainer(Trainer):
    """`TD3` as `PPOTrainer` is PPO; every field of `rlox.config.TD3Config`, and ``buffer`` and its short forms."""

    def __init__(self, env: Any, **kwargs: Any):
        from rlox.algorithms.td3 import TD3

        self.algorithm = TD3(env, **kwargs)
