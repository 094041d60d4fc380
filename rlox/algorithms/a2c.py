"""Advantage Actor-Critic, synchronous (Mnih et al. 2016, arXiv:1602.01783): one gradient step per short rollout.

Departures: advantages are computed with GAE (lambda is 1 by default, which gives the paper's n-step return); RMSprop is
PyTorch's, with eps outside the root, as in Stable-Baselines3's default; time limits bootstrap and are not terminations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlox.checkpoint.counters import scheduled
from rlox.collectors.rollout import RolloutBatch
from rlox.config import A2CConfig
from rlox.training.on_policy import OnPolicyAlgorithm

if TYPE_CHECKING:
    import torch


class A2C(OnPolicyAlgorithm):
    """A2C with GAE and one optimiser for actor and critic; see `rlox.config.A2CConfig`."""

    name = "a2c"
    Config = A2CConfig
    _data_parallel = True
    _resident = True

    def _capture_obstacle(self) -> str | None:
        return None

    def update(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        """Take one gradient step on the whole rollout. Returns metrics as scalar tensors."""
        from rlox.nn.losses import a2c_loss, normalized

        c = self.config
        self.optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, self.counters.progress)
        advantages = normalized(batch.advantages, self.ranks.total) if c.normalize_advantages else batch.advantages
        loss, metrics = self.backend.compiled(a2c_loss)(
            self.policy, batch.obs[:], batch.actions, advantages, batch.returns, batch.values, c.vf_coef, c.ent_coef,
            batch.masks, batch.sequences,
        )  # fmt: skip
        metrics["grad_norm"] = self.optimizer.step(loss, c.max_grad_norm)
        metrics["explained_variance"] = batch.explained_variance()
        return metrics

    def update_native(self, batch: RolloutBatch) -> dict[str, float]:
        """Run `update` as a single kernel call. Returns the same metrics."""
        c = self.config
        self.optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, self.counters.progress)
        return self.native.net.a2c(
            *map(batch.array, ("obs", "actions", "advantages", "returns", "values")),
            learning_rate=self.optimizer.learning_rate,
            vf_coef=c.vf_coef,
            ent_coef=c.ent_coef,
            max_grad_norm=c.max_grad_norm,
            normalize_advantages=c.normalize_advantages,
            masks=batch.array("masks"),
        )
