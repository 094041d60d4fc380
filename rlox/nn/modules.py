"""What is done with modules: their initial weights, their state as arrays, and their devices.

PyTorch is imported where it is used, because native runs do not need it.
"""

from __future__ import annotations

import copy
import importlib.metadata
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlox.kernels.rng import Rng

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import Store

Part = TypeVar("Part")
_ALIGNED = 64  # bytes, to which PyTorch aligns what it allocates


# ---- weights as NumPy arrays, or in one flat tensor


def layer_weights(rows: int, cols: int, gain: float, orthogonal: bool, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """Draw weight (rows, cols) and bias (rows,) f32: orthogonal and 0, or both U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    Orthogonal weights have orthonormal rows or columns times `gain` (Saxe et al. 2014, arXiv:1312.6120).
    """
    if orthogonal:
        q, r = np.linalg.qr(rng.normal((max(rows, cols), min(rows, cols)), dtype=np.float64))
        q *= np.sign(np.diagonal(r))  # makes the distribution uniform over orthogonal matrices
        weight, bias = gain * (q if rows >= cols else q.T), np.zeros(rows)
    else:
        bound = 1.0 / math.sqrt(cols)
        weight = bound * (2.0 * rng.uniform((rows, cols), dtype=np.float64) - 1.0)
        bias = bound * (2.0 * rng.uniform((rows,), dtype=np.float64) - 1.0)
    return np.ascontiguousarray(weight, np.float32), bias.astype(np.float32)


def mlp_weights(
    sizes: Sequence[int], out_gain: float, orthogonal: bool, rng: Rng
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw weight and bias of each layer of a perceptron with widths `sizes`: gain sqrt 2, `out_gain` in the last."""
    gains = [math.sqrt(2.0)] * (len(sizes) - 2) + [out_gain]
    shapes = zip(pairwise(sizes), gains, strict=True)
    return [layer_weights(n_out, n_in, gain, orthogonal, rng) for (n_in, n_out), gain in shapes]


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Return all parameters and buffers by their ``state_dict`` names, on the CPU; bfloat16 as float32."""
    return {name: to_array(value) for name, value in module.state_dict().items()}


def to_array(tensor: torch.Tensor | np.ndarray) -> np.ndarray:
    """Return a tensor's values, on the CPU; bfloat16, which NumPy lacks, as float32. Arrays are returned unchanged."""
    if isinstance(tensor, np.ndarray):
        return tensor
    array = tensor.detach().cpu()
    try:
        return array.numpy()
    except TypeError:
        return array.float().numpy()


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


def flatten_(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Turn `parameters` into views of one flat tensor, in this order. Returns that tensor (P,)."""
    import torch

    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)
    return flat


def flat_copy(module: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    """Return a frozen copy of `module`, for example a target network, and the flat tensor (P,) of its parameters."""
    copied = copy.deepcopy(module).requires_grad_(False)
    return copied, flatten_(list(copied.parameters()))


# ---- devices: where a module is, their data types and random numbers, running out of their memory


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


def may_have_gpu() -> bool:
    """Return False if PyTorch is a build for CPUs alone, which is seen without importing it."""
    return "torch" in sys.modules or not importlib.metadata.version("torch").endswith("+cpu")


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
