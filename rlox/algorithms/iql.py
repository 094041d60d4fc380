"""Implicit Q-Learning (Kostrikov, Nair and Levine 2021, "Offline reinforcement learning with implicit Q-learning",
arXiv:2110.06169): the critics are never evaluated at actions outside the dataset.

Departures: V, policy and critics are all updated with the values that V had before the update, where the reference
implementation updates V first; the losses of the critics and of V differ by constant factors, to which Adam is
insensitive.
"""

from __future__ import annotations

import torch
from torch import nn

from rlox.checkpoint.counters import follow_schedule, scheduled
from rlox.config import IQLConfig
from rlox.kernels.nn.iql import NativeIQL
from rlox.kernels.rng import Rng
from rlox.nn.actors import TanhMeanPolicy
from rlox.nn.batch import TransitionBatch
from rlox.nn.critics.ensemble import TwinQNetwork
from rlox.nn.policies import mlp
from rlox.nn.value_losses import expectile_loss, twin_q_loss, weighted_cloning_loss
from rlox.training.offline import OfflineAlgorithm


class IQL(OfflineAlgorithm):
    """IQL for bounded continuous actions; see `rlox.config.IQLConfig`.

    Attributes
    ----------
    critics, target : TwinQNetwork
        Online and target network.
    value : nn.Module
        V, (B, D) -> (B, 1).
    """

    name = "iql"
    Config = IQLConfig

    critics: TwinQNetwork

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        self.policy = TanhMeanPolicy(**self._policy_arguments(), rng=rng)

    def setup(self, rng: Rng) -> None:
        c, spec = self.config, self.spec
        self._make_critics(rng)
        sizes = [spec.obs_dim, *c.hidden_sizes, 1]
        self.value = self.keep("value", mlp(sizes, c.activation, orthogonal=False, rng=rng).to(self.device))
        self.optimizer = self.adam("policy", self.policy.parameters())
        # One step for critics and V: their losses share no parameter.
        parameters = [*self.critics.parameters(), *self.value.parameters()]
        self.critic_optimizer = self.keep("critic_optimizer", self.adam("critics", parameters))
        if self.backend == "native":
            self._use_kernel(NativeIQL, policy=self.optimizer.flat, critics=self.critic_optimizer.flat,
                            target=self._target_block)  # fmt: skip

    def schedule_values(self, progress: float) -> dict[str, float]:
        found = super().schedule_values(progress)
        if self.config.policy_schedule == "constant":
            return found
        return {**found, "policy_learning_rate": scheduled(found["learning_rate"], "cosine", progress)}

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """Take one step of V, the critics, the policy and the target. Returns metrics as scalar tensors."""
        c, actions, progress = self.config, self.policy.to_unit(batch.actions), self.counters.progress
        follow_schedule(self.optimizers, c, progress)
        self.optimizer.learning_rate = scheduled(self.optimizer.learning_rate, c.policy_schedule, progress)

        with torch.no_grad():
            ahead = self.value(batch.next_obs).squeeze(-1)
            targets = torch.addcmul(batch.rewards, batch.discounts, ahead)
            data_values = self.target(batch.obs, actions).amin(0)
        values = self.value(batch.obs).squeeze(-1)
        advantages = data_values - values
        value_loss = expectile_loss(advantages, c.expectile)
        q_loss, metrics = twin_q_loss(self.critics, batch.obs, actions, targets, None)
        metrics["td_error"] = metrics.pop("td_errors").mean()
        grad_norm = self.critic_optimizer.step(value_loss + q_loss, c.max_grad_norm)

        loss, policy_metrics = weighted_cloning_loss(
            self.policy, batch.obs, actions, advantages.detach(), c.temperature, c.max_weight
        )
        policy_grad_norm = self.optimizer.step(loss, c.max_grad_norm)
        self._target_block.lerp_(self.critic_optimizer.flat[: len(self._target_block)], c.tau)
        norms = {"grad_norm": grad_norm, "policy_grad_norm": policy_grad_norm}
        return {
            **metrics,
            **policy_metrics,
            **norms,
            "value_loss": value_loss.detach(),
            "value": values.detach().mean(),
        }

    def update_native(self, batch: TransitionBatch) -> dict[str, float]:
        """Run `update` as a single kernel call. Returns the same metrics."""
        c, progress = self.config, self.counters.progress
        follow_schedule(self.optimizers, c, progress)
        self.optimizer.learning_rate = scheduled(self.optimizer.learning_rate, c.policy_schedule, progress)
        metrics, _ = self._net.update(
            batch.array("obs"),
            self.spec.to_unit(batch.array("actions")),
            *map(batch.array, ("rewards", "next_obs", "discounts")),
            learning_rate=self.critic_optimizer.learning_rate,
            policy_learning_rate=self.optimizer.learning_rate,
            tau=c.tau,
            expectile=c.expectile,
            temperature=c.temperature,
            max_weight=c.max_weight,
            max_grad_norm=c.max_grad_norm,
        )
        return metrics
