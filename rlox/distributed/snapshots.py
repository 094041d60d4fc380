"""Copies of policies for actors, and of their weights for requests."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np

from rlox.distributed.protocol import ActorPlan
from rlox.native import NativePolicy
from rlox.nn.modules import weights_of


def own_policy(plan: ActorPlan) -> ActorPlan:
    """`plan` with a policy that only one actor has, on the CPU."""
    if isinstance(plan.policy, NativePolicy):
        return replace(plan, policy=pickle.loads(pickle.dumps(plan.policy)))
    return replace(plan, policy=copy.deepcopy(plan.policy).to("cpu"))


def snapshot(policy: Any) -> dict[str, np.ndarray]:
    """Copies of all weights of a policy, by the names of its ``state_dict``."""
    if isinstance(policy, NativePolicy):
        return policy.weights()
    return {name: np.array(array) for name, array in weights_of(policy).items()}
