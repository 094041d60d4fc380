"""The value norm of a policy that a GPU trains: its moments are there, and an update of them waits for nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlox.multi_agent.players import DECAY, LEAST_VARIANCE, LEAST_WEIGHT, ValueNorm


class DeviceValueNorm(ValueNorm):
    """A `ValueNorm` whose newest moments are on a device; the host's copy has those of the last collection.

    Attributes
    ----------
    on_device : Tensor (3,) f64
        The newest moments.
    """

    def __init__(self, device: str | torch.device):
        super().__init__()
        self.on_device = torch.zeros(3, dtype=torch.float64, device=device)

    def follow(self, returns: Any) -> Any:
        wide = returns.double()
        new = torch.stack([wide.mean(), wide.square().mean(), torch.ones_like(self.on_device[2])])
        self.on_device.mul_(DECAY).add_(new, alpha=1.0 - DECAY)
        mean, deviation = self._units()
        return (returns - mean) / deviation

    def denormalize(self, values: torch.Tensor) -> torch.Tensor:
        """Convert a critic's outputs, a tensor (…) f32, to units of returns."""
        mean, deviation = self._units()
        return values * deviation + mean

    def _units(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation, both () f64."""
        mean, square = self.on_device[:2] / self.on_device[2].clamp(min=LEAST_WEIGHT)
        return mean, (square - mean.square()).clamp(min=LEAST_VARIANCE).sqrt()

    def state(self) -> np.ndarray:
        return self.on_device.cpu().numpy()

    def set_state(self, moments: np.ndarray) -> None:
        self.on_device.copy_(torch.from_numpy(np.array(moments)))
        super().set_state(moments)
