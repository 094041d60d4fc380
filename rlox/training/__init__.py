"""How does a training go? Construction, backends, loops, saving and loading: what all algorithms share.

`Learner` says what an algorithm's author provides; the families' base classes have the rest.
"""

from rlox import lazy

_EXPORTS = {
    "Algorithm": "rlox.training.algorithm",
    "Learner": "rlox.training.algorithm",
    "LLMAlgorithm": "rlox.training.post_training",
    "OnPolicyAlgorithm": "rlox.training.on_policy",
    "OffPolicyAlgorithm": "rlox.training.off_policy",
    "OfflineAlgorithm": "rlox.training.offline",
    "follow_schedule": "rlox.training.schedules",
    "scheduled": "rlox.training.schedules",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
