"""Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347), with those details of
https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details that Stable-Baselines3 also implements.

Departures: the value loss has no factor 1/2, and value changes are clipped without a maximum
(`rlox.nn.losses.value_loss`), both as in Stable-Baselines3; time limits bootstrap and are not terminations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlox.checkpoint.counters import scheduled
from rlox.collectors.rollout import RolloutBatch
from rlox.config import PPOConfig
from rlox.training.on_policy import OnPolicyAlgorithm

if TYPE_CHECKING:
    import torch


class PPO(OnPolicyAlgorithm):
    """PPO with clipped surrogate, GAE, and one Adam for actor and critic; see `rlox.config.PPOConfig`."""

    name = "ppo"
    Config = PPOConfig
    _data_parallel = True
    _resident = True

    def _capture_obstacle(self) -> str | None:
        if self.config.target_kl is not None:
            return "target_kl looks at the divergence after each minibatch"
        return None

    def update(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        """Run `n_epochs` passes over the rollout in minibatches. Returns means over minibatches as scalar tensors."""
        import torch

        from rlox.nn.losses import PPOLoss, normalized

        c, progress = self.config, self.counters.progress
        clip_eps = scheduled(c.clip_eps, c.clip_eps_schedule, progress)
        if self.backend.compiles and c.clip_eps_schedule != "constant":
            # Each new Python number would recompile.
            clip_eps = torch.as_tensor(clip_eps, dtype=torch.float32, device=self.device)
        loss_fn, compute = PPOLoss(clip_eps, c.vf_coef, c.ent_coef, c.clip_vf), self.backend.compiled(PPOLoss.__call__)
        self.optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, progress)

        history: list[dict[str, torch.Tensor]] = []
        for _ in range(c.n_epochs):
            for mb in batch.sample_minibatches(c.batch_size // self.ranks.size, rng=self.rng):
                advantages = normalized(mb.advantages, self.ranks.total) if c.normalize_advantages else mb.advantages
                loss, metrics = compute(
                    loss_fn, self.policy, mb.obs, mb.actions, mb.log_probs, advantages, mb.returns, mb.values,
                    None, mb.masks, mb.sequences,
                )  # fmt: skip
                if c.target_kl is not None and history and self.ranks.mean(metrics["approx_kl"]) > 1.5 * c.target_kl:
                    break
                metrics["grad_norm"] = self.optimizer.step(loss, c.max_grad_norm)
                history.append(metrics)
            else:
                continue
            break

        means = {name: torch.stack([metrics[name] for metrics in history]).mean() for name in history[0]}
        means["explained_variance"] = batch.explained_variance()
        return means

    def update_native(self, batch: RolloutBatch) -> dict[str, float]:
        """Run `update` as a single kernel call. Returns the same metrics."""
        c, progress = self.config, self.counters.progress
        self.optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, progress)
        columns = ("obs", "actions", "log_probs", "advantages", "returns", "values")
        return self.native.net.ppo(
            *map(batch.array, columns),
            self.rng,
            n_epochs=c.n_epochs,
            batch_size=c.batch_size,
            learning_rate=self.optimizer.learning_rate,
            clip_eps=scheduled(c.clip_eps, c.clip_eps_schedule, progress),
            vf_coef=c.vf_coef,
            ent_coef=c.ent_coef,
            max_grad_norm=c.max_grad_norm,
            clip_vf=c.clip_vf,
            target_kl=c.target_kl,
            normalize_advantages=c.normalize_advantages,
            masks=batch.array("masks"),
        )
