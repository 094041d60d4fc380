"""Deep Q-Network (Mnih et al. 2015, doi:10.1038/nature14236) with the parts of Rainbow (Hessel et al. 2018,
arXiv:1710.02298) that stand each on its own: double, dueling, n-step returns and prioritised replay.

Departures: Adam for RMSprop; the target moves every `target_update_freq` environment steps, not updates, as in
Stable-Baselines3; time limits bootstrap and are no terminations.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rlox.algorithms.base import load_weights_, weights_of
from rlox.algorithms.off_policy import OffPolicyAlgorithm
from rlox.batch import TransitionBatch
from rlox.checkpoint import Checkpoint
from rlox.config import DQNConfig
from rlox.kernels.rng import Rng
from rlox.loops import interpolated, scheduled
from rlox.networks import DiscreteQNetwork, polyak_update
from rlox.optimizers import FlatOptimizer
from rlox.policies import QPolicy
from rlox.streams import Stream


class DQN(OffPolicyAlgorithm):
    """DQN for discrete actions; see `rlox.config.DQNConfig`, and `OffPolicyAlgorithm` for ``buffer`` and its like.

    A `policy` of your own is a module from observations to the values of all actions, ``(B, D) -> (B, n_actions)``.
    """

    name = "dqn"
    Config = DQNConfig
    actions = ("discrete",)

    def _make_policy(self, policy: nn.Module | None) -> None:
        c, spec = self.config, self.spec
        if policy is None:
            obs = spec.obs_shape[0] if len(spec.obs_shape) == 1 else spec.obs_shape
            rng = Rng(self.seed, Stream.INIT)
            policy = DiscreteQNetwork(obs, spec.n_actions, c.hidden_sizes, c.activation, c.dueling, rng)
        elif not isinstance(policy, nn.Module):
            raise TypeError(f"DQN: policy must be a torch.nn.Module, got {type(policy).__name__}")
        policy = policy if isinstance(policy, QPolicy) else QPolicy(policy, spec.n_actions)
        self._require_outputs(policy, spec.n_actions, "the values of all actions")
        self.policy = policy

    def _setup(self) -> None:
        c = self.config
        # Before the optimiser lays the online network's parameters out anew.
        self.target = copy.deepcopy(self.policy).requires_grad_(False)
        self.optimizer = FlatOptimizer(self.policy.parameters(), c.learning_rate, eps=1e-8)
        self._target_period = 0  # environment steps // target_update_freq when the target was last updated
        self.explore()

    def explore(self) -> None:
        c = self.config
        self.policy.epsilon = interpolated(
            c.exploration_initial_eps, c.exploration_final_eps, self.counters.progress, c.exploration_fraction
        )

    def exploration(self) -> dict[str, float]:
        return {"exploration/epsilon": self.policy.epsilon}

    def update(self, batch: TransitionBatch) -> dict[str, torch.Tensor]:
        """One gradient step; metrics as tensors ()."""
        c = self.config
        self.optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, self.counters.progress)
        period = self.counters.env_steps // c.target_update_freq
        if period != self._target_period:
            polyak_update(self.policy, self.target, c.tau)
            self._target_period = period

        with torch.no_grad():
            next_values = self.target(batch.next_obs)
            if c.double_dqn:
                # Double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461): who chooses does not value.
                best = self.policy(batch.next_obs).argmax(-1, keepdim=True)
                ahead = next_values.gather(-1, best).squeeze(-1)
            else:
                ahead = next_values.amax(-1)
            targets = torch.addcmul(batch.rewards, batch.discounts, ahead)

        values = self.policy(batch.obs).gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)
        error = F.smooth_l1_loss if c.loss == "huber" else F.mse_loss
        if batch.weights is None:
            loss = error(values, targets)
        else:
            loss = (batch.weights * error(values, targets, reduction="none")).mean()
        grad_norm = self.optimizer.step(loss, c.max_grad_norm)
        values = values.detach()
        td_errors = (values - targets).abs_()
        if batch.indices is not None:
            self.buffer.update_priorities(batch.indices, td_errors.double().cpu().numpy())
        return {
            "q_loss": loss.detach(),
            "q_value": values.mean(),
            "td_error": td_errors.mean(),
            "grad_norm": grad_norm,
        }

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        info, tensors = super()._own_state()
        return info, {**tensors, "target": weights_of(self.target)}

    def _restore(self, checkpoint: Checkpoint, same_env: bool) -> None:
        super()._restore(checkpoint, same_env)
        load_weights_(self.target, checkpoint.tensors["target"], "DQN: from_checkpoint: the target network")
        self._target_period = self.counters.env_steps // self.config.target_update_freq
        self.explore()

    def _load_weights(self, arrays: dict[str, np.ndarray], where: str) -> None:
        super()._load_weights(arrays, where)
        polyak_update(self.policy, self.target, 1.0)
