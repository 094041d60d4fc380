"""HybridPPO: PPO that learns from one rollout while a thread collects the next.

A rollout is then one update old. PPO's ratio is relative to the policy that acted, so this costs little learning
progress. In return, the environments and the learner each run on a core of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from rlox.algorithms.ppo import PPO
from rlox.callbacks import Callback, History, TimingCallback
from rlox.callbacks.loggers import LoggerCallback
from rlox.collectors.candle import CandleCollector
from rlox.collectors.rollout import RolloutBatch
from rlox.config import shown


class _CandleAdapter:
    """Adapter with which PPO's loop uses a `CandleCollector` instead of its `RolloutCollector`."""

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
        # The thread is one rollout ahead. That rollout has not been learned from yet, and is collected again.
        return self.collector.reached()[1]

    def close(self) -> None:
        self.collector.stop()


class HybridPPO:
    """PPO on a native environment with discrete actions, whose rollouts a `rlox.CandleCollector` collects.

    Parameters
    ----------
    env_id : str
        A native environment.
    n_envs, seed : int
        As for `rlox.algorithms.PPO`.
    hidden : int
        Width of both hidden layers.
    logger : LoggerCallback, path or list, optional
        As for `rlox.algorithms.PPO`.
    callbacks : list of Callback, optional
        Called in order, the logger last.
    **config
        Any other field of `rlox.config.PPOConfig`, except for the normalisations. What changes the environments or
        rewards, such as `env_kwargs` and `reward_fn`, is an error.

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
        for name in ("reward_fn", "env_kwargs", "env_wrappers", "env_workers", "env_backend", "remote"):
            if name in config:
                raise TypeError(
                    f"HybridPPO: {name} must be left out, because its CandleCollector takes environments as they are, "
                    f"got {shown(config[name])}; use PPO if you need it"
                )
        self._timing = TimingCallback()
        watching = [self._timing, *(callbacks or ())]
        self.algorithm = PPO(
            env_id, n_envs, seed, None, logger, watching, backend="native", hidden_sizes=[hidden, hidden], **config
        )
        c = self.algorithm.config
        if self.algorithm.normalizer is not None:
            raise ValueError("HybridPPO: normalize_obs and normalize_rewards must be off; use PPO if you need them")
        options = (c.gamma, c.gae_lambda, c.activation)
        ahead = CandleCollector(env_id, n_envs, None, None, c.n_steps, hidden, seed, *options)
        self.algorithm.collector = _CandleAdapter(ahead, self.algorithm.collector)

    @property
    def history(self) -> History:
        """The metrics of all trainings (see `PPO.history`)."""
        return self.algorithm.history

    def __repr__(self) -> str:
        return f"HybridPPO({self.algorithm!r})"

    def train(self, total_timesteps: int, progress: bool = False) -> dict[str, float]:
        """Train for `total_timesteps` environment steps. Returns the last metrics (see `PPO.train`)."""
        return self.algorithm.train(total_timesteps, progress=progress)

    def predict(self, obs: np.ndarray, deterministic: bool = True) -> np.ndarray | int:
        """Return the action for an observation (see `PPO.predict`)."""
        return self.algorithm.predict(obs, deterministic)

    def evaluate(self, *args: Any, **kwargs: Any):
        """Evaluate the policy (see `PPO.evaluate`)."""
        return self.algorithm.evaluate(*args, **kwargs)

    def save(self, path: str) -> None:
        """Write a PPO checkpoint. `PPO.from_checkpoint` continues after the last rollout that was learned from."""
        self.algorithm.save(path)

    def timing_summary(self) -> dict[str, float]:
        """Return ``total_s`` of all training so far, and the shares ``collect`` (waiting for rollouts), ``update`` and
        the others of `TimingCallback.summary`; empty before any training."""
        return self._timing.summary()

    def close(self) -> None:
        """Stop the collecting thread. The trained policy remains usable."""
        self.algorithm.close()
