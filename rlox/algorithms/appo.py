"""APPO: PPO's clipped loss (Schulman et al. 2017, arXiv:1707.06347) on V-trace advantages (Espeholt et al. 2018,
arXiv:1802.01561), with actors that collect while the learner updates.

The clipped ratio is relative to the policy that acted, which is a few updates old. It is the importance weight of the
policy gradient, so advantages are V-trace's without the weight rho_t: r_t + gamma vs_{t+1} - V(s_t). Sample Factory
(Petrenko et al. 2020, arXiv:2006.11751) multiplies by both, and counts the weight twice. Other departures as in
`rlox.algorithms.ppo`; there is no target network, as in Sample Factory and unlike RLlib.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint.counters import scheduled
from rlox.collectors import RewardFn
from rlox.collectors.rollout import RolloutBatch
from rlox.config import APPOConfig, RayConfig
from rlox.config.actor_learner import actor_settings
from rlox.distributed import ActorCollector
from rlox.training.on_policy import OnPolicyAlgorithm

if TYPE_CHECKING:
    import torch
    from torch import nn


class APPO(OnPolicyAlgorithm):
    """Asynchronous PPO; takes the arguments of `rlox.IMPALA` and the hyper-parameters of `rlox.config.APPOConfig`."""

    name = "appo"
    Config = APPOConfig

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_actors: int | None = None,
        n_envs: int = 8,
        seed: int = 42,
        policy: nn.Module | None = None,
        logger: LoggerCallback | None = None,
        callbacks: Iterable[Callback] | None = None,
        *,
        worker_addresses: list[str] | None = None,
        ray: RayConfig | None = None,
        **arguments: Any,
    ):
        self.ray = ray
        arguments = {**actor_settings(n_actors, worker_addresses), **arguments}
        super().__init__(env_id, n_envs, seed, policy, logger, callbacks, **arguments)

    def _make_collector(self, n: int, reward_fn: RewardFn | None) -> ActorCollector:
        return ActorCollector(
            self.env_id, n, self.seed, config=self.config, reward_fn=reward_fn, ray=self.ray, weighted=False,
            **self.env_options.for_actors(),
        )  # fmt: skip

    def _capture_obstacle(self) -> str | None:
        if self.config.target_kl is not None:
            return "target_kl looks at the divergence after each minibatch"
        return None

    def update(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        """Run `n_epochs` passes over the batch in minibatches. Returns means over minibatches as scalar tensors."""
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
            for mb in batch.sample_minibatches(c.batch_size, rng=self.rng):
                advantages = normalized(mb.advantages) if c.normalize_advantages else mb.advantages
                loss, metrics = compute(
                    loss_fn, self.policy, mb.obs, mb.actions, mb.log_probs, advantages, mb.returns, mb.values,
                    None, mb.masks, mb.sequences,
                )  # fmt: skip
                if c.target_kl is not None and history and metrics["approx_kl"] > 1.5 * c.target_kl:
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
