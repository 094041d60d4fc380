"""Batches of a dataset and a replay memory together, as in Ball et al. 2023 (arXiv:2302.02948, section 4.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlox.buffers import OfflineDataset
from rlox.envs import EnvSpec
from rlox.offline.dataset import require_fit

# Rows by which a dataset is recognised: if one in a hundred rows has changed, they almost surely show it.
_DRAWN = 1024


def require_mixable(dataset: Any, spec: EnvSpec, where: str) -> None:
    """Raise unless the dataset's transitions match the environment's.

    Raises TypeError if `dataset` is not a dataset, and ValueError for normalised samples, another shape or kind, or
    actions beyond the bounds, with their row.
    """
    if not isinstance(dataset, OfflineDataset):
        raise TypeError(
            f"{where}: dataset must be a dataset such as rlox.OfflineDatasetBuffer, got {type(dataset).__name__}"
        )
    if getattr(dataset, "normalized", False):
        raise ValueError(
            f"{where}: the dataset must give unchanged observations, like the replay memory, but it normalises them; "
            "open it with normalize=false (algo.normalize_obs=true normalises both in the same way)"
        )
    require_fit(dataset, spec, where)
    row = dataset.sample(1, 0)
    acts = spec.action_shape or (1,)  # shape of a discrete action
    for name, shape in (("obs", spec.obs_shape), ("next_obs", spec.obs_shape), ("actions", acts)):
        if np.shape(row[name])[1:] != shape:
            raise ValueError(
                f"{where}: the dataset must give {name} of shape (B, {str(shape)[1:]}, like the environment, got "
                f"{np.shape(row[name])} for B = 1"
            )


def identity(dataset: OfflineDataset) -> dict[str, Any]:
    """Return data that identify the dataset: its number of rows (None if it has no length), and the SHA-256 of a fixed
    sample. A large file is not read as a whole."""
    rows = dataset.sample(_DRAWN, 0)
    digest = hashlib.sha256()
    for name in sorted(rows):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(rows[name]).data)
    return {"rows": len(dataset) if hasattr(dataset, "__len__") else None, "digest": digest.hexdigest()[:16]}


def join_batches(online: Mapping[str, Any], offline: Mapping[str, Any], gamma: float) -> dict[str, Any]:
    """Join N rows of a replay memory and M rows of a dataset to one sample, in this order.

    A dataset's rows are single steps and drawn uniformly: if the memory's rows have discounts (of n-step returns),
    those of the dataset have `gamma`, and if the memory's rows have weights, those of the dataset have 1. ``indices``
    (N,) are still those of the memory's rows.
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
