"""Weights of modules, optimisers and other parts as NumPy arrays, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

# PyTorch is imported where it is used: a native run needs none of it.

if TYPE_CHECKING:
    from torch import nn


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    """All parameters and buffers by their ``state_dict`` names, on the CPU."""
    return {name: value.detach().cpu().numpy() for name, value in module.state_dict().items()}


def load_weights_(module: nn.Module, arrays: dict[str, np.ndarray], what: str) -> None:
    """Put what `weights_of` returned into `module`; a ValueError that names `what` where it does not fit."""
    import torch

    try:
        module.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    except RuntimeError as e:
        raise ValueError(f"{what} does not fit the checkpoint: {e}") from e


def is_module(part: Any) -> bool:
    """Whether `part` is an ``nn.Module``, found without importing PyTorch."""
    return hasattr(part, "state_dict")


def state_of(part: Any) -> dict[str, np.ndarray]:
    """What a checkpoint holds of a module, an optimiser or another object with ``state``."""
    return weights_of(part) if is_module(part) else part.state()
