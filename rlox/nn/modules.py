"""Conversion of the state of modules, optimisers and other parts to NumPy arrays, and back."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlox.nn.devices import out_of_memory

# PyTorch is imported where it is used, because native runs do not need it.

if TYPE_CHECKING:
    import torch
    from torch import nn

Part = TypeVar("Part")
_ALIGNED = 64  # bytes, to which PyTorch aligns what it allocates


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Return all parameters and buffers by their ``state_dict`` names, on the CPU; bfloat16 as float32."""
    return {name: to_array(value) for name, value in module.state_dict().items()}


def to_array(tensor: torch.Tensor | np.ndarray) -> np.ndarray:
    """Return a tensor's values, on the CPU; bfloat16, which NumPy lacks, as float32. Arrays are returned unchanged."""
    if isinstance(tensor, np.ndarray):
        return tensor
    array = tensor.detach().cpu()
    return (array.float() if str(array.dtype) == "torch.bfloat16" else array).numpy()


def load_weights_(module: nn.Module, arrays: dict[str, np.ndarray], what: str) -> None:
    """Load the result of `weights_of` into `module`. Raises ValueError, which names `what`, if it does not fit."""
    import torch

    try:
        module.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    except RuntimeError as e:
        if out_of_memory(e):
            raise
        raise ValueError(f"{what} does not fit the checkpoint: {e}") from e


def is_module(part: Any) -> bool:
    """Return whether `part` is an ``nn.Module``, without importing PyTorch."""
    return hasattr(part, "state_dict")


def state_of(part: Any) -> dict[str, np.ndarray]:
    """Return the state of a module, an optimiser or another object with ``state``, for a checkpoint."""
    return weights_of(part) if is_module(part) else part.state()


def copy_module(part: Part) -> Part:
    """Deep-copy a module, or an object whose attributes are modules, and compute the same bits with the copy.

    Parameters that are views of a flat block need not be aligned to 64 bytes, and on some CPUs (an AMD EPYC, with
    PyTorch's MKL) the last bits of a matrix product depend on that. Parameters of the copy are separate tensors with
    the alignment of the originals, which a pickle preserves.
    """
    import torch

    made = copy.deepcopy(part)
    with torch.no_grad():
        for p, original in zip(_parameters(made), _parameters(part), strict=True):
            offset = original.data_ptr() % _ALIGNED // original.element_size()
            if offset and original.device.type == "cpu" and original.is_contiguous():
                block = original.new_empty(offset + original.numel())
                p.data = block[offset:].view_as(original).copy_(original)
    return made


def _parameters(part: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module, or of the modules among an object's attributes."""
    modules = [part] if is_module(part) else [one for one in getattr(part, "__dict__", {}).values() if is_module(one)]
    return itertools.chain.from_iterable(module.parameters() for module in modules)
