"""Policies in environments: collection of rollouts and transitions."""

from rlox import lazy

_EXPORTS = {
    "all_finite": "rlox.kernels.stats",
    "CandleCollector": "rlox.collectors.candle",
    "ReplayCollector": "rlox.collectors.replay",
    "REWARDS": "rlox.collectors.rewards",
    "RewardFn": "rlox.collectors.rewards",
    "reward_name": "rlox.collectors.rewards",
    "sign": "rlox.collectors.rewards",
    "RolloutCollector": "rlox.collectors.rollout",
    "VecNormalize": "rlox.collectors.vec_normalize",
}
__getattr__, __dir__, __all__ = lazy(__name__, _EXPORTS)
