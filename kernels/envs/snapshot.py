"""Saving and restoring the complete state of native environments as a dict of arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def saved(arrays: dict[str, np.ndarray], size: int, block: int) -> dict[str, np.ndarray]:
    """Return copies of `arrays`, with the state as (S, N).

    Parameters
    ----------
    arrays : dict
        ``state`` (S * N,) float64, block after block of environments, and component after component within a block;
        ``keys`` and ``episodes`` (N,) uint64, ``steps`` (N,) int64, ``returns`` (N,) or (N, A) float64.
    size, block : int
        S, and the number of environments in a block.
    """
    n = len(arrays["keys"])
    state = np.empty((size, n))
    for start, stop, part in _blocks(arrays["state"], size, n, block):
        state[:, start:stop] = part
    return {
        "state": state,
        "keys": arrays["keys"].copy(),
        "episodes": arrays["episodes"] + np.uint64(1),
        "steps": arrays["steps"].copy(),
        "returns": arrays["returns"].copy(),
    }


def restore(
    arrays: dict[str, np.ndarray], state: dict[str, Any], size: int, block: int, limit: int, where: str
) -> bool:
    """Write a state from `saved` into the arrays of environments of the same kind.

    Returns
    -------
    bool
        Whether all environments have started an episode.

    Raises
    ------
    ValueError
        For other keys or shapes, values that are not finite, or steps outside [0, limit). Nothing is written then.
    TypeError
        If a value is not an array or has another dtype.
    """
    n = len(arrays["keys"])
    likes = {**arrays, "state": np.broadcast_to(0.0, (size, n))}
    if set(state) != set(likes):
        raise ValueError(
            f"{where}: state must have the keys {sorted(likes)}, got {sorted(state)}; pass what get_state returned"
        )
    for name, array in likes.items():
        given = state[name]
        if not isinstance(given, np.ndarray) or given.dtype != array.dtype:
            got = getattr(given, "dtype", type(given).__name__)
            raise TypeError(f"{where}: {name} must be an array of {array.dtype}, got {got}")
        if given.shape != array.shape:
            raise ValueError(f"{where}: {name} must have shape {array.shape}, got {given.shape}")
        if not np.isfinite(given).all():
            raise ValueError(f"{where}: {name} must be finite, got {given[~np.isfinite(given)][0]}")
    steps = state["steps"]
    wrong = (steps < 0) | (steps >= limit)
    if wrong.any():
        raise ValueError(f"{where}: steps must lie in [0, {limit}), got {steps[wrong][0]}")
    for start, stop, part in _blocks(arrays["state"], size, n, block):
        part[...] = state["state"][:, start:stop]
    arrays["keys"][...] = state["keys"]
    arrays["episodes"][...] = state["episodes"] - np.uint64(1)
    arrays["steps"][...] = steps
    arrays["returns"][...] = state["returns"]
    return bool(state["episodes"].all())


def _blocks(state: np.ndarray, size: int, n: int, block: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (start, stop, state (S, stop - start)) of each block."""
    for start in range(0, n, block):
        stop = min(start + block, n)
        yield start, stop, state[start * size : stop * size].reshape(size, stop - start)
