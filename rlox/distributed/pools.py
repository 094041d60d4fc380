"""Create the actor pool of a configuration."""

from __future__ import annotations

from rlox.config import ActorLearnerConfig, RayConfig
from rlox.distributed.protocol import ActorPlan, ActorPool
from rlox.envs import EnvSpec


def make_pool(plan: ActorPlan, config: ActorLearnerConfig, spec: EnvSpec, ray: RayConfig | None = None) -> ActorPool:
    """Start the actors of `config`, each from `plan`, in environments of `spec`. `ray` configures actors on Ray.

    Raises
    ------
    ImportError
        If a package that the actors need is not installed.
    Exception
        An exception raised by the creation of their environments.
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
