"""What is wrong with the answer of a PettingZoo environment's ``reset`` or ``step``, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlox.envs.failures import describe_answer, wrong_numbers, wrong_observation


def wrong_answer(env: Any, hook: str, answer: Any, live: Sequence[Any], spaces: Mapping[Any, Any]) -> str | None:
    """Describe what is wrong with the answer of ``reset`` or ``step`` for the agents `live`; None if nothing is.

    `spaces` has the observation space of each possible agent.
    """
    parts = {"reset": ("observations", "infos")}.get(
        hook, ("observations", "rewards", "terminations", "truncations", "infos")
    )
    if not isinstance(answer, tuple) or len(answer) != len(parts):
        return f"{hook} must return ({', '.join(parts)}), got {describe_answer(answer)}"
    values = dict(zip(parts, answer, strict=True))
    for part, value in values.items():
        if not isinstance(value, Mapping):
            return f"{hook} must return {part} as a dict by agent, got {describe_answer(value)}"
    if not hasattr(env, "agents"):
        return "it must have agents, a list of those that act next, got none"
    names = list(env.agents)
    for name in live:
        # Nothing is required of agents that were removed without flags.
        gone = name not in names and not any(name in values[part] for part in parts[1:-1])
        for part in parts[1:-1] if not gone else ():
            if name not in values[part] and (name in names or part == "rewards"):
                return f"{part} must have every agent that acted, got none for {name!r}, only {list(values[part])}"
    for name in {*live, *names} if hook == "step" else names:
        ended = hook == "step" and values["terminations"].get(name, name not in names)
        if name not in values["observations"]:
            if ended:
                continue
            return (
                f"observations must have every agent that continues or was truncated, got none for {name!r}, only "
                f"{list(values['observations'])}"
            )
        if name in spaces:
            wrong = wrong_observation(spaces[name], values["observations"][name], f"observations of agent {name!r}")
            if wrong is not None:
                return wrong
    if hook == "reset":
        return None
    rewards, *flags = (
        {f"{what} of agent {name!r}": value for name, value in values[part].items()}
        for part, what in (("rewards", "the reward"), ("terminations", "terminations"), ("truncations", "truncations"))
    )
    return wrong_numbers(rewards, flags[0] | flags[1])
