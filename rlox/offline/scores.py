"""D4RL's normalised scores: returns on a scale from 0 (a random policy) to 100 (an expert)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Reference(NamedTuple):
    """Mean undiscounted returns of the two policies."""

    random: float
    expert: float


# Fu et al. 2020, "D4RL: Datasets for Deep Data-Driven Reinforcement Learning", arXiv:2004.07219; the values of its
# package for every dataset of a task. Measured on gym's v2; results on later versions are reported with them as well.
_D4RL = {
    "halfcheetah": Reference(-280.178953, 12135.0),
    "hopper": Reference(-20.272305, 3234.3),
    "walker2d": Reference(1.629008, 4592.3),
    "ant": Reference(-325.6, 3879.7),
    "pen": Reference(96.262799, 3076.8331017826877),
    "hammer": Reference(-274.856578, 12794.134825156867),
    "door": Reference(-56.512833, 2880.5693087298737),
    "relocate": Reference(-6.425911, 4233.877797728884),
}
# gymnasium's Hopper-v5, Gymnasium-Robotics' AdroitHandPen-v1, and D4RL's own hopper-medium-replay-v2 or pen-human-v1.
_TASK = re.compile(r"(?:adroithand)?([a-z0-9]+)(?:-(?:random|medium|expert|replay|full|human|cloned))*-v\d+")


def reference_returns(env_id: str, metadata: Mapping[str, Any] | None = None) -> Reference | None:
    """Return the returns of scores 0 and 100: from a dataset's metadata, else D4RL's for MuJoCo and Adroit, else None.

    >>> reference_returns("Hopper-v5").expert
    3234.3
    """
    known = (metadata or {}).get("reference_returns")
    if known is not None:
        return Reference(float(known["random"]), float(known["expert"]))
    task = _TASK.fullmatch(env_id.lower())
    return _D4RL.get(task[1]) if task else None


def normalized_score(env_id: str, mean_return: float, metadata: Mapping[str, Any] | None = None) -> float | None:
    """Return ``100 (return - random) / (expert - random)``; None if the reference returns are unknown.

    >>> round(normalized_score("Hopper-v5", 3234.3), 6), normalized_score("CartPole-v1", 500.0)
    (100.0, None)
    """
    reference = reference_returns(env_id, metadata)
    if reference is None or not math.isfinite(mean_return) or reference.expert == reference.random:
        return None
    return 100.0 * (mean_return - reference.random) / (reference.expert - reference.random)
