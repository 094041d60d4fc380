"""Data, models, rewards and sampling backends for the post-training of language models.

The algorithms are in `rlox.algorithms`: sft, reward_model, grpo, dpo, online_dpo, best_of_n.
"""

from rlox import lazy

_EXPORTS = {
    "EnsembleRewardModel": "rlox.llm.rewards.models",
    "LanguageModel": "rlox.llm.models.language",
    "MultiObjectiveReward": "rlox.llm.rewards.models",
    "RemoteReward": "rlox.llm.rewards.http",
    "RewardHTTPServer": "rlox.llm.rewards.http",
    "RewardModelServer": "rlox.llm.rewards.models",
    "Rewards": "rlox.llm.rewards.functions",
    "Sequences": "rlox.llm.tokens",
    "Settings": "rlox.llm.sampling",
    "load_model": "rlox.llm.models.saved",
    "load_tokenizer": "rlox.llm.models.saved",
    "read_rows": "rlox.llm.data",
    "sample": "rlox.llm.sampling",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
