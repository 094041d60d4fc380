"""Copies of policies for actors, plans for other processes, and weights for requests."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np

from rlox.compiled import NativePolicy
from rlox.distributed.protocol import ActorPlan
from rlox.envs import env_name
from rlox.envs.workers import sendable
from rlox.nn.modules import copied, weights_of


def own_policy(plan: ActorPlan) -> ActorPlan:
    """Return `plan` with its own copy of the policy, on the CPU."""
    if isinstance(plan.policy, NativePolicy):
        return replace(plan, policy=pickle.loads(pickle.dumps(plan.policy)))
    return replace(plan, policy=copied(plan.policy).to("cpu"))


def sendable_plan(where: str, plan: ActorPlan, *more: Any) -> bytes:
    """Pickle `plan` and `more` for another process (`rlox.envs.workers.unpacked`).

    Raises
    ------
    TypeError
        If cloudpickle cannot send it.
    """
    try:
        return sendable((plan, *more), plan.env_id)
    except Exception as e:
        raise TypeError(
            f"{where}: {env_name(plan.env_id)}, its kwargs, reward_fn and policy must be such that cloudpickle can "
            f"send them to another process: {e}; pass an id, or use actors=threads"
        ) from e


def snapshot(policy: Any) -> dict[str, np.ndarray]:
    """Copy all weights of a policy, by the names of its ``state_dict``."""
    if isinstance(policy, NativePolicy):
        return policy.weights()
    return {name: np.array(array) for name, array in weights_of(policy).items()}
