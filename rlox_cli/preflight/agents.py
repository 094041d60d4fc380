"""Probe an environment with several agents in a few random steps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rlox.config import RunConfig
from rlox.multi_agent import make_multi_agent_env
from rlox_cli.preflight.play import random_actions, same
from rlox_cli.terminal.errors import UsageError

# Limits of the probe in CPU seconds and steps, and how many steps are taken twice to check that a seed repeats them.
_SECONDS, _STEPS, _PAIR_STEPS = 0.2, 1000, 200


def probe_agents(config: RunConfig, where: str) -> tuple[list[int], float, bool, list[str]]:
    """Step two copies of an environment with random actions.

    Returns
    -------
    tuple
        Lengths of the episodes that ended, mean reward of a step over all agents, whether the reward was constant, and
        warnings.

    Raises
    ------
    UsageError
        If the environment breaks PettingZoo's interface, or returns numbers that are not finite.
    """
    c, rng = config.env, np.random.default_rng(config.seed)
    try:
        first, second = (make_multi_agent_env(c.id, 1, config.seed, c.kwargs) for _ in range(2))
        try:
            return _played(first, second, rng, where)
        finally:
            first.close()
            second.close()
    except (FloatingPointError, TypeError, ValueError) as e:
        raise UsageError(f"{where}: {e}") from e


def _played(first: Any, second: Any, rng: np.random.Generator, where: str) -> tuple[list[int], float, bool, list[str]]:
    rewards: list[float] = []
    lengths: list[int] = []
    differs, started = "", time.process_time()
    first.reset_all()
    second.reset_all()
    while len(rewards) < _STEPS and (time.process_time() - started < _SECONDS or len(rewards) < 20):
        actions = [random_actions(group.spec, rng, 1, len(group.agents)) for group in first.spec.groups]
        step = first.step_all(actions)
        if not differs and len(rewards) < _PAIR_STEPS:
            twin = second.step_all(actions)
            compared = (("observations", "final_obs"), ("rewards", "rewards"))
            differs = next((what for what, name in compared if not same(getattr(step, name), getattr(twin, name))), "")
        rewards.append(float(sum(each.sum() for each in step.rewards)))
        if step.ended[0]:
            lengths.append(int(step.episode_lengths[0]))
    lines = []
    if differs:
        lines.append(
            f"{where} is not deterministic: with the same seed and actions, {differs} differ, so no run can be "
            "repeated; use a generator that reset(seed=…) seeds"
        )
    if not lengths:
        lines.append(
            f"{where}: no episode ended in {len(rewards):,} random steps; without a time limit, an evaluation may take "
            "long; eval.max_steps cuts off its episodes"
        )
    if len(set(rewards)) == 1:
        lines.append(f"{where}: all rewards were {rewards[0]:g} under random actions, so nothing is learned from them")
    return lengths, float(np.mean(rewards)), len(set(rewards)) == 1, lines
