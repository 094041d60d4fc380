"""Observations as a dataset has them: their shape, and normalised by its statistics where that is asked for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class DatasetStatistics:
    """What observations go through before a policy sees them that was learned from a dataset.

    Parameters
    ----------
    where : str
        Named in messages.
    shape : tuple of int
        Shape of an observation.
    mean, std : array, optional
        Mean and standard deviation of the dataset's observations, f32 of `shape`; None: observations stay as they are.
    fixed : bool
        Whether a dataset says what they are, so that a checkpoint must have the same.
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
        """Observations (B, D) as the networks see them; a ValueError for another shape."""
        if obs.shape[1:] != self._shape:
            raise ValueError(
                f"{self._where}: the environment's observations must be those of the dataset, {self._shape[0]} "
                f"numbers, got shape {obs.shape[1:]}"
            )
        return obs if self.mean is None else ((obs - self.mean) / self.std).astype(np.float32)

    def state(self) -> dict[str, np.ndarray]:
        """``obs_mean`` and ``obs_std``; empty where observations stay as they are."""
        return {} if self.mean is None or self.std is None else {"obs_mean": self.mean, "obs_std": self.std}

    def set_state(self, saved: Mapping[str, np.ndarray], returns: bool = True) -> None:
        """Take up what `state` returned.

        Raises
        ------
        ValueError
            For other names, shapes or types; for other numbers than the dataset's.
        """
        names, shape = ("obs_mean", "obs_std"), self._shape
        if saved and (
            set(saved) != set(names) or any(x.shape != shape or x.dtype != np.float32 for x in saved.values())
        ):
            raise ValueError(f"{self._where}: obs_mean and obs_std of its normalisation must be f32 of {shape}")
        ours = self.state()
        if self._fixed and (ours.keys() != saved.keys() or not all(np.array_equal(ours[k], saved[k]) for k in ours)):
            raise ValueError(
                f"{self._where}: the dataset's normalisation must be the one that was trained with; pass the same "
                "dataset, with normalize as it was"
            )
        self.mean, self.std = (saved.get(name) for name in names)
