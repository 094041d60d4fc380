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
        sizes = torch.tensor([p.numel() for p in self.parameters], device=self.flat.device)
        self._tensor_of = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
        self._n = len(sizes)

    def _norms(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the norm of each tensor, (n,)."""
        return flat.new_zeros(self._n).index_add_(0, self._tensor_of, flat.square()).sqrt_()

    def _move(self, excess: torch.Tensor | None) -> None:
        self._steps += 1
        steps, grad = int(self._steps), self.grad
        square_avg, momentum = self._moments.values()
        limits = self.clip * self._norms(self.flat).clamp_(min=LEAST_NORM)
        grad *= (limits / self._norms(grad).clamp_(min=1e-30)).clamp_(max=1.0)[self._tensor_of]
        square_avg.mul_(BETA_SQUARE).addcmul_(grad, grad, value=1 - BETA_SQUARE)
        scaled = grad / (square_avg / (1 - BETA_SQUARE**steps)).sqrt_().add_(EPS)
        momentum.mul_(BETA_MOMENTUM).add_(scaled, alpha=1 - BETA_MOMENTUM)
        rate = self.learning_rate * min(1.0, steps / max(1, self.warmup))
        self.flat.add_(momentum, alpha=-rate / (1 - BETA_MOMENTUM**steps))
