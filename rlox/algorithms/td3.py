"""Twin Delayed Deep Deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477).

Departures: time limits bootstrap and are no terminations; the critics' loss has a factor 1/2, which Adam does not see.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from rlox.collectors.exploration import ActionNoise
from rlox.config import TD3Config, require
from rlox.kernels.nn.ac_learner import NativeTD3
from rlox.kernels.rng import Rng
from rlox.nn.batch import TransitionBatch
from rlox.nn.losses import deterministic_policy_loss, smoothed_targets
from rlox.nn.networks import polyak_update
from rlox.nn.optimizers import flatten_
from rlox.nn.policies import DeterministicPolicy
from rlox.training.loops import Rounds
from rlox.training.twin_critic import TwinCriticAlgorithm


class TD3(TwinCriticAlgorithm):
    """TD3 for bounded continuous actions; see `rlox.config.TD3Config`, `OffPolicyAlgorithm` for ``buffer`` and the
    like, `TwinCriticAlgorithm` for ``dataset``.

    A `policy` of your own is a `DeterministicPolicy`, or a module ``(B, D) -> (B, A)`` in place of its network, whose
    outputs a tanh squashes.

    Attributes
    ----------
    target_policy : DeterministicPolicy
        Follows `policy` as `target` follows `critics`.
    """

    name = "td3"
    Config = TD3Config
    Policy = DeterministicPolicy
    outputs = "one number for each component of an action"

    def _setup(self) -> None:
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        super()._setup()
        self._saved["target_policy"] = self.target_policy
        if self.config.noise_correlation > 0:
            self._add_noise()
        else:
            self.policy.noise_std = self.config.exploration_noise
        if self.native is not None:
            self._use(NativeTD3, target_policy=flatten_(list(self.target_policy.parameters())))

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """One step of the critics, and of the policy and all targets in every `policy_delay`-th update; metrics as
        tensors ()."""
        c = self.config
        self._follow_schedule()
        noise = self._noise(len(batch))

        targets = smoothed_targets(self.target_policy, self.target, batch, noise, c.target_noise, c.noise_clip)
        metrics = self._fit_critics(batch, targets)
        if (self.counters.updates + 1) % c.policy_delay:
            return metrics

        loss, told = self.compiled(deterministic_policy_loss)(self.policy, self.critics, batch.obs)
        # The optimiser differentiates by the policy's parameters alone: of the critic, by the actions.
        policy_grad_norm = self.optimizer.step(loss, c.max_grad_norm)
        self._move_target()
        polyak_update(self.policy, self.target_policy, c.tau)
        return {**metrics, **told, "policy_grad_norm": policy_grad_norm}

    def update_native(self, batch: TransitionBatch) -> dict[str, float]:
        """`update` in one call of the kernel; the same metrics."""
        c = self.config
        return self._learn_native(
            batch,
            self.rng.normal((len(batch), self.spec.act_dim)),
            move_policy=(self.counters.updates + 1) % c.policy_delay == 0,
            target_noise=c.target_noise,
            noise_clip=c.noise_clip,
        )

    def rounds(self, n_steps: int) -> Rounds:
        names = ("policy_delay", "target_noise", "noise_clip", "exploration_noise")
        return self._rounds(n_steps, names, updates=self.counters.updates)

    def predict(self, obs: Any, deterministic: bool = True) -> np.ndarray:
        """As `OnlineAlgorithm.predict`; always without noise, whatever `deterministic` says (`evaluate` and `rlox
        collect` add it)."""
        require("TD3.predict", "deterministic", deterministic, bool)
        return super().predict(obs)

    def explored(self, obs: np.ndarray, noise: ActionNoise | None, rng: Rng) -> np.ndarray:
        # Independent noise is the policy's own, which its samples have.
        actions = super().predict(obs, deterministic=False)
        return actions if noise is None else self.spec.clip(actions + noise.draw(rng))

    def _load_weights(self, arrays: dict[str, np.ndarray], where: str) -> None:
        super()._load_weights(arrays, where)
        polyak_update(self.policy, self.target_policy, 1.0)
