"""Policies in environments: collection of rollouts and transitions."""

from importlib import import_module
from typing import Any

from rlox import lazy
from rlox.config.arguments import warn_renamed

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
_getattr, __dir__, __all__ = lazy(__name__, _EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in ("evaluate", "Evaluation"):
        return _getattr(name)
    warn_renamed(f"{__name__}.{name}", f"rlox.evaluation.{name}", "0.14.0")
    return getattr(import_module("rlox.evaluation"), name)
