"""Conversion of the state of modules, optimisers and other parts to NumPy arrays, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

# PyTorch is imported where it is used, because native runs do not need it.

if TYPE_CHECKING:
    from torch import nn


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Return all parameters and buffers by their ``state_dict`` names, on the CPU."""
    return {name: value.detach().cpu().numpy() for name, value in module.state_dict().items()}


def load_weights_(module: nn.Module, arrays: dict[str, np.ndarray], what: str) -> None:
    """Load the result of `weights_of` into `module`. Raises ValueError, which names `what`, if it does not fit."""
    import torch

    try:
        module.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    except RuntimeError as e:
        raise ValueError(f"{what} does not fit the checkpoint: {e}") from e


def is_module(part: Any) -> bool:
    """Return whether `part` is an ``nn.Module``, without importing PyTorch."""
    return hasattr(part, "state_dict")


def state_of(part: Any) -> dict[str, np.ndarray]:
    """Return the state of a module, an optimiser or another object with ``state``, for a checkpoint."""
    return weights_of(part) if is_module(part) else part.state()
