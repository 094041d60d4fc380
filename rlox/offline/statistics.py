"""Checks and optional normalisation of observations, with the shape and the statistics of a dataset."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class DatasetStatistics:
    """Transforms observations for a policy that was learned from a dataset.

    `mean` and `std` of the dataset's observations are f32 of `shape`; None leaves observations unchanged. If they are
    `fixed`, because a dataset determines them, a checkpoint must have the same.
    """

    def __init__(
        self,
        where: str,
        shape: tuple[int, ...],
        mean: np.ndarray | None = None,
        std: np.ndarray | None = None,
        fixed: bool = False,
    ):
        self._where, self._shape, self._fixed = where, shape, fixed
        self.mean, self.std = mean, std

    def normalize(self, obs: np.ndarray) -> np.ndarray:
        """Return observations (B, D) as the networks see them. Raises ValueError for another shape."""
        if obs.shape[1:] != self._shape:
            raise ValueError(
                f"{self._where}: the environment's observations must be those of the dataset, {self._shape[0]} "
                f"numbers, got shape {obs.shape[1:]}"
            )
        return obs if self.mean is None else ((obs - self.mean) / self.std).astype(np.float32)

    def state(self) -> dict[str, np.ndarray]:
        """Return ``obs_mean`` and ``obs_std``; empty if observations are not normalised."""
        return {} if self.mean is None or self.std is None else {"obs_mean": self.mean, "obs_std": self.std}

    def set_state(self, saved: Mapping[str, np.ndarray], returns: bool = True) -> None:
        """Restore what `state` returned.

        Raises ValueError for other names, shapes or types, or values that differ from the dataset's.
        """
        names, shape = ("obs_mean", "obs_std"), self._shape
        if saved and (
            set(saved) != set(names) or any(x.shape != shape or x.dtype != np.float32 for x in saved.values())
        ):
            raise ValueError(f"{self._where}: obs_mean and obs_std of its normalisation must be f32 of {shape}")
        ours = self.state()
        if self._fixed and (ours.keys() != saved.keys() or not all(np.array_equal(ours[k], saved[k]) for k in ours)):
            raise ValueError(
                f"{self._where}: the dataset's normalisation must be that of the saved training; pass the same "
                "dataset, with the same normalize"
            )
        self.mean, self.std = (saved.get(name) for name in names)
