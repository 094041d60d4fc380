"""How good is a policy, and how well does a model predict? Whole episodes in separate environments, with videos."""

from rlox import lazy

_EXPORTS = {
    "AgentsEvaluation": "rlox.evaluation.agents",
    "Evaluation": "rlox.evaluation.episodes",
    "evaluate": "rlox.evaluation.episodes",
    "evaluate_agents": "rlox.evaluation.agents",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
