"""Interfaces of replay memories and datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Buffer(Protocol):
    """Interface of a replay memory for the off-policy loop. Letters: N rows pushed, B rows sampled, D, A sizes.

    The class is called with keywords: ``capacity obs_dim act_dim`` (observations flattened) and the other arguments of
    its configuration (`BufferConfig.arguments`). Further keywords are given only if they apply: ``n_step gamma n_envs``
    for n-step returns (n_step > 1), ``obs_shape obs_dtype`` for images (C, H, W) of uint8, and ``n_stacked n_envs`` for
    images that are stacks of frames, unless ``frame_stacks`` of its configuration is False. ``mask_dim`` is given if
    the environment masks actions: the memory then stores that many flags of legal actions with each transition.

    Optional methods:

    - ``update_priorities(indices, priorities)``, for memories whose samples contain ``indices``: called with the
      indices of a sample and the absolute TD errors (B,) f64.
    - ``set_beta(beta)``, called before each sample if the configuration has a ``beta``.
    - ``cut()``, required if the memory has an ``n_step`` above 1: called when the next transitions do not continue
      those before (environments that start new episodes after a resume). No n-step return may reach across.
    - ``n_pushed``, the number of transitions ever pushed, to notice pushes from elsewhere.
    - ``close()``.
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
        """Copy N transitions, row i from environment i: (N, D), (N, D), (N, A) f32, (N,) f32, (N,) and (N,) bool.

        With ``mask_dim``, there is a further keyword: ``next_masks`` (N, mask_dim) bool, the legal actions in
        `next_obs`.
        """

    def sample(self, batch_size: int, seed: int) -> Mapping[str, np.ndarray]:
        """Return B transitions that depend only on the contents and `seed`.

        Keys: ``obs next_obs actions rewards terminated truncated`` as pushed; ``discounts`` (B,) if rewards are n-step
        returns: gamma to the power of their number of steps; ``weights`` (B,) that correct for unequal sampling;
        ``indices`` (B,) if priorities must be updated; ``next_masks`` (B, mask_dim) bool, if there are masks, of
        ``next_obs``.
        """

    def __len__(self) -> int:
        """Return the number of transitions that can be sampled."""

    def get_state(self) -> dict[str, Any]:
        """Return the complete state as arrays, numbers and strings."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned, to continue exactly from there."""


@runtime_checkable
class OfflineDataset(Protocol):
    """Interface of a dataset for the offline loop, such as `rlox.OfflineDatasetBuffer`.

    Optional attributes, used if present: ``obs_dim`` and ``act_dim`` (and ``obs_shape``), compared with the
    algorithm's; ``normalized``, whether samples are normalised by ``obs_mean`` and ``obs_std`` (D,); ``get_state()``,
    which returns all transitions under the names of a sample and in order, to check the actions, to compare values with
    returns, and for policies with a memory; ``masked``, whether samples have ``masks`` and ``next_masks`` (B,
    n_actions) bool, the legal actions in both observations.
    """

    def sample(self, batch_size: int, seed: int) -> Mapping[str, np.ndarray]:
        """Return B transitions that depend only on the contents and `seed`.

        ``obs next_obs`` (B, D), ``actions`` (B, A) or discrete (B, 1), ``rewards terminated truncated`` (B,).
        """
