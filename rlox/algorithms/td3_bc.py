"""TD3+BC (Fujimoto and Gu 2021, "A minimalist approach to offline reinforcement learning", arXiv:2106.06860).

Departures as in `rlox.algorithms.td3`.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from rlox.checkpoint.counters import follow_schedule
from rlox.config import TD3BCConfig
from rlox.kernels.nn.td3 import NativeTD3
from rlox.kernels.rng import Rng
from rlox.nn.actors import DeterministicPolicy, polyak_update
from rlox.nn.batch import TransitionBatch
from rlox.nn.critics.ensemble import TwinQNetwork
from rlox.nn.modules import flatten_
from rlox.nn.value_losses import regularised_policy_loss, smoothed_targets, twin_q_loss
from rlox.training.offline import OfflineAlgorithm


class TD3BC(OfflineAlgorithm):
    """TD3 whose policy is regularised towards the dataset's actions; see `rlox.config.TD3BCConfig`.

    Attributes
    ----------
    critics, target : TwinQNetwork
        Online and target network.
    target_policy : DeterministicPolicy
        Follows `policy` as `target` follows `critics`.
    """

    name = "td3_bc"
    Config = TD3BCConfig

    critics: TwinQNetwork

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        self.policy = DeterministicPolicy(**self._policy_arguments(), rng=rng)

    def setup(self, rng: Rng) -> None:
        self._make_critics(rng)
        self.target_policy = self.keep("target_policy", copy.deepcopy(self.policy).requires_grad_(False))
        self.optimizer = self.adam("policy", self.policy.parameters())
        self.critic_optimizer = self.keep("critic_optimizer", self.adam("critics", self.critics.parameters()))
        if self.backend == "native":
            self._use_kernel(NativeTD3, policy=self.optimizer.flat, critics=self.critic_optimizer.flat,
                            target=self._target_block,
                            target_policy=flatten_(list(self.target_policy.parameters())))  # fmt: skip

    def _noise_shape(self, n: int) -> tuple[int, ...]:
        return n, self.spec.act_dim

    @property
    def _moves_policy(self) -> bool:
        """Whether the next update is one of those, every `policy_delay`-th, that move the policy."""
        return (self.counters.updates + 1) % self.config.policy_delay == 0

    def _branch(self) -> tuple[bool, ...]:
        return (self._moves_policy,)

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """Take one step of the critics and, in every `policy_delay`-th update, of the policy and all targets. Returns
        metrics as scalar tensors."""
        c, actions = self.config, self.policy.to_unit(batch.actions)
        follow_schedule(self.optimizers, c, self.counters.progress)
        noise = self._draw_noise(len(batch))

        targets = smoothed_targets(self.target_policy, self.target, batch, noise, c.target_noise, c.noise_clip)
        loss, metrics = twin_q_loss(self.critics, batch.obs, actions, targets, None)
        metrics["grad_norm"] = self.critic_optimizer.step(loss, c.max_grad_norm)
        metrics["td_error"] = metrics.pop("td_errors").mean()
        if not self._moves_policy:
            return metrics

        loss, policy_metrics = regularised_policy_loss(self.policy, self.critics, batch.obs, actions, c.alpha)
        # The optimiser differentiates by the policy's parameters only; the critics' parameters get no gradient here.
        policy_metrics["policy_grad_norm"] = self.optimizer.step(loss, c.max_grad_norm)
        self._target_block.lerp_(self.critic_optimizer.flat, c.tau)
        polyak_update(self.policy, self.target_policy, c.tau)
        return {**metrics, **policy_metrics}

    def update_native(self, batch: TransitionBatch) -> dict[str, float]:
        """Run `update` as a single kernel call. Returns the same metrics."""
        c = self.config
        follow_schedule(self.optimizers, c, self.counters.progress)
        metrics, _ = self._net.update(
            batch.array("obs"),
            self.spec.to_unit(batch.array("actions")),
            *map(batch.array, ("rewards", "next_obs", "discounts")),
            self.rng.normal(self._noise_shape(len(batch))),
            move_policy=self._moves_policy,
            learning_rate=self.optimizer.learning_rate,
            tau=c.tau,
            target_noise=c.target_noise,
            noise_clip=c.noise_clip,
            max_grad_norm=c.max_grad_norm,
            alpha=c.alpha,
        )
        return metrics
