"""Advantages of agents that take turns."""

from __future__ import annotations

import numpy as np


def estimate_turns(
    rewards: np.ndarray,
    values: np.ndarray,
    alive: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    goes_on: np.ndarray,
    last_values: np.ndarray,
    final_values: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate advantages (GAE, Schulman et al. 2016, arXiv:1506.02438) from each turn of an agent to its next one.

    A turn is followed by the rewards up to the agent's next turn, without discount among them. What follows the last
    turn of a rollout is not known yet, unless the agent's life ends: such a turn is not learned from, but its value
    stands for what follows the turn before.

    Parameters
    ----------
    rewards, values : array (T, M) f32
        Rewards of agents in environments, whether they act or wait, and values at their turns.
    alive, terminated, truncated : array (T, M) bool
        Whether it is the agent's turn, and how its life ends in a step, whosever turn it is.
    goes_on : array (M,) bool
        Whether it is the agent's turn after the last step.
    last_values : array (M,) f32
        Values of what these agents then see.
    final_values : array (T, M) f32
        Values of what agents saw last where a life was truncated.
    gamma, gae_lambda : float
        Discount and decay per turn.

    Returns
    -------
    advantages : array (T, M) f32
    known : array (T, M) bool
        The turns to learn from.
    """
    advantages, known = np.zeros(rewards.shape, np.float32), np.zeros(rewards.shape, np.bool_)
    ahead, certain = np.where(goes_on, last_values, np.float32(0)), goes_on.copy()
    trace, gathered = np.zeros((2, rewards.shape[1]), np.float32)
    for t in reversed(range(len(rewards))):
        over = terminated[t] | truncated[t]
        ahead = np.where(terminated[t], np.float32(0), np.where(truncated[t], final_values[t], ahead))
        trace, gathered, certain = np.where(over, 0, trace), np.where(over, 0, gathered), certain | over
        gathered = gathered + rewards[t]
        estimate = gathered + gamma * ahead - values[t] + gamma * gae_lambda * trace
        turn = alive[t]
        known[t] = turn & certain
        advantages[t] = np.where(known[t], estimate, 0)
        trace = np.where(turn, advantages[t], trace)
        ahead, gathered, certain = np.where(turn, values[t], ahead), np.where(turn, 0, gathered), certain | turn
    return advantages, known
