"""A dataset beside a replay memory: batches of both, as Ball et al. 2023 (arXiv:2302.02948, section 4.1) draw them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlox.buffers import OfflineDataset
from rlox.envs import EnvSpec
from rlox.offline.dataset import require_fit

# Rows by which a dataset is known again: where one of a hundred has changed, they all but surely show it.
_DRAWN = 1024


def require_mixable(dataset: Any, spec: EnvSpec, where: str) -> None:
    """Raise unless the dataset's transitions are such as the environment's.

    Raises
    ------
    TypeError
        For what is no dataset.
    ValueError
        For one whose samples are normalised; for another shape or kind; for actions beyond the bounds, with their row.
    """
    if not isinstance(dataset, OfflineDataset):
        raise TypeError(f"{where}: dataset must be one such as rlox.OfflineDatasetBuffer, got {type(dataset).__name__}")
    if getattr(dataset, "normalized", False):
        raise ValueError(
            f"{where}: the dataset must give observations as they are, like the replay memory, got one that normalises "
            "them; open it with normalize=false (algo.normalize_obs=true normalises both alike)"
        )
    require_fit(dataset, spec, where)
    row = dataset.sample(1, 0)
    acts = spec.action_shape or (1,)  # of a discrete action
    for name, shape in (("obs", spec.obs_shape), ("next_obs", spec.obs_shape), ("actions", acts)):
        if np.shape(row[name])[1:] != shape:
            raise ValueError(
                f"{where}: the dataset must give {name} of shape (B, {str(shape)[1:]}, as the environment, got "
                f"{np.shape(row[name])} for B = 1"
            )


def identity(dataset: OfflineDataset) -> dict[str, Any]:
    """By what the dataset is known again: its number of rows (null where it has no length), and the SHA-256 of a fixed
    draw from it. The whole of a large file is not read."""
    rows = dataset.sample(_DRAWN, 0)
    digest = hashlib.sha256()
    for name in sorted(rows):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(rows[name]).data)
    return {"rows": len(dataset) if hasattr(dataset, "__len__") else None, "digest": digest.hexdigest()[:16]}


def joined(online: Mapping[str, Any], offline: Mapping[str, Any], gamma: float) -> dict[str, Any]:
    """One sample of N rows of a replay memory, then M of a dataset.

    A dataset's rows are single steps, drawn uniformly: where the memory's are n-step returns theirs have the discount
    `gamma`, and where the memory's have weights theirs are 1. ``indices`` (N,) stay those of the memory's rows.
    """
    n = len(offline["rewards"])
    rows = {name: online[name] for name in ("indices",) if name in online}
    for name, known in (("discounts", gamma), ("weights", 1.0)):
        if name in online:
            rows[name] = np.append(online[name], np.full(n, known, np.float32))
    for name in ("obs", "next_obs", "actions", "rewards", "terminated", "truncated"):
        first = np.asarray(online[name])
        rows[name] = np.concatenate([first, np.asarray(offline[name], first.dtype).reshape(n, *first.shape[1:])])
    return rows
