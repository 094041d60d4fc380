"""Parameters that are sharded over the ranks of a training, with PyTorch's `fully_shard` (FSDP2): each rank stores a
part of every tensor, with its gradient and moments, and has a whole tensor only while its block is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.nn.optimizers import adam_, keeps_denormals

Full = Callable[[torch.Tensor], torch.Tensor]  # a sharded tensor -> the whole tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether this process has only a part of `tensor`, without importing the module of sharded tensors."""
    return hasattr(tensor, "device_mesh")


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the parts of `module` that are gathered one at a time, in its order.

    For Hugging Face models, these are the modules that they declare as not to be split, usually decoder layers; for
    other modules, the entries of the ``ModuleList`` with the most parameters. If there is neither, the list is empty,
    and the whole module is gathered.
    """
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    if found := [part for part in module.modules() if part is not module and type(part).__name__ in names]:
        return found
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part)]
    size = [sum(p.numel() for p in part.parameters()) for part in lists]
    return [] if not lists or not max(size) else [*lists[int(np.argmax(size))]]


def shard_(module: nn.Module, mesh: Any, bfloat16: bool) -> None:
    """Shard the parameters of `module` along their first axis over the processes of a device `mesh`, block by block.

    With `bfloat16`, gathered parameters are bfloat16, while the parts and gradients keep their precision.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Autocast determines the precision of an operation's inputs.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bfloat16 else None,
        reduce_dtype=torch.float32 if bfloat16 else None,
        cast_forward_inputs=False,
    )
    for part in (*blocks_of(module), module):
        # Reshard the root as well: parameters that stay gathered would miss changes by a step or a checkpoint.
        fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=policy)


@torch.no_grad()
def put_(tensor: torch.Tensor, array: np.ndarray) -> None:
    """Copy a whole `array` into `tensor`; if it is sharded, copy only this process's part."""
    held: Any = tensor
    if is_sharded(tensor):
        mesh = held.device_mesh
        # As torch.chunk: the last processes may have fewer rows, or none.
        n = -(-len(array) // mesh.size())
        first = mesh.get_local_rank() * n
        held, array = held.to_local(), array[first : first + n]
    held.copy_(torch.from_numpy(np.array(array)))


class ShardedPart:
    """State of a module with sharded parameters for checkpoints, the same as that of a whole module.

    Parameters
    ----------
    module : nn.Module
        A module that `shard_` has sharded.
    full : callable
        Gathers a tensor.
    """

    def __init__(self, module: nn.Module, full: Full) -> None:
        self.module, self._full = module, full

    def state(self) -> dict[str, np.ndarray]:
        """Return the weights, as `rlox.nn.modules.weights_of`."""
        held = self.module.state_dict(keep_vars=True)
        return {name: self._full(value).detach().cpu().numpy() for name, value in held.items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned. Raises ValueError if names or shapes differ."""
        held = self.module.state_dict(keep_vars=True)
        theirs = {name: array.shape for name, array in state.items()}
        if {name: tuple(value.shape) for name, value in held.items()} != theirs:
            raise ValueError("a module must have the tensors of the checkpoint, got others")
        for name, value in held.items():
            put_(value, state[name])


class ShardedAdam:
    """The Adam of `rlox.nn.optimizers.FlatOptimizer` for sharded parameters: each rank updates its part.

    The steps are the same, except for the order in which the gradient's norm is summed.

    Parameters
    ----------
    parameters : iterable of nn.Parameter
        Parameters that `shard_` has sharded. Those that do not require a gradient are ignored.
    learning_rate, eps, weight_decay : float
        As in `FlatOptimizer`.
    arrive, total, full : callable
        Functions that wait until no rank is still in a pass, sum a tensor over all ranks, and gather a tensor.
    register : callable
        Called with each tensor of the moments, which `full` will gather later.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        eps: float,
        weight_decay: float,
        *,
        arrive: Callable[[], None],
        total: Callable[[torch.Tensor], torch.Tensor],
        full: Full,
        register: Callable[[torch.Tensor], None],
    ):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.learning_rate, self.eps, self.weight_decay = learning_rate, eps, weight_decay
        self._arrive, self._total, self._full = arrive, total, full
        names = ("exp_avg", "exp_avg_sq")
        self._moments = {name: [torch.zeros_like(p, requires_grad=False) for p in self.parameters] for name in names}
        for tensor in (tensor for tensors in self._moments.values() for tensor in tensors):
            register(tensor)
        self._steps = torch.zeros((), dtype=torch.float32, device=self._own(self.parameters[0]).device)
        self._keep_denormals = keeps_denormals()

    @staticmethod
    def _own(tensor: Any) -> torch.Tensor:
        """Return this rank's part of a tensor, as a view."""
        return tensor.to_local()

    @torch.no_grad()
    def step_accumulated(self, max_grad_norm: float | None = None) -> torch.Tensor:
        """Take one step along the gradients accumulated by ``backward()`` since the last step, averaged over ranks.

        The global norm is clipped (None: it is not). Returns the norm before clipping, ().
        """
        self._arrive()  # passes of other ranks still add to the gradients here
        places = [i for i, p in enumerate(self.parameters) if self._own(p).numel()]
        own = [self._own(self.parameters[i]) for i in places]
        given = [self.parameters[i].grad for i in places]
        grads = [torch.zeros_like(p) if g is None else self._own(g) for p, g in zip(own, given, strict=True)]
        squares = torch.zeros((), dtype=torch.float64, device=self._steps.device)
        for grad in grads:
            squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
        norm = self._total(squares).sqrt().float()
        excess = None if max_grad_norm is None else ((norm + 1e-6) / max_grad_norm).clamp_(min=1.0)
        self._steps += 1
        if own:  # a rank may have none of the rows
            first, second = ([self._own(moment[i]) for i in places] for moment in self._moments.values())
            torch.set_flush_denormal(True)
            adam_(own, grads, first, second, self._steps, self.learning_rate, self.eps, self.weight_decay, excess)
            torch.set_flush_denormal(not self._keep_denormals)
        for p in self.parameters:
            p.grad = None
        return norm

    def state(self) -> dict[str, np.ndarray]:
        """Return the same as `FlatOptimizer.state`: moments (P,), gathered tensor by tensor, and the step count ()."""
        found = {}
        for name, tensors in self._moments.items():
            flat = np.empty(sum(p.numel() for p in self.parameters), np.float32)
            end = 0
            for tensor in tensors:
                start, end = end, end + tensor.numel()
                flat[start:end] = self._full(tensor).cpu().numpy().reshape(-1)
            found[name] = flat
        return {**found, "step": self._steps.cpu().numpy().copy()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state`, or a `FlatOptimizer`'s, returned. Raises ValueError if kind or size differ."""
        n = sum(p.numel() for p in self.parameters)
        if set(state) != {*self._moments, "step"}:
            raise ValueError(f"ShardedAdam: state must hold {', '.join(self._moments)} and step, got {sorted(state)}")
        for name, tensors in self._moments.items():
            if state[name].shape != (n,):
                raise ValueError(
                    f"ShardedAdam: {name} must have shape ({n},), got {state[name].shape}; the policy differs from the "
                    "one that was saved"
                )
            end = 0
            for tensor in tensors:
                start, end = end, end + tensor.numel()
                put_(tensor, state[name][start:end].reshape(tensor.shape))
        self._steps.copy_(torch.from_numpy(np.array(state["step"])))
