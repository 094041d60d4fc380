"""Twin Delayed Deep Deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477).

Departures: time limits bootstrap and are not terminations; the critics' loss has a factor 1/2, to which Adam is
insensitive.
"""

from __future__ import annotations

import copy

import numpy as np
import torch

from rlox.algorithms.actor_critic import ActorCriticAlgorithm
from rlox.checkpoint.counters import follow_schedule
from rlox.compiled import NativeActor, NativeBoundedPolicy
from rlox.config import TD3Config
from rlox.gpu.acting import follow_bounded
from rlox.kernels.nn.td3 import NativeTD3
from rlox.kernels.rng import Rng
from rlox.nn.actors import DeterministicPolicy, polyak_update
from rlox.nn.batch import TransitionBatch
from rlox.nn.critics.ensemble import draw_critics, follow_critics_
from rlox.nn.critics.losses import critic_loss
from rlox.nn.critics.norms import batch_statistics, scale_units_
from rlox.nn.modules import flatten_
from rlox.nn.value_losses import deterministic_policy_loss, smoothed_actions
from rlox.training.replay import Rounds


class TD3(ActorCriticAlgorithm):
    """TD3 for bounded continuous actions; see `rlox.config.TD3Config`, and `OffPolicyAlgorithm` for ``buffer``,
    ``dataset`` and related arguments.

    A custom `policy` is a `DeterministicPolicy`, or a module ``(B, D) -> (B, A)`` that replaces its network and whose
    outputs a tanh squashes.

    Attributes
    ----------
    critics, target : CriticEnsemble
        See `rlox.algorithms.actor_critic.ActorCriticAlgorithm`.
    target_policy : DeterministicPolicy
        Follows `policy` as `target` follows `critics`; without a target network it is `policy`.
    optimizer, critic_optimizer : FlatOptimizer, or NativeAdam
        Adam for the policy, and one Adam for all critics together.
    """

    name = "td3"
    _samples = False  # `evaluate` and ``rlox collect`` add noise to its actions
    Config = TD3Config
    _data_parallel = True
    actions = ("continuous",)
    Policy = DeterministicPolicy
    _outputs = "one number for each component of an action"

    native: NativeBoundedPolicy | None = None

    def setup(self, rng: Rng) -> None:
        c = self.config
        self._make_critics(rng)
        self.target_policy = self.policy
        if c.target_network:
            self.target_policy = self.keep("target_policy", copy.deepcopy(self.policy).requires_grad_(False).eval())
        self.optimizer = self.adam("policy", self.policy.parameters())
        self.critic_optimizer = self.keep("critic_optimizer", self.adam("critics", self.critics.parameters()))
        if c.noise_correlation > 0:
            self.collector.exploration = self._make_action_noise(self.collector.n_envs)
        else:
            self.policy.noise_std = c.exploration_noise
        if self.native is not None:
            self._use_kernel(NativeTD3, policy=self.optimizer.flat, critics=self.critic_optimizer.flat,
                            target=self._target_block,
                            target_policy=flatten_(list(self.target_policy.parameters())))  # fmt: skip

    def _noise_shape(self, n: int) -> tuple[int, ...]:
        return n, self.spec.act_dim

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """Take one step of the critics and, in every `policy_delay`-th update, of the policy and all targets. Returns
        metrics as scalar tensors."""
        c, actions = self.config, self.policy.to_unit(batch.actions)
        follow_schedule(self.optimizers, c, self.counters.progress)
        noise = self._draw_noise(len(batch))

        next_actions = smoothed_actions(self.target_policy, batch.next_obs, noise, c.target_noise, c.noise_clip)
        loss, metrics = self.backend.compiled(critic_loss)(
            self.critics, self.target, batch.obs, actions, batch.rewards, batch.next_obs, next_actions, batch.discounts,
            batch.weights, None, draw_critics(c, self.rng, self.device), self._renormalizes,
        )  # fmt: skip
        metrics["grad_norm"] = self.critic_optimizer.step(loss, c.max_grad_norm)
        if c.unit_norm:
            self.critics.scale_units_()
        td_errors = metrics.pop("td_errors")
        batch.update_priorities(self.buffer, td_errors)
        metrics["td_error"] = td_errors.mean()
        if not self._moves_policy:
            return metrics

        with batch_statistics(self.policy, self._renormalizes):
            loss, policy_metrics = self.backend.compiled(deterministic_policy_loss)(
                self.policy, self.critics, batch.obs, c.policy_value == "mean"
            )
        # The optimiser differentiates by the policy's parameters only; the critics' parameters get no gradient here.
        policy_metrics["policy_grad_norm"] = self.optimizer.step(loss, c.max_grad_norm)
        if c.unit_norm:
            scale_units_(self.policy)
        follow_critics_(self.target, self._target_block, self.critics, self.critic_optimizer.flat, c.tau)
        if c.target_network:
            polyak_update(self.policy, self.target_policy, c.tau)
        return {**metrics, **policy_metrics}

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
            move_policy=(self.counters.updates + 1) % c.policy_delay == 0,
            learning_rate=self.optimizer.learning_rate,
            tau=c.tau,
            max_grad_norm=c.max_grad_norm,
            target_noise=c.target_noise,
            noise_clip=c.noise_clip,
        )
        batch.update_priorities(self.buffer, td_errors)
        return metrics

    def _make_follower(self, block: np.ndarray) -> NativeActor:
        return follow_bounded(self, block, NativeTD3, target_policy=len(block))

    def _rounds(self, n_steps: int) -> Rounds:
        names = ("policy_delay", "target_noise", "noise_clip", "exploration_noise")
        return self._actor_critic_rounds(n_steps, names, updates=self.counters.updates)

    def _load_weights(self, arrays: dict[str, np.ndarray], where: str) -> None:
        super()._load_weights(arrays, where)
        if self.config.target_network:
            polyak_update(self.policy, self.target_policy, 1.0)
