"""A dataset on a device: its rows and the draws of them are tensors, and nothing waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

_CHUNK = 1 << 16  # rows that are sent at a time


class DeviceDataset:
    """The transitions of a `rlox.OfflineDatasetBuffer` on a device, from which the same rows are drawn.

    Parameters
    ----------
    dataset : OfflineDatasetBuffer
        Without masks of legal actions.
    transform : callable
        Returns observations (B, D) f32 as networks see them, given those of the dataset.
    device : str or torch.device
        Where the rows are.

    Attributes
    ----------
    rows : Tensor (N, 2 D + A + 3) f32
        Observation and next observation, transformed, action, reward, terminated, truncated.

    Raises
    ------
    ValueError
        If a number is not finite.
    """

    domain = 32  # of its draws, DOMAIN_OFFLINE_TRANSITIONS of kernels/philox.pxd
    words_per_row = 2

    def __init__(
        self, dataset: Any, transform: Callable[[np.ndarray], np.ndarray], device: str | torch.device = "cuda"
    ):
        state = dataset.get_state()
        n = len(state["rewards"])
        self._d, self._a = dataset.obs_dim, dataset.act_dim
        self.rows = torch.empty((n, width(dataset)), dtype=torch.float32, device=device)
        for start in range(0, n, _CHUNK):
            part = slice(start, start + _CHUNK)
            obs, next_obs = (
                transform(np.asarray(state[name][part], np.float32).reshape(-1, self._d))
                for name in ("obs", "next_obs")
            )
            rest = [np.reshape(state[name][part], (len(obs), -1)) for name in _REST]
            rows = np.hstack([obs, next_obs, *rest], dtype=np.float32)
            if not np.isfinite(rows).all():
                row = start + int((~np.isfinite(rows)).any(1).argmax())
                raise ValueError(f"{type(dataset).__name__}: all numbers must be finite, got others in row {row}")
            self.rows[part].copy_(torch.from_numpy(rows))

    def draw(self, words: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the transitions that the random `words` (B * words_per_row,) int64 choose.

        Keys as in `rlox.buffers.Buffer`; ``terminated`` and ``truncated`` are f32.
        """
        low, high = words.view(-1, 2).unbind(1)
        n = len(self.rows)
        rows = self.rows.index_select(0, (high * n + (low * n >> 32)) >> 32)
        d, a = self._d, self._a
        return {
            "obs": rows[:, :d],
            "next_obs": rows[:, d : 2 * d],
            "actions": rows[:, 2 * d : 2 * d + a],
            "rewards": rows[:, -3],
            "terminated": rows[:, -2],
            "truncated": rows[:, -1],
        }


_REST = ("actions", "rewards", "terminated", "truncated")


def width(dataset: Any) -> int:
    """Return how many numbers a transition of `dataset` has on a device."""
    return 2 * dataset.obs_dim + dataset.act_dim + 3
