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
