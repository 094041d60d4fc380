"""Which pool of actors a configuration asks for."""

from __future__ import annotations

from rlox.config import ActorLearnerConfig, RayConfig
from rlox.distributed.protocol import ActorPlan, ActorPool
from rlox.envs import EnvSpec


def make_pool(plan: ActorPlan, config: ActorLearnerConfig, spec: EnvSpec, ray: RayConfig | None = None) -> ActorPool:
    """The actors of `config`, started; each is made of `plan`, in environments of `spec`. `ray` is for those on Ray.

    Raises
    ------
    ImportError
        If what the actors run in is not installed.
    Exception
        What making their environments has raised.
    """
    if config.actors == "processes":
        from rlox.distributed.processes import ProcessActors

        return ProcessActors(plan, config.n_actors, spec, config.rollouts_ahead)
    if config.actors == "ray":
        from rlox.distributed.ray_actors import RayActors

        return RayActors(plan, config.n_actors, ray)
    if config.actors == "grpc" and plan.remote is not None:
        from rlox.distributed.grpc_actors import GrpcActors

        return GrpcActors(plan, config.n_actors, spec, plan.remote, config.actor_timeout)
    from rlox.distributed.threads import ThreadActors

    return ThreadActors(plan, config.n_actors)
