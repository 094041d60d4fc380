"""Sums on a device that add in the same order in every run, where that is asked for."""

from __future__ import annotations

import torch


def cumulative_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the cumulative sums over the last dimension; with deterministic algorithms also on a GPU, whose own
    ``cumsum`` adds in an order that changes."""
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(-1)
    shift = 1
    while shift < x.shape[-1]:  # Hillis and Steele 1986, doi:10.1145/7902.7903
        x = x + torch.nn.functional.pad(x[..., :-shift], (shift, 0))
        shift *= 2
    return x


def expectations(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sums (…) of `values` (…, N) times `weights`, (N,) or (B, N) for values (B, M, N).

    They are float32 under autocast, too, which would round a matrix product to 8 bits.
    """
    if torch.is_autocast_enabled(values.device.type):
        return (values * (weights if weights.ndim == 1 else weights.unsqueeze(1))).sum(-1)
    return values @ weights if weights.ndim == 1 else (values @ weights.unsqueeze(-1)).squeeze(-1)
