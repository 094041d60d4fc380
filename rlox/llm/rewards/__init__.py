"""Rewards for completions: user functions, reward models, reward servers and preferences."""

from rlox import lazy

_EXPORTS = {
    "EnsembleRewardModel": "rlox.llm.rewards.models",
    "MultiObjectiveReward": "rlox.llm.rewards.models",
    "Preferences": "rlox.llm.rewards.preferences",
    "RemoteReward": "rlox.llm.rewards.http",
    "RewardHTTPServer": "rlox.llm.rewards.http",
    "RewardModelServer": "rlox.llm.rewards.models",
    "Rewards": "rlox.llm.rewards.functions",
    "scores_of": "rlox.llm.rewards.scoring",
    "texts_of": "rlox.llm.rewards.scoring",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
