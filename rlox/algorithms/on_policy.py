"""What PPO, A2C and their like share beside `OnlineAlgorithm`: rollouts, one optimiser, normalisation."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlox import loops
from rlox.algorithms.base import OnlineAlgorithm
from rlox.collectors import RolloutCollector
from rlox.kernels.rng import Rng
from rlox.optimizers import FlatOptimizer
from rlox.policies import check_policy, make_policy
from rlox.streams import Stream
from rlox.vec_normalize import VecNormalize


class OnPolicyAlgorithm(OnlineAlgorithm):
    """Base of algorithms that learn from what the present policy has just done.

    A `policy` of your own defines ``get_action_and_logprob``, ``get_value`` and ``get_logprob_and_entropy`` (see
    `rlox.policies`). ``update(batch)`` is given a `rlox.batch.RolloutBatch`.
    """

    loop = staticmethod(loops.on_policy)
    stream = Stream.PERMUTATION

    def _make_collector(self, *args: Any, **kwargs: Any) -> RolloutCollector:
        return RolloutCollector(*args, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda, **kwargs)

    def _make_policy(self, policy: nn.Module | None) -> nn.Module:
        self.normalizer = self.collector.normalizer = self._make_normalizer()
        if policy is None:
            policy = make_policy(self.spec, self.config, Rng(self.seed, Stream.INIT))
        check_policy(policy, type(self).__name__)
        return policy

    def _setup(self) -> None:
        c = self.config
        self.optimizer = FlatOptimizer(self.policy.parameters(), c.learning_rate, kind=c.optimizer)

    def _make_normalizer(self) -> VecNormalize | None:
        c = self.config
        if not (c.normalize_obs or c.normalize_rewards):
            return None
        if c.normalize_obs and self.spec.image:
            raise ValueError(
                f"{type(self).__name__}: normalize_obs must be false for images, which are scaled to [0, 1] already"
            )
        return VecNormalize(
            self.n_envs,
            self.spec.obs_shape,
            c.gamma,
            c.normalize_obs,
            c.normalize_rewards,
            c.clip_obs,
            c.clip_rewards,
        )
