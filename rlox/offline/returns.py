"""Discounted returns of recorded transitions."""

from __future__ import annotations

import numpy as np


def episode_starts(terminated: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """Return the first row of each episode, (E,) int64, for flags (N,) of N >= 1 rows in the order of their steps."""
    ends = np.flatnonzero((terminated != 0) | (truncated != 0))
    return np.concatenate([[0], ends[ends < len(terminated) - 1] + 1])


def returns_to_go(
    rewards: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    rows: np.ndarray,
    gamma: float,
    most: int = 10_000,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return discounted returns (M,) f64 from `rows` (M,) of N recorded transitions to the end of their episodes.

    The transitions are in the order in which they happened; rows after the last end belong to an unfinished episode. A
    sum has at most `most` steps. Also returns the factor (M,) f64 for adding the value of the last row's next
    observation, 0 after a termination, else gamma to the power of the number of steps; and the last row (M,) int64 of
    each sum.
    """
    ends = np.flatnonzero((terminated != 0) | (truncated != 0))
    ends = np.append(ends, len(rewards) - 1)
    last = np.minimum(ends[np.searchsorted(ends, rows)], rows + most - 1)
    lengths = last - rows + 1
    powers = float(gamma) ** np.arange(lengths.max())
    returns = np.array([powers[:k] @ rewards[i : i + k] for i, k in zip(rows.tolist(), lengths.tolist(), strict=True)])
    return returns, np.where(terminated[last] != 0, 0.0, float(gamma) ** lengths), last
