"""Soft Actor-Critic (Haarnoja et al. 2018, arXiv:1801.01290) in its second form (arXiv:1812.05905): twin critics, no
network of state values, and a temperature that is learned.

Departures: the temperature's gradient is taken by its logarithm, as in Stable-Baselines3; time limits bootstrap and are
no terminations.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from rlox.config import SACConfig
from rlox.kernels.nn.ac_learner import NativeSAC
from rlox.nn.batch import TransitionBatch
from rlox.nn.losses import soft_policy_loss
from rlox.nn.policies import SquashedGaussianPolicy
from rlox.training.loops import Rounds
from rlox.training.twin_critic import TwinCriticAlgorithm


class SAC(TwinCriticAlgorithm):
    """SAC for bounded continuous actions; see `rlox.config.SACConfig`, `OffPolicyAlgorithm` for ``buffer`` and the
    like, `TwinCriticAlgorithm` for ``dataset``.

    A `policy` of your own is a `SquashedGaussianPolicy`, or a module ``(B, D) -> (B, 2 A)`` in place of its network:
    means, then log standard deviations, of the Gaussian that a tanh squashes.

    Attributes
    ----------
    log_alpha : nn.Parameter
        Logarithm of the temperature, ().
    """

    name = "sac"
    Config = SACConfig
    Policy = SquashedGaussianPolicy
    outputs = "means and log standard deviations"

    def _setup(self) -> None:
        super()._setup()
        c = self.config
        self.target_entropy = -float(self.spec.act_dim) if c.target_entropy is None else c.target_entropy
        log_alpha = torch.tensor(math.log(c.ent_coef) if c.ent_coef > 0 else -math.inf, device=self.device)
        self.log_alpha = nn.Parameter(log_alpha, requires_grad=c.auto_entropy)
        if c.auto_entropy:
            self.alpha_optimizer = self._saved["alpha_optimizer"] = self._adam("log_alpha", [self.log_alpha])
            self._saved["temperature"] = nn.ParameterDict({"log_alpha": self.log_alpha})
        if c.exploration_noise > 0:
            self._add_noise()
        if self.native is not None:
            self._use(NativeSAC, log_alpha=self.log_alpha.data.view(1))

    @property
    def _tuned_to(self) -> float | None:
        """The entropy that the kernel is to tune the temperature to; None leaves it."""
        return self.target_entropy if self.config.auto_entropy else None

    def update_native(self, batch: TransitionBatch) -> dict[str, float]:
        """`update` in one call of the kernel; the same metrics."""
        noise = self.rng.normal((2, len(batch), self.spec.act_dim))
        return self._learn_native(batch, noise, target_entropy=self._tuned_to)

    def rounds(self, n_steps: int) -> Rounds:
        return self._rounds(n_steps, target_entropy=self._tuned_to)

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """One step of critics, policy and temperature; metrics as tensors ()."""
        c = self.config
        self._follow_schedule()
        noise, next_noise = self._noise(2, len(batch))
        alpha = self.log_alpha.detach().exp()

        with torch.no_grad():
            next_actions, next_log_probs = self.policy.unit_sample(batch.next_obs, next_noise)
            ahead = self.target(batch.next_obs, next_actions).amin(0) - alpha * next_log_probs
            targets = torch.addcmul(batch.rewards, batch.discounts, ahead)
        metrics = self._fit_critics(batch, targets)

        loss, told = self.compiled(soft_policy_loss)(self.policy, self.critics, batch.obs, noise, alpha)
        # The optimiser differentiates by the policy's parameters alone: of the critics, by the actions.
        policy_grad_norm = self.optimizer.step(loss, c.max_grad_norm)
        if c.auto_entropy:
            # d/d log(alpha) of -log(alpha) (log pi + target entropy), averaged
            self.alpha_optimizer.descend([told["entropy"] - self.target_entropy])
        self._move_target()
        return {**metrics, **told, "policy_grad_norm": policy_grad_norm, "alpha": alpha}
