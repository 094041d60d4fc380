"""PPO that learns from one rollout while a thread collects the next: the documents' HybridPPO.

A rollout is then one update old. PPO's ratio is to the policy that acted, so that this costs little learning; what it
gains is that environments and learner have a core each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from rlox.algorithms.ppo import PPO
from rlox.callbacks import Callback, TimingCallback
from rlox.callbacks.loggers import LoggerCallback
from rlox.collectors.candle import CandleCollector
from rlox.nn.batch import RolloutBatch


class _Ahead:
    """A `CandleCollector` where PPO's loop has its `RolloutCollector`."""

    def __init__(self, collector: CandleCollector, plain: Any):
        self.collector = collector
        self.rng, self.env, self.reward_fn = plain.rng, plain.env, None

    def collect(self, policy: Any, n_steps: int) -> RolloutBatch:
        self.collector.sync_weights(policy.net.parameters)
        found: dict[str, Any] = self.collector.recv()
        found["obs"] = found.pop("observations")
        self.rng.set_state(self.collector.reached()[0])
        return RolloutBatch(**found)

    def metrics(self) -> dict[str, float]:
        return {}

    def lines(self) -> list[str]:
        return []

    def state(self) -> dict[str, np.ndarray] | None:
        # The thread is one rollout ahead. What it collects then is not learned from yet, and is collected again.
        return self.collector.reached()[1]

    def close(self) -> None:
        self.collector.stop()


class HybridPPO:
    """PPO on a native environment with discrete actions, its rollouts by a `rlox.CandleCollector`.

    Parameters
    ----------
    env_id : str
        A native environment.
    n_envs, seed : int
        As `rlox.algorithms.PPO` takes them.
    hidden : int
        Width of both hidden layers.
    logger : LoggerCallback, optional
        Given every metric.
    callbacks : list of Callback, optional
        Called in order, the logger last.
    **config
        Any other field of `rlox.config.PPOConfig`, but the normalisations.

    Raises
    ------
    TypeError, ValueError
        As `PPO` and `CandleCollector`.
    """

    def __init__(
        self,
        env_id: str = "CartPole-v1",
        n_envs: int = 16,
        seed: int = 42,
        hidden: int = 64,
        logger: LoggerCallback | None = None,
        callbacks: Iterable[Callback] | None = None,
        **config: Any,
    ):
        self._timing = TimingCallback()
        watching = [self._timing, *(callbacks or ())]
        self.algorithm = PPO(
            env_id, n_envs, seed, None, logger, watching, backend="native", hidden_sizes=[hidden, hidden], **config
        )
        c = self.algorithm.config
        if self.algorithm.normalizer is not None:
            raise ValueError("HybridPPO: normalize_obs and normalize_rewards must be off; PPO has them")
        options = (c.gamma, c.gae_lambda, c.activation)
        ahead = CandleCollector(env_id, n_envs, None, None, c.n_steps, hidden, seed, *options)
        self.algorithm.collector = _Ahead(ahead, self.algorithm.collector)

    def train(self, total_timesteps: int) -> dict[str, float]:
        """Train for `total_timesteps` environment steps; returns the last metrics (see `PPO.train`)."""
        return self.algorithm.train(total_timesteps)

    def predict(self, obs: np.ndarray, deterministic: bool = True) -> np.ndarray | int:
        """Action for an observation (see `PPO.predict`)."""
        return self.algorithm.predict(obs, deterministic)

    def evaluate(self, *args: Any, **kwargs: Any):
        """As `PPO.evaluate`."""
        return self.algorithm.evaluate(*args, **kwargs)

    def save(self, path: str) -> None:
        """Write a checkpoint, of PPO; `PPO.from_checkpoint` goes on where the last rollout learned from has ended."""
        self.algorithm.save(path)

    def timing_summary(self) -> dict[str, float]:
        """``total_s`` of all training so far, and the shares of it: ``collect`` (waiting for rollouts), ``update`` and
        what else `TimingCallback.summary` names; empty before any."""
        return self._timing.summary()

    def close(self) -> None:
        """End the collecting thread; what was learned stays usable."""
        self.algorithm.close()
