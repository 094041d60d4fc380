"""Transfers between the host and a device that neither side waits for, many columns in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_ALIGNED = 16  # bytes, to which columns in a packed block are aligned; the widest loads of a GPU


def stage(n_bytes: int, device: torch.device) -> torch.Tensor:
    """Return `n_bytes` of host memory (uint8) to fill and then copy to `device` without waiting.

    On a GPU it is page-locked. It need not be kept until the copy has run: PyTorch hands page-locked memory out again
    only after the copies from it have finished.
    """
    return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


class Packing:
    """The places of named arrays in one block of bytes.

    Parameters
    ----------
    arrays : mapping
        Arrays of the shapes and data types to be packed.

    Attributes
    ----------
    n_bytes : int
        Size of the block.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._places: dict[str, tuple[int, np.dtype, tuple[int, ...]]] = {}
        at = 0
        for name, array in arrays.items():
            self._places[name] = (at, array.dtype, array.shape)
            at += -(-array.nbytes // _ALIGNED) * _ALIGNED
        self.n_bytes = max(at, _ALIGNED)

    def fits(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Return whether `arrays` have the names, shapes and data types of this packing."""
        return list(arrays) == list(self._places) and all(
            (array.dtype, array.shape) == self._places[name][1:] for name, array in arrays.items()
        )

    def write(self, arrays: Mapping[str, np.ndarray], block: torch.Tensor) -> torch.Tensor:
        """Copy `arrays` into a `block` of the host. Returns the block."""
        space = block.numpy()
        for name, (at, dtype, shape) in self._places.items():
            np.ndarray(shape, dtype, space, at)[...] = arrays[name]
        return block

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arrays in a `block` on any device as tensors that share its memory."""
        views = {}
        for name, (at, dtype, shape) in self._places.items():
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            n_bytes = int(np.prod(shape)) * dtype.itemsize
            views[name] = block[at : at + n_bytes].view(kind).view(shape)
        return views


def upload(arrays: Mapping[str, np.ndarray], device: str | torch.device) -> dict[str, torch.Tensor]:
    """Return `arrays` as tensors on `device`, after one copy that the host does not wait for."""
    place = torch.device(device)
    packing = Packing(arrays)
    block = packing.write(arrays, stage(packing.n_bytes, place))
    return packing.views(block.to(place, non_blocking=True))


def send(values: np.ndarray | torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Return an array, or a tensor of the host, on `device`, after a copy that the host does not wait for."""
    tensor, place = torch.as_tensor(values), torch.device(device)
    if place.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(place)
    block = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor)
    return block.to(place, non_blocking=True)


def send_numbers(numbers: Mapping[str, Any], device: str | torch.device) -> dict[str, torch.Tensor]:
    """Return numbers of the host as tensors () f32 on `device`, after one copy that the host does not wait for."""
    values = send(np.array([float(number) for number in numbers.values()], np.float32), device)
    return dict(zip(numbers, values.unbind(), strict=True))
