"""Training code shared by all algorithms: construction, backends, loops, saving and loading.

`Learner` specifies what the author of an algorithm provides; the base classes of the families contain the rest.
"""

from rlox import lazy

_EXPORTS = {
    "Agent": "rlox.training.agent",
    "Algorithm": "rlox.training.algorithm",
    "Learner": "rlox.training.algorithm",
    "LLMAlgorithm": "rlox.training.post_training",
    "OnPolicyAlgorithm": "rlox.training.on_policy",
    "OffPolicyAlgorithm": "rlox.training.off_policy",
    "OfflineAlgorithm": "rlox.training.offline",
    "SequenceAlgorithm": "rlox.training.sequences",
    "follow_schedule": "rlox.checkpoint.counters",
    "scheduled": "rlox.checkpoint.counters",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
