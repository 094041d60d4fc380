"""What a replay memory and a dataset must provide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Buffer(Protocol):
    """What the off-policy loop asks of a replay memory. Letters: N rows pushed, B rows sampled, D, A sizes.

    The class is called with keywords: ``capacity obs_dim act_dim`` (observations flattened) and whatever else its
    configuration holds (`BufferConfig.arguments`). Only where they say something it is given as well: ``n_step gamma
    n_envs`` for n-step returns (n_step > 1), ``obs_shape obs_dtype`` for images (C, H, W) of uint8, and ``n_stacked
    n_envs`` for images that are stacks of frames, where ``frame_stacks`` of its configuration is not False.

    Optional methods: ``update_priorities(indices, priorities)``, given the indices of a sample and the absolute TD
    errors (B,) f64, for a memory whose samples hold ``indices``; ``set_beta(beta)``, called before each sample, where
    the configuration has a ``beta``; ``cut()``, called where the transitions to come do not follow on from those
    before (environments that start afresh after a resume), across which no n-step return may reach: needed where
    the memory has an ``n_step`` above 1; ``n_pushed``, how many transitions it was ever given, by which a push from
    elsewhere is noticed; ``close()``.
    """

    def push_batch(
        self,
        obs: np.ndarray,
        next_obs: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> None:
        """Copy in N transitions, row i from environment i: (N, D), (N, D), (N, A) f32, (N,) f32, (N,) and (N,) bool."""

    def sample(self, batch_size: int, seed: int) -> Mapping[str, np.ndarray]:
        """B transitions, a function of contents and `seed` alone.

        Keys ``obs next_obs actions rewards terminated truncated`` as pushed; ``discounts`` (B,) where rewards are
        n-step returns: gamma to the number of their steps; ``weights`` (B,) that correct for unequal sampling;
        ``indices`` (B,) where priorities are to be updated.
        """

    def __len__(self) -> int:
        """Transitions that can be sampled."""

    def get_state(self) -> dict[str, Any]:
        """Everything, as arrays, numbers and texts."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly from what `get_state` returned."""


@runtime_checkable
class OfflineDataset(Protocol):
    """What the offline loop asks of a dataset; `rlox.OfflineDatasetBuffer` is one.

    Optional, and used where they are there: ``obs_dim`` and ``act_dim`` (and ``obs_shape``), to be compared with the
    algorithm's; ``normalized``, whether samples are, by ``obs_mean`` and ``obs_std`` (D,); ``get_state()``, all
    transitions by the names of a sample and in their order, to check the actions and to compare values with returns.
    """

    def sample(self, batch_size: int, seed: int) -> Mapping[str, np.ndarray]:
        """B transitions, a function of contents and `seed` alone.

        ``obs next_obs`` (B, D), ``actions`` (B, A) or discrete (B, 1), ``rewards terminated truncated`` (B,).
        """
