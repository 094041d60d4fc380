"""The optimiser of DreamerV3: adaptive gradient clipping, then LaProp, then a warm-up of the step size."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rlox.nn.optimizers import FlatOptimizer

BETA_SQUARE, BETA_MOMENTUM, EPS = 0.999, 0.9, 1e-20
LEAST_NORM = 1e-3  # a tensor's norm counts as at least this


class LaProp(FlatOptimizer):
    """LaProp (Ziyin et al. 2020, arXiv:2002.04839) with adaptive gradient clipping.

    The norm of a tensor's gradient is clipped to `clip` times the tensor's own norm (Brock et al. 2021,
    arXiv:2102.06171). The gradient is divided by the root of its debiased mean square *before* the momentum, which is
    also debiased, is updated with it. The step size rises from 0 to `learning_rate` over `warmup` steps.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float, clip: float, warmup: int):
        super().__init__(parameters, learning_rate)
        self.clip, self.warmup = clip, warmup
        self._moments = {name: torch.zeros_like(self.flat) for name in ("square_avg", "momentum")}
        self._repeats = torch.tensor(self._sizes, device=self.flat.device)

    def _norms(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the norm of each tensor, (n,). A sum at indices would add up in another order each time on a GPU."""
        return torch.stack(torch._foreach_norm(flat.split(self._sizes)))

    def _move(self, excess: torch.Tensor | None) -> None:
        # The count, and what follows from it, are tensors: a Python number would wait for the device.
        self._steps += 1
        steps, grad = self._steps.double(), self.grad
        square_avg, momentum = self._moments.values()
        limits = self.clip * self._norms(self.flat).clamp_(min=LEAST_NORM)
        scales = (limits / self._norms(grad).clamp_(min=1e-30)).clamp_(max=1.0)
        grad *= torch.repeat_interleave(scales, self._repeats, output_size=len(grad))
        square_avg.mul_(BETA_SQUARE).addcmul_(grad, grad, value=1 - BETA_SQUARE)
        scaled = grad / (square_avg / (1 - BETA_SQUARE**steps)).sqrt_().add_(EPS)
        momentum.mul_(BETA_MOMENTUM).add_(scaled, alpha=1 - BETA_MOMENTUM)
        rate = self.learning_rate * (steps / max(1, self.warmup)).clamp(max=1.0)
        self.flat -= momentum * (rate / (1 - BETA_MOMENTUM**steps))
