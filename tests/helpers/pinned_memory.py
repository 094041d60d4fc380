"""Pinned host memory on a machine without a GPU, and copies from and to it that the host does not wait for.

A GPU runs behind the host, and a test on the CPU cannot wait for the unlucky moment. So the worst case is assumed: a
copy that the host does not wait for is under way until the next synchronisation. Until then the host's memory must not
be written (a copy to the device), and contains nothing useful (a copy from the device).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_pinned: dict[int, StorageWeakRef] = {}


@dataclass
class Transfer:
    """A copy under way: `host`, a CPU tensor, and a copy of the bytes that were sent."""

    host: torch.Tensor
    sent: torch.Tensor
    to_device: bool


_under_way: list[Transfer] = []


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Note that the memory of a CPU tensor is pinned."""
    storage = tensor.untyped_storage()
    _pinned[storage.data_ptr()] = StorageWeakRef(storage)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a CPU tensor, or the tensor that it is a view of, was pinned."""
    address = tensor.untyped_storage().data_ptr()
    known = _pinned.get(address)
    if known is not None and known.expired():
        del _pinned[address]
        return False
    return known is not None


def spoil_(tensor: torch.Tensor) -> None:
    """Fill memory whose content is undefined with values that no test would accept."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


def begin_transfer(destination: torch.Tensor, source: torch.Tensor, to_device: bool) -> None:
    """Copy between pinned and device memory without waiting. Both are CPU tensors here, either may be a view."""
    if to_device:
        destination.copy_(source)
        _under_way.append(Transfer(source.detach(), source.clone(), True))
    else:
        _under_way.append(Transfer(destination.detach(), source.to(destination.dtype, copy=True), False))
        spoil_(destination)


def transfers_under_way() -> list[Transfer]:
    """Return the copies that the host has not waited for."""
    return [*_under_way]


def end_transfers(transfers: list[Transfer] | None = None) -> None:
    """End copies under way (None: all), since the host has waited for them.

    Raises
    ------
    RuntimeError
        If the host wrote into memory that was still being copied to the device.
    """
    ended = [*_under_way] if transfers is None else [one for one in _under_way if any(one is x for x in transfers)]
    _under_way[:] = [one for one in _under_way if not any(one is x for x in ended)]
    for one in ended:
        if not one.to_device:
            one.host.copy_(one.sent.view_as(one.host))
        elif not torch.equal(_bytes(one.host), _bytes(one.sent)):
            raise RuntimeError(
                "pinned memory was overwritten before the host had waited for its copy to the GPU; "
                f"wait for an event first (a tensor of shape {tuple(one.host.shape)}, {one.host.dtype})"
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
