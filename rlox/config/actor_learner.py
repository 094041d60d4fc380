"""Hyper-parameters of algorithms whose actors collect while the learner updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlox.config.base import LEARNING_RATES, TRACE_DECAYS, operational, searched
from rlox.config.on_policy import OnPolicyConfig, PPOConfig
from rlox.config.run import is_address

ACTOR_KINDS = ("threads", "processes", "ray", "grpc")
ACTOR_ORDERS = ("auto", "fixed", "arrival")


def actor_settings(n_actors: int | None, worker_addresses: list[str] | None) -> dict[str, Any]:
    """Return the hyper-parameters that these arguments of IMPALA and APPO abbreviate; None: argument not given."""
    settings: dict[str, Any] = {} if n_actors is None else {"n_actors": n_actors}
    if worker_addresses is not None:
        settings["worker_addresses"] = worker_addresses
        if isinstance(worker_addresses, (list, tuple)) and worker_addresses:
            settings["actors"] = "grpc"
    return settings


@dataclass
class ActorLearnerConfig(OnPolicyConfig):
    """Settings shared by all actor-learners: the actors, and how their rollouts are weighted."""

    actors: str = "threads"  # where actors run: threads, processes, ray, or grpc (on the workers of worker_addresses)
    n_actors: int = 2  # actors, each with env.n_envs environments of its own
    worker_addresses: list[str] = operational(list)  # for actors=grpc, host:port each; or remote.addresses
    rollouts_per_update: int = 1  # rollouts of n_steps in a batch
    rollouts_ahead: int = 1  # pending rollouts per actor: 2 hides the latency to another machine, but adds policy lag
    actor_order: str = "auto"  # fixed: in turn, reproducible with a seed; arrival; auto: fixed on this machine
    actor_timeout: float = operational(120.0)  # seconds until an actor that does not answer counts as lost
    max_restarts: int = operational(10)  # most restarts of each actor; if it is lost once more, the run fails
    rho_bar: float = searched(1.0, "1.0,2.0")  # ratios of value targets and advantages are clipped to this; inf: off
    c_bar: float = searched(1.0, "0.5,1.0")  # ratios of the trace are clipped to this
    replay_rollouts: int = 0  # old rollouts in a batch, in addition to the new ones
    replay_size: int = 100  # rollouts kept for replay

    def rules(self):
        yield from super().rules()
        yield "actors", self.actors in ACTOR_KINDS, f"be one of {', '.join(ACTOR_KINDS)}"
        yield "n_actors", 1 <= self.n_actors <= 4096, "be in [1, 4096]"
        yield "actor_order", self.actor_order in ACTOR_ORDERS, f"be one of {', '.join(ACTOR_ORDERS)}"
        yield "rollouts_per_update", 1 <= self.rollouts_per_update <= 4096, "be in [1, 4096]"
        yield "rollouts_ahead", 1 <= self.rollouts_ahead <= 16, "be in [1, 16]"
        owed = self.n_actors * self.rollouts_ahead
        yield "rollouts_per_update", self.rollouts_per_update <= owed, f"be at most n_actors * rollouts_ahead, {owed}"
        yield "actor_timeout", 0 < self.actor_timeout < float("inf"), "be > 0 and finite"
        yield "max_restarts", self.max_restarts >= 0, "be >= 0"
        yield "rho_bar", self.rho_bar > 0, "be > 0"
        yield "c_bar", self.c_bar >= 0, "be >= 0"
        yield "replay_rollouts", 0 <= self.replay_rollouts <= 4096, "be in [0, 4096]"
        yield "replay_size", 1 <= self.replay_size <= 100_000, "be in [1, 100000]"
        yield "worker_addresses", self.actors == "grpc" or not self.worker_addresses, "be empty unless actors=grpc"
        yield "worker_addresses", all(map(is_address, self.worker_addresses)), "contain host:port addresses"

    def conditions(self):
        yield from super().conditions()
        yield "replay_size", self.replay_rollouts > 0, "replay_rollouts above 0"

    @property
    def local(self) -> bool:
        """Whether the actors start and end with this process."""
        return self.actors in ("threads", "processes")

    @property
    def in_turn(self) -> bool:
        """Whether rollouts are taken from the actors in turn, instead of from the first that answers."""
        return self.local if self.actor_order == "auto" else self.actor_order == "fixed"


@dataclass
class IMPALAConfig(ActorLearnerConfig):
    """Importance-weighted actor-learner (Espeholt et al. 2018, arXiv:1802.01561)."""

    n_steps: int = searched(32, "16,32,64,128")  # steps per environment in one rollout
    learning_rate: float = searched(5e-4, LEARNING_RATES)  # step size of the optimiser at the start
    gae_lambda: float = searched(1.0, TRACE_DECAYS)  # decay of the V-trace per step, in [0, 1]
    max_grad_norm: float | None = searched(40.0, "0.5,1,10,40")  # global gradient norm is clipped to this; null: off
    optimizer: str = searched("rmsprop", "adam,rmsprop")  # adam or rmsprop, both with eps 1e-5
    normalize_advantages: bool = searched(False, "true,false")  # zero mean, unit variance in each batch


@dataclass
class APPOConfig(ActorLearnerConfig, PPOConfig):
    """Asynchronous PPO: PPO's clipped loss on V-trace advantages, with actors that do not wait for the learner."""

    n_steps: int = searched(32, "16,32,64,128")  # steps per environment in one rollout
    n_epochs: int = searched(2, "1,2,4")  # passes over each batch
