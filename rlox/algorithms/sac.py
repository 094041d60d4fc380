"""Soft Actor-Critic (Haarnoja et al. 2018, arXiv:1801.01290) in its second form (arXiv:1812.05905): twin critics, no
state-value network, and a learned temperature.

Departures: the gradient of the temperature's loss is taken by its logarithm, as in Stable-Baselines3; time limits
bootstrap and are not terminations.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from rlox.algorithms.actor_critic import ActorCriticAlgorithm
from rlox.checkpoint.counters import follow_schedule
from rlox.collectors.exploration import HeldNoise
from rlox.compiled import NativeActor, NativeBoundedPolicy
from rlox.config import SACConfig
from rlox.gpu.acting import follow_bounded
from rlox.kernels.nn.sac import NativeSAC
from rlox.kernels.rng import Rng
from rlox.nn.actors import SquashedGaussianPolicy
from rlox.nn.batch import TransitionBatch
from rlox.nn.critics.ensemble import draw_critics, follow_critics_
from rlox.nn.critics.losses import critic_loss
from rlox.nn.critics.norms import batch_statistics, scale_units_
from rlox.nn.value_losses import soft_policy_loss
from rlox.training.replay import Rounds


class SAC(ActorCriticAlgorithm):
    """SAC for bounded continuous actions; see `rlox.config.SACConfig`, and `OffPolicyAlgorithm` for ``buffer``,
    ``dataset`` and related arguments. In an environment with discrete actions it is a
    `rlox.algorithms.discrete_sac.DiscreteSAC`.

    A custom `policy` is a `SquashedGaussianPolicy`, or a module ``(B, D) -> (B, 2 A)`` that replaces its network: it
    returns the means, then the log standard deviations, of the Gaussian that a tanh squashes.

    Attributes
    ----------
    critics, target : CriticEnsemble
        See `rlox.algorithms.actor_critic.ActorCriticAlgorithm`.
    optimizer, critic_optimizer : FlatOptimizer, or NativeAdam
        Adam for the policy, and one Adam for all critics together.
    log_alpha : nn.Parameter
        Logarithm of the temperature, ().
    """

    name = "sac"
    Config = SACConfig
    _data_parallel = True
    actions = ("continuous",)
    Policy = SquashedGaussianPolicy
    _outputs = "means and log standard deviations"

    native: NativeBoundedPolicy | None = None

    def setup(self, rng: Rng) -> None:
        c = self.config
        self._make_critics(rng)
        self.optimizer = self.adam("policy", self.policy.parameters())
        self.critic_optimizer = self.keep("critic_optimizer", self.adam("critics", self.critics.parameters()))
        if self.spec.n_actions is not None:
            usual_entropy = c.entropy_fraction * math.log(self.spec.n_actions)
        elif c.entropy_fraction == SACConfig.entropy_fraction:
            usual_entropy = c.entropy_per_action * self.spec.act_dim
        else:
            raise ValueError(
                f"{type(self).__name__}: entropy_fraction must be left out with continuous actions, whose entropy has "
                f"no maximum, got {c.entropy_fraction}; set entropy_per_action or target_entropy"
            )
        self._target_entropy = usual_entropy if c.target_entropy is None else c.target_entropy
        # The entropy to which the kernel tunes the temperature; None leaves the temperature unchanged.
        self._tuned_to = self._target_entropy if c.auto_entropy else None
        start = math.log(c.ent_coef) if c.ent_coef > 0 else -math.inf
        log_alpha = torch.tensor(start, dtype=torch.float32, device=self.device)
        self.log_alpha = nn.Parameter(log_alpha, requires_grad=c.auto_entropy)
        if c.auto_entropy:
            self._alpha_optimizer = self.adam("log_alpha", [self.log_alpha])
            self.keep("alpha_optimizer", self._alpha_optimizer, switch="auto_entropy")
            self.keep("temperature", nn.ParameterDict({"log_alpha": self.log_alpha}), switch="auto_entropy")
        if c.exploration_noise > 0:
            self.collector.exploration = self._make_action_noise(self.collector.n_envs)
        if c.hold_noise > 1:
            self.collector.exploration = HeldNoise(self.collector.n_envs, self.spec.act_dim, c.hold_noise)
        if self.native is not None:
            self._use_kernel(NativeSAC, policy=self.optimizer.flat, critics=self.critic_optimizer.flat,
                            target=self._target_block, log_alpha=self.log_alpha.data.view(1))  # fmt: skip

    def _noise_shape(self, n: int) -> tuple[int, ...]:
        return 2, n, self.spec.act_dim

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """Take one step of the critics and, in every `policy_delay`-th update, of policy and temperature. Returns
        metrics as scalar tensors."""
        c = self.config
        follow_schedule(self.optimizers, c, self.counters.progress)
        noise, next_noise = self._draw_noise(len(batch))
        actions, alpha = self.policy.to_unit(batch.actions), self.log_alpha.detach().exp()

        with torch.no_grad():
            next_actions, next_log_probs = self.policy.unit_sample(batch.next_obs, next_noise)
        loss, metrics = self.backend.compiled(critic_loss)(
            self.critics, self.target, batch.obs, actions, batch.rewards, batch.next_obs, next_actions, batch.discounts,
            batch.weights, alpha * next_log_probs, draw_critics(c, self.rng, self.device), self._renormalizes,
        )  # fmt: skip
        metrics["grad_norm"] = self.critic_optimizer.step(loss, c.max_grad_norm)
        if c.unit_norm:
            self.critics.scale_units_()
        td_errors = metrics.pop("td_errors")
        batch.update_priorities(self.buffer, td_errors)
        metrics["td_error"] = td_errors.mean()
        if not self._moves_policy:
            follow_critics_(self.target, self._target_block, self.critics, self.critic_optimizer.flat, c.tau)
            return {**metrics, "alpha": alpha}

        with batch_statistics(self.policy, self._renormalizes):
            loss, policy_metrics = self.backend.compiled(soft_policy_loss)(
                self.policy, self.critics, batch.obs, noise, alpha, c.policy_value == "mean"
            )
        # The optimiser differentiates by the policy's parameters only; the critics' parameters get no gradient here.
        policy_metrics["policy_grad_norm"] = self.optimizer.step(loss, c.max_grad_norm)
        if c.unit_norm:
            scale_units_(self.policy)
        if c.auto_entropy:
            # d/d log(alpha) of -log(alpha) (log pi + target entropy), averaged
            self._alpha_optimizer.descend([policy_metrics["entropy"] - self._target_entropy])
        follow_critics_(self.target, self._target_block, self.critics, self.critic_optimizer.flat, c.tau)
        return {**metrics, **policy_metrics, "alpha": alpha}

    def update_native(self, batch: TransitionBatch) -> dict[str, float]:
        """Run `update` as a single kernel call. Returns the same metrics."""
        c = self.config
        follow_schedule(self.optimizers, c, self.counters.progress)
        metrics, td_errors = self._net.update(
            batch.array("obs"),
            self.spec.to_unit(batch.array("actions")),
            *map(batch.array, ("rewards", "next_obs", "discounts")),
            self.rng.normal(self._noise_shape(len(batch))),
            batch.array("weights"),
            learning_rate=self.optimizer.learning_rate,
            tau=c.tau,
            max_grad_norm=c.max_grad_norm,
            target_entropy=self._tuned_to,
        )
        batch.update_priorities(self.buffer, td_errors)
        return metrics

    def _make_follower(self, block: np.ndarray) -> NativeActor:
        return follow_bounded(self, block, NativeSAC, log_alpha=1)

    def _rounds(self, n_steps: int) -> Rounds:
        return self._actor_critic_rounds(n_steps, target_entropy=self._tuned_to)
