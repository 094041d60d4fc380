"""The Python side of compiled learners: policies and optimisers that share memory with kernels, and the record of the
functions that each kernel replaces, which determines when a kernel may compute instead of PyTorch.
"""

from rlox import lazy

_EXPORTS = {
    "bounded_obstacle": "rlox.native.obstacles",
    "obstacle": "rlox.native.obstacles",
    "q_obstacle": "rlox.native.obstacles",
    "NativeAdam": "rlox.native.optimizer",
    "NativeOptimizer": "rlox.native.optimizer",
    "NativePart": "rlox.native.players",
    "NativePlayers": "rlox.native.players",
    "NativeActor": "rlox.native.policies",
    "NativeBoundedPolicy": "rlox.native.policies",
    "NativePolicy": "rlox.native.policies",
    "NativeQPolicy": "rlox.native.policies",
    "Watch": "rlox.native.watch",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
