"""How are language models read, sampled from, scored and rewarded? Data, transport and models of post-training.

The algorithms are in `rlox.algorithms`: sft, reward_model, grpo, dpo, online_dpo, best_of_n.
"""

from rlox import lazy

_EXPORTS = {
    "EnsembleRewardModel": "rlox.llm.reward_models",
    "LanguageModel": "rlox.llm.model",
    "MultiObjectiveReward": "rlox.llm.reward_models",
    "RemoteReward": "rlox.llm.reward_http",
    "RewardHTTPServer": "rlox.llm.reward_http",
    "RewardModelServer": "rlox.llm.reward_models",
    "Rewards": "rlox.llm.rewards",
    "Sequences": "rlox.llm.tokens",
    "Settings": "rlox.llm.sampling",
    "load_model": "rlox.llm.saved",
    "load_tokenizer": "rlox.llm.saved",
    "read_rows": "rlox.llm.data",
    "sample": "rlox.llm.sampling",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
