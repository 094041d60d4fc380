"""The backend of an algorithm: which one runs its updates, why, on which device and networks, and whether it still may.

A native run must not be changed: hooks, replaced functions, and moved or converted modules are detected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from rlox.compiled import NativeActor, NativeAdam, NativeOptimizer
from rlox.compiled.guard import ModuleWatch, find_update_difference
from rlox.kernels.rng import Rng
from rlox.nn.modules import device_of, is_module

# PyTorch is imported where it is used, because native runs do not need it.

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.distributed.ranks import Ranks
    from rlox.gpu.capture import CapturedUpdate
    from rlox.nn.critics.ensemble import TwinQNetwork
    from rlox.nn.optimizers import FlatOptimizer

# Below this many parameters, a GPU's launch latency costs more than its arithmetic saves.
CUDA_PAYS_FROM = 1_000_000
# From this many environments on, a small policy trains faster with environments on the GPU. Steps a second of PPO on
# CartPole-v1 with 64-64 units, on an H200 and by kernels on the CPU beside it (benchmarks/gpu.py crossover): 0.9 times
# as many with 64 environments, 6 times with 512, 37 times with 4,096. The first updates take a second or two longer.
RESIDENT_PAYS_FROM = 1024


class Watch:
    """Detects when an algorithm no longer has the networks and optimisers that its kernel computes on, or the functions
    that the kernel stands for.

    Parameters
    ----------
    agent : Agent
        The completely constructed algorithm.

    Attributes
    ----------
    name : str
        That of the algorithm's class, for messages.
    """

    def __init__(self, agent: Any):
        kinds: tuple[type, ...] = (NativeOptimizer, NativeAdam)
        if "torch" in sys.modules:
            from torch import nn

            kinds = (*kinds, nn.Module, nn.Parameter)
        self._actor: NativeActor | None = agent.native
        self.name = type(agent).__name__
        self._attributes = vars(agent)
        self._held: dict[str, Any] = {name: value for name, value in vars(agent).items() if isinstance(value, kinds)}
        self._modules: list[Any] = [
            ModuleWatch(name.lstrip("_").replace("_", " "), value)
            for name, value in self._held.items()
            if hasattr(value, "named_modules")
        ]
        self._addresses = {name: value.data_ptr() for name, value in self._held.items() if hasattr(value, "data_ptr")}
        objects = (agent, *(() if agent.collector is None else (agent.collector,)), agent.counters)
        self.find_difference = partial(find_update_difference, *objects, files=False)

    def find_change(self) -> str | None:
        """Return what has changed; None if nothing has."""
        replaced = next((name for name, value in self._held.items() if self._attributes.get(name) is not value), None)
        if replaced is None:
            moved = (name for name, address in self._addresses.items() if self._held[name].data_ptr() != address)
            replaced = next(moved, None)
        if replaced is not None:
            return f"{replaced.lstrip('_')} of this {self.name} was replaced"
        watched = self._modules if self._actor is None else (*self._modules, self._actor)
        return next((change for one in watched if (change := one.altered()) is not None), None)


class Backend(str):
    """``native`` or ``torch``; a string, to which users compare it.

    Attributes
    ----------
    reason : str
        Why it was chosen.
    compiles : bool
        Whether PyTorch compiles the losses.
    device : str
        ``cpu`` or ``cuda``, where the losses are computed.
    captures : bool
        Whether a GPU replays whole updates, each as one graph (`rlox.gpu.capture`).
    watch : Watch or None
        With which `require_unchanged` compares; None: with nothing.
    """

    reason: str
    compiles: bool
    device: str
    captures: bool
    _compiled: dict[Callable[..., Any], Callable[..., Any]]
    _captured: CapturedUpdate | None
    watch: Watch | None

    def __new__(cls, kind: str, reason: str = "", compiles: bool = False) -> Backend:
        self = super().__new__(cls, kind)
        self.reason, self.compiles, self.device, self.captures = reason, compiles, "cpu", False
        self._compiled, self._captured, self.watch = {}, None, None
        return self

    @classmethod
    def choose(cls, where: str, requested: str, compiles: bool, find_obstacle: Callable[[], str | None]) -> Backend:
        """Return ``native`` unless PyTorch is requested, or `find_obstacle` names a reason against the kernel.

        Raises
        ------
        ValueError
            If ``native`` is requested, but cannot run.
        """
        if requested == "torch":
            return cls("torch", "as requested", compiles)
        obstacle = "compile is for PyTorch" if compiles else find_obstacle()
        if obstacle is None:
            return cls("native", "perceptrons on the CPU, computed as the PyTorch update defines them")
        if requested == "native":
            raise ValueError(f"{where}: backend must be auto or torch here, got 'native': {obstacle}")
        return cls("torch", obstacle, compiles)

    def compiled(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return `loss` itself or, with `compiles`, its compiled version, which is the same at every call."""
        if not self.compiles:
            return loss
        if loss not in self._compiled:
            from rlox.nn.compiling import CompiledLoss

            self._compiled[loss] = CompiledLoss(loss, self.device == "cuda" and not self.captures)
        return self._compiled[loss]

    def captured(self, algorithm: Any) -> CapturedUpdate:
        """Return the update of `algorithm` as a graph, which is the same at every call."""
        if self._captured is None:
            from rlox.gpu.capture import CapturedUpdate

            self._captured = CapturedUpdate(algorithm)
        return self._captured

    def require_unchanged(self, where: str) -> None:
        """Raise ValueError if the kernel would no longer compute the same as the Python code, which was changed.

        The loops call it before and after a training. A single `predict` has no time to look at functions.
        """
        if self.watch is None:
            return
        change = self.watch.find_change()
        if change is None and where != "predict":
            change = self.watch.find_difference()
        if change is not None:
            name = self.watch.name
            raise ValueError(
                f"{name}.{where}: a native run must not be changed: {change}; make the change before {name} is "
                "created, or create it with backend='torch'"
            )


class SeparateNetworks:
    """Part of the families whose algorithms have several networks, each with an optimiser of its own; twin critics."""

    critics: TwinQNetwork
    target: TwinQNetwork
    _target_block: torch.Tensor  # all parameters of `target`

    @property
    def optimizers(self: Any) -> list[FlatOptimizer | NativeAdam]:
        """Those that `adam` has created, for `follow_schedule`."""
        return self._optimizers

    def adam(self: Any, block: str, parameters: Iterable[nn.Parameter]) -> FlatOptimizer | NativeAdam:
        """Create an Adam for `parameters` and add it to `optimizers`; `block` is the kernel's name for them."""
        from rlox.nn.optimizers import FlatOptimizer

        rate = self.config.learning_rate
        native = self.backend == "native"
        made = NativeAdam(parameters, block, rate) if native else FlatOptimizer(parameters, rate, eps=1e-8)
        self._optimizers.append(made)
        return made

    def _use_kernel(self: Any, kernel: Callable[..., Any], **blocks: torch.Tensor) -> None:
        """Let `kernel` compute updates, and actions if it acts, in the memory of the networks.

        `blocks` are the networks' flat parameters, by the argument names of the kernel's constructor.
        """
        spec, c = self.spec, self.config
        arrays = {name: block.detach().numpy() for name, block in blocks.items()}
        sizes = {"obs_dim": spec.obs_dim, "act_dim": spec.act_dim, "hidden_sizes": c.hidden_sizes}
        if self.native is None:
            self._net = kernel(**arrays, **sizes, activation=c.activation)
        else:
            self.native.use(kernel, arrays, **sizes, activation=c.activation)
            self._net = self.native.net
        for optimizer in self._optimizers:
            if isinstance(optimizer, NativeAdam):
                optimizer.net = self._net

    def _make_critics(self: Any, rng: Rng) -> None:
        """Create twin critics, their target network, and the flat tensor of its parameters; checkpoints store both.

        The target is copied before the optimisers move the online networks' parameters into one block.
        """
        from rlox.nn.critics.ensemble import TwinQNetwork
        from rlox.nn.modules import flat_copy

        c, spec = self.config, self.spec
        self.critics = TwinQNetwork(spec.obs_dim, spec.act_dim, c.hidden_sizes, c.activation, rng).to(self.device)
        self.target, self._target_block = flat_copy(self.critics)
        self.keep("critics", self.critics)
        self.keep("target", self.target)


def choose_device(
    device: str, policy: nn.Module, where: str, ranks: Ranks, count_others: Callable[[], int] = int
) -> str:
    """Return ``cpu`` or ``cuda`` for a policy, and for other networks, whose parameters `count_others` counts."""
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError(
            f"{where}: device=cuda needs a GPU that this PyTorch ({torch.__version__}) can use; try device=cpu"
        )
    if device == "cpu" or not available:
        return "cpu"
    if device == "auto" and sum(p.numel() for p in policy.parameters()) + count_others() < CUDA_PAYS_FROM:
        return "cpu"
    if not ranks.has_gpu():
        raise ValueError(
            f"{where}: device={device} needs a GPU for each of the {ranks.size} ranks; start at most as many processes "
            f"as a machine has GPUs ({torch.cuda.device_count()}; torchrun --nproc-per-node=…), or try device=cpu"
        )
    return "cuda"


def device_for(device: str, policy: nn.Module, where: str) -> str:
    """Return the `device` argument, or for ``auto`` that of a policy which its creator has moved to a GPU."""
    if not is_module(policy):
        return device
    own = device_of(policy, where)
    if device == "cpu":
        policy.to("cpu")
    return "cuda" if device == "auto" and own == "cuda" else device


def precision_of(wanted: str, device: str) -> str:
    """Return ``float32`` or ``bfloat16`` for a configuration's `precision`, which may be ``auto``."""
    from rlox.nn.modules import computes_bfloat16

    if wanted == "auto":
        return "bfloat16" if device == "cuda" and computes_bfloat16() else "float32"
    return wanted


def autocast(wanted: str, device: str) -> Any:
    """Return a context that sets the precision of passes over a model; trained weights stay float32."""
    import contextlib

    import torch

    if precision_of(wanted, device) == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device, torch.bfloat16)
