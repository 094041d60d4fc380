"""IMPALA: importance-weighted actor-learner (Espeholt et al. 2018, arXiv:1802.01561).

Actors collect rollouts with weights that are a few updates old; V-trace (`rlox.distributed.ActorCollector`) computes
value targets and advantages from them with the learner's own values. The update is one gradient step, as in A2C.

Departures: losses are means over the batch, where the paper sums; the value loss has no factor 1/2; rewards are not
clipped; time limits bootstrap and are not terminations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint.counters import scheduled
from rlox.collectors import RewardFn
from rlox.collectors.rollout import RolloutBatch
from rlox.config import IMPALAConfig, RayConfig
from rlox.config.actor_learner import actor_settings
from rlox.distributed import ActorCollector
from rlox.training.on_policy import OnPolicyAlgorithm

if TYPE_CHECKING:
    import torch
    from torch import nn


class IMPALA(OnPolicyAlgorithm):
    """IMPALA with actors in threads, in processes, on Ray or on other machines.

    Parameters
    ----------
    env_id : str or callable
        A native id, any gymnasium id, or a callable that returns a ``gymnasium.Env``.
    n_actors : int, optional
        Number of actors; 2 by default.
    n_envs : int
        Environments of each actor.
    seed : int
        Determines initial weights, environments and actions.
    policy, logger, callbacks
        As for `rlox.PPO`.
    worker_addresses : list of str, optional
        ``host:port`` of the workers (``rlox worker``) that run the environments, divided among the actors; implies
        ``actors="grpc"``.
    ray : RayConfig, optional
        Where Ray runs, and what an actor reserves there; for ``actors="ray"``.
    **arguments
        Further arguments of `rlox.PPO`, and any field of `rlox.config.IMPALAConfig`.

    Raises
    ------
    TypeError, ValueError
        For an unknown hyper-parameter, a value of the wrong type or out of range, an unknown environment, or a policy
        that does not fit the environment.
    """

    name = "impala"
    Config = IMPALAConfig

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_actors: int | None = None,
        n_envs: int = 2,
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
            self.env_id, n, self.seed, config=self.config, reward_fn=reward_fn, ray=self.ray,
            **self.env_options.for_actors(),
        )  # fmt: skip

    def _capture_obstacle(self) -> str | None:
        return None

    def update(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        """Take one gradient step on the batch. Returns metrics as scalar tensors."""
        from rlox.nn.losses import a2c_loss, normalized

        c = self.config
        self.optimizer.learning_rate = scheduled(c.learning_rate, c.learning_rate_schedule, self.counters.progress)
        advantages = normalized(batch.advantages) if c.normalize_advantages else batch.advantages
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
