"""TD3+BC (Fujimoto and Gu 2021, "A minimalist approach to offline reinforcement learning", arXiv:2106.06860).

Departures: those of `rlox.algorithms.td3`.
"""

from __future__ import annotations

import copy

import torch

from rlox.config import TD3BCConfig
from rlox.kernels.nn.ac_learner import NativeTD3
from rlox.kernels.rng import Rng
from rlox.nn.batch import TransitionBatch
from rlox.nn.losses import regularised_policy_loss, smoothed_targets, twin_q_loss
from rlox.nn.networks import polyak_update
from rlox.nn.optimizers import flatten_
from rlox.nn.policies import DeterministicPolicy
from rlox.training.offline import OfflineAlgorithm


class TD3BC(OfflineAlgorithm):
    """TD3 whose policy is held to the dataset's actions; see `rlox.config.TD3BCConfig`.

    Attributes
    ----------
    critics, target : TwinQNetwork
        Online and target network.
    target_policy : DeterministicPolicy
        Follows `policy` as `target` follows `critics`.
    """

    name = "td3_bc"
    Config = TD3BCConfig

    def _make_policy(self, rng: Rng) -> DeterministicPolicy:
        return DeterministicPolicy(**self._policy_arguments(), rng=rng)

    def _setup(self, rng: Rng) -> None:
        self._make_critics(rng)
        # Copies come before the optimisers, which lay the online networks' parameters out anew.
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = self._adam("policy", self.policy)
        self.critic_optimizer = self._adam("critics", self.critics)
        self._saved |= {"target_policy": self.target_policy, "critic_optimizer": self.critic_optimizer}
        if self.backend == "native":
            target_policy = flatten_(list(self.target_policy.parameters()))
            self._use(NativeTD3, policy=self.optimizer.flat, critics=self.critic_optimizer.flat,
                      target_policy=target_policy, target=self._target_block)  # fmt: skip

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """One step of the critics, and of the policy and all targets in every `policy_delay`-th update; metrics as
        tensors ()."""
        c, actions = self.config, self.policy.to_unit(batch.actions)
        self._follow_schedule()

        noise = self._noise(len(batch))
        targets = smoothed_targets(self.target_policy, self.target, batch, noise, c.target_noise, c.noise_clip)
        loss, metrics = twin_q_loss(self.critics, batch.obs, actions, targets, None)
        metrics["grad_norm"] = self.critic_optimizer.step(loss, c.max_grad_norm)
        metrics["td_error"] = metrics.pop("td_errors").mean()
        if (self.counters.updates + 1) % c.policy_delay:
            return metrics

        loss, told = regularised_policy_loss(self.policy, self.critics, batch.obs, actions, c.alpha)
        # The optimiser differentiates by the policy's parameters alone: of the critic, by the actions.
        policy_grad_norm = self.optimizer.step(loss, c.max_grad_norm)
        self._move_target(self.critic_optimizer.flat)
        polyak_update(self.policy, self.target_policy, c.tau)
        return {**metrics, **told, "policy_grad_norm": policy_grad_norm}

    def update_native(self, batch: TransitionBatch) -> dict[str, float]:
        """`update` in one call of the kernel; the same metrics."""
        self._follow_schedule()
        return self._learn_native(
            batch,
            self.rng.normal((len(batch), self.spec.act_dim)),
            move_policy=(self.counters.updates + 1) % self.config.policy_delay == 0,
            learning_rate=self.optimizer.learning_rate,
            **self._settings("tau", "target_noise", "noise_clip", "max_grad_norm", "alpha"),
        )
