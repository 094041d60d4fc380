"""Rollouts that the host has collected, on a GPU: all their columns in one copy, that nobody waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlox.nn.transfers import Packing, stage

_MOST_SHAPES = 4  # of rollouts whose memory on the device is kept


class Uploads:
    """Sends rollouts to a device, always to the same memory, from which a captured update reads them.

    Parameters
    ----------
    device : str or torch.device
        Where they go.
    """

    def __init__(self, device: str | torch.device):
        self._device = torch.device(device)
        self._kept: list[tuple[Packing, torch.Tensor]] = []

    def place(self, batch: Any) -> Any:
        """Return a `Rollout` or a `MultiAgentBatch` whose columns are on the device; its `reused` is true.

        A batch with columns that are there already is returned as it is.
        """
        arrays: dict[str, np.ndarray] = {}
        for name, column in batch.columns().items():
            if not isinstance(column, torch.Tensor) or column.device.type != "cpu":
                return batch
            arrays[name] = column.numpy()
        packing, block = self._find(arrays)
        block.copy_(packing.write(arrays, stage(packing.n_bytes, self._device)), non_blocking=True)
        return batch.with_columns(packing.views(block), True)

    def _find(self, arrays: dict[str, np.ndarray]) -> tuple[Packing, torch.Tensor]:
        """Return the memory for arrays of these shapes."""
        for packing, block in self._kept:
            if packing.fits(arrays):
                return packing, block
        packing = Packing(arrays)
        made = packing, torch.zeros(packing.n_bytes, dtype=torch.uint8, device=self._device)
        self._kept = [*self._kept, made][-_MOST_SHAPES:]
        return made
