"""What is wrong with the answer of a PettingZoo environment's ``reset`` or ``step``, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlox.envs.failures import NO_ANSWERS, describe_answer, wrong_observation


def wrong_answer(env: Any, hook: str, answer: Any, live: Sequence[Any], spaces: Mapping[Any, Any]) -> str | None:
    """Describe what is wrong with the answer of ``reset`` or ``step`` for the agents `live`; None if nothing is.

    `spaces` has the observation space of each possible agent.
    """
    parts = {"reset": ("observations", "infos")}.get(
        hook, ("observations", "rewards", "terminations", "truncations", "infos")
    )
    if not isinstance(answer, tuple) or len(answer) != len(parts):
        return f"{hook} must return ({', '.join(parts)}), got {describe_answer(answer)}"
    given = dict(zip(parts, answer, strict=True))
    for part, value in given.items():
        if not isinstance(value, Mapping):
            return f"{hook} must return {part} as a dict by agent, got {describe_answer(value)}"
    if not hasattr(env, "agents"):
        return "it must have agents, a list of those that act next, got none"
    names = list(env.agents)
    for name in live:
        # Nothing is required of agents that were removed without flags.
        gone = name not in names and not any(name in given[part] for part in parts[1:-1])
        for part in parts[1:-1] if not gone else ():
            if name not in given[part] and (name in names or part == "rewards"):
                return f"{part} must have every agent that acted, got none for {name!r}, only {list(given[part])}"
    for name in {*live, *names} if hook == "step" else names:
        ended = hook == "step" and given["terminations"].get(name, name not in names)
        if name not in given["observations"]:
            if ended:
                continue
            return (
                f"observations must have every agent that continues or was truncated, got none for {name!r}, only "
                f"{list(given['observations'])}"
            )
        if name in spaces:
            wrong = wrong_observation(spaces[name], given["observations"][name], f"observations of agent {name!r}")
            if wrong is not None:
                return wrong
    return _wrong_numbers(given) if hook == "step" else None


def _wrong_numbers(given: Mapping[str, Any]) -> str | None:
    """Describe what is wrong with the rewards and flags of a step; None if they are valid."""
    for name, reward in given["rewards"].items():
        try:
            if type(reward) in NO_ANSWERS:
                raise TypeError("a text is not a number")
            float(reward)
        except (TypeError, ValueError, OverflowError):
            return f"the reward of agent {name!r} must be a number, got {describe_answer(reward)}"
    for part in ("terminations", "truncations"):
        for name, flag in given[part].items():
            if np.shape(flag) != () or not isinstance(flag, (bool, np.bool_, int, np.integer, np.ndarray)):
                return f"{part} of agent {name!r} must be a bool, got {describe_answer(flag)}"
    return None
