"""One block of memory that a kernel and PyTorch's parameters share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import nn


def _views(block: np.ndarray, shapes: list[tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """Return the parts of a flat block by name."""
    found, at = {}, 0
    for name, shape in shapes:
        part = slice(at, at + int(np.prod(shape)))
        found[name] = block[part].reshape(shape)
        at = part.stop
    return found


def _size(shapes: list[tuple[str, tuple[int, ...]]]) -> int:
    return sum(int(np.prod(shape)) for _, shape in shapes)


def _fill(views: dict[str, np.ndarray], arrays: dict[str, np.ndarray], what: str) -> None:
    """Copy `arrays` into `views`. Raises ValueError, which names `what`, if they do not fit."""
    ours = {name: array.shape for name, array in views.items()}
    theirs = {name: array.shape for name, array in arrays.items()}
    if ours != theirs:
        differ = [
            f"{name} must have shape {ours.get(name, 'none')}, got {theirs.get(name, 'none')}"
            for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)
        ]
        raise ValueError(f"{what} does not fit the checkpoint: {'; '.join(differ)}")
    for name, array in views.items():
        array[:] = arrays[name]


def _attach(module: nn.Module, parameters: dict[str, np.ndarray], gradients: dict[str, np.ndarray] | None) -> None:
    """Make the parameters of `module` views of one block, and their gradients views of another; None disables them."""
    import torch

    for name, parameter in module.named_parameters():
        parameter.data = torch.from_numpy(parameters[name])
        if gradients is None:
            parameter.requires_grad_(False)
    if gradients is not None:
        _attach_gradients(module, gradients)


def _attach_gradients(module: nn.Module, gradients: dict[str, np.ndarray]) -> None:
    import torch

    for name, parameter in module.named_parameters():
        array = gradients[name]
        if parameter.grad is None or parameter.grad.data_ptr() != array.ctypes.data:
            parameter.grad = torch.from_numpy(array)
