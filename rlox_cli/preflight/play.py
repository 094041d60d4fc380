"""Steps of environments with random actions, and the comparison of two such plays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def random_actions(spec: Any, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random actions, (*shape, …), within ±1 if there are no bounds."""
    if spec.discrete:
        return rng.integers(spec.n_actions, size=shape)
    if spec.n_choices is not None:
        return rng.integers(spec.n_choices, size=(*shape, len(spec.n_choices)))
    low, high = (np.where(np.isfinite(b), b, d) for b, d in ((spec.act_low, -1.0), (spec.act_high, 1.0)))
    return rng.uniform(low, high, (*shape, spec.act_dim)).astype(np.float32)


def same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Return whether two sequences of arrays are equal; NaN equals NaN."""
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))
