"""Training with several processes: actors and data parallelism.

Actors run in threads, in processes, on Ray or on workers, behind one protocol (`ActorPool`). `rlox.distributed.ranks`
contains the ranks of a data-parallel training.
"""

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
