"""How do several processes train one agent? Actors in threads, in processes, on Ray and on workers behind one protocol
(`ActorPool`), and the ranks of a data-parallel training (`rlox.distributed.ranks`)."""

from rlox import lazy

_EXPORTS = {
    "Actor": "rlox.distributed.actor",
    "ActorCollector": "rlox.distributed.collector",
    "ActorLost": "rlox.distributed.protocol",
    "ActorPlan": "rlox.distributed.protocol",
    "ActorPool": "rlox.distributed.protocol",
    "GrpcActors": "rlox.distributed.grpc_actors",
    "ProcessActors": "rlox.distributed.processes",
    "RayActors": "rlox.distributed.ray_actors",
    "ThreadActors": "rlox.distributed.threads",
    "Trajectory": "rlox.distributed.protocol",
    "Weights": "rlox.distributed.protocol",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
