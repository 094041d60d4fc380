"""What depends on the device: its data types, its random numbers, and running out of its memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import Store

# PyTorch is imported where it is used, because native runs do not need it.


def device_of(policy: nn.Module, where: str) -> str | None:
    """Return ``cpu`` or ``cuda``, where the parameters of a custom policy are; None if it has none.

    Raises
    ------
    ValueError
        If they are on several devices, have no values (PyTorch's device ``meta``), or are on a GPU that is not the
        current one.
    """
    import torch

    devices = {p.device for p in policy.parameters()}
    if len(devices) > 1 or "meta" in {one.type for one in devices}:
        raise ValueError(
            f"{where}: the parameters of policy must have values and be on one device, got "
            f"{', '.join(sorted(map(str, devices)))}"
        )
    for device in devices:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            raise ValueError(
                f"{where}: policy must be on PyTorch's current GPU, cuda:{torch.cuda.current_device()}, got {device}; "
                f"call torch.cuda.set_device({device.index}) first"
            )
        return device.type
    return None


def own_gpu(store: Store, rank: int, size: int, local_rank: int) -> int | None:
    """Return the number of this rank's GPU; None if there are too few for each rank to have one of its own.

    A rank takes the GPU with its number on the machine. If a launcher shows each rank other GPUs, that number is taken
    modulo their count. All ranks call it together, and compare their GPUs through the `store`.
    """
    import torch

    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = str(torch.cuda.get_device_properties(local_rank % n).uuid) if n else ""
    store.set(f"gpu{rank}", name)
    names = [store.get(f"gpu{other}").decode() for other in range(size)]
    return local_rank % n if all(names) and len(set(names)) == size else None


def computes_bfloat16() -> bool:
    """Return whether the GPU computes in bfloat16; older ones than NVIDIA's Ampere emulate it, slower than float32."""
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception, or its cause, reports that the memory of a device is full."""
    torch = sys.modules.get("torch")
    while torch is not None and error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def generator_states(device: str) -> dict[str, np.ndarray]:
    """Return the states of PyTorch's own generators, of the CPU and of the `device`, by name."""
    import torch

    states = {"torch": torch.get_rng_state().numpy()}
    if device == "cuda":
        states["torch_cuda"] = torch.cuda.get_rng_state().numpy()
    return states


def set_generator_states(states: dict[str, np.ndarray], device: str) -> None:
    """Set PyTorch's own generators to the result of `generator_states`, which may be of another device."""
    import torch

    if "torch" in states:
        torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    if device == "cuda" and "torch_cuda" in states:
        torch.cuda.set_rng_state(torch.from_numpy(states["torch_cuda"].copy()))
