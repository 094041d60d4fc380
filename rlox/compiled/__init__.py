"""The Python side of compiled learners: policies and optimisers that share memory with kernels, and the record of the
functions that each kernel replaces, which determines when a kernel may compute instead of PyTorch.
"""

from rlox import lazy

_EXPORTS = {
    "obstacle": "rlox.compiled.guard",
    "q_obstacle": "rlox.compiled.guard",
    "NativeAdam": "rlox.compiled.policies",
    "NativeOptimizer": "rlox.compiled.policies",
    "NativePlayers": "rlox.compiled.players",
    "NativeActor": "rlox.compiled.policies",
    "NativeBoundedPolicy": "rlox.compiled.policies",
    "NativePolicy": "rlox.compiled.policies",
    "NativeQPolicy": "rlox.compiled.policies",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
