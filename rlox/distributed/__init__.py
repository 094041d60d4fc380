"""How do many actors feed one learner? Actors in threads, in processes, on Ray and on workers, behind one protocol."""

from rlox import lazy

_EXPORTS = {
    "Actor": "rlox.distributed.actor",
    "ActorCollector": "rlox.distributed.collector",
    "ActorLost": "rlox.distributed.protocol",
    "ActorPlan": "rlox.distributed.protocol",
    "ActorPool": "rlox.distributed.protocol",
    "RayActors": "rlox.distributed.ray_actors",
    "ThreadActors": "rlox.distributed.threads",
    "Trajectory": "rlox.distributed.protocol",
    "Weights": "rlox.distributed.protocol",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
