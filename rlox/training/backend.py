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
from rlox.config import shown
from rlox.kernels.rng import Rng

# PyTorch is imported where it is used, because native runs do not need it.

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.gpu.capture import CapturedUpdate
    from rlox.nn.critics.ensemble import TwinQNetwork
    from rlox.nn.optimizers import FlatOptimizer


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
    casts : bool
        Whether losses are computed in bfloat16, see `rlox.gpu.numerics.autocast`.
    captures : bool
        Whether a GPU replays whole updates, each as one graph (`rlox.gpu.capture`).
    watch : Watch or None
        With which `require_unchanged` compares; None: with nothing.
    """

    reason: str
    compiles: bool
    device: str
    casts: bool
    captures: bool
    _compiled: dict[Callable[..., Any], Callable[..., Any]]
    _captured: CapturedUpdate | None
    watch: Watch | None

    def __new__(cls, kind: str, reason: str = "", compiles: bool = False) -> Backend:
        self = super().__new__(cls, kind)
        self.reason, self.compiles, self.device, self.casts, self.captures = reason, compiles, "cpu", False, False
        self._compiled, self._captured, self.watch = {}, None, None
        return self

    @classmethod
    def choose(
        cls,
        where: str,
        requested: str,
        compiles: bool,
        config: Any,
        find_obstacle: Callable[[nn.Module | None, str, str], str | None],
        policy: nn.Module | None,
        device: str,
    ) -> Backend:
        """Return ``native`` unless PyTorch is requested, or ``find_obstacle(policy, device, requested)`` names a reason
        against the kernel.

        Raises
        ------
        TypeError, ValueError
            If ``native`` is requested, but cannot run, or `compiles` is wrong or does not suit `config`.
        """
        if not isinstance(compiles, bool):
            raise TypeError(f"{where}: compile must be true or false, got {shown(compiles)}")
        stops = {"memory": config.recurrent, "dropout": getattr(config, "dropout", 0.0)}
        if compiles and (name := next(filter(stops.get, stops), None)):
            raise ValueError(f"{where}: compile must be false with {name}={getattr(config, name)}, outside PyTorch")
        if requested == "torch":
            return cls("torch", "as requested", compiles)
        obstacle = "compile is for PyTorch" if compiles else find_obstacle(policy, device, requested)
        if obstacle is None:
            return cls("native", "perceptrons on the CPU, computed as the PyTorch update defines them")
        if requested == "native":
            raise ValueError(f"{where}: backend must be auto or torch here, got 'native': {obstacle}")
        return cls("torch", obstacle, compiles)

    def compiled(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return `loss` itself or, with `compiles` or `casts`, its other version, which is the same at every call."""
        if not (self.compiles or self.casts):
            return loss
        if loss not in self._compiled:
            from rlox.gpu.numerics import CastLoss
            from rlox.nn.compiling import CompiledLoss

            function: Any = loss
            if self.compiles:
                function = CompiledLoss(loss, self.device == "cuda" and not self.captures)
            self._compiled[loss] = CastLoss(function, self.device) if self.casts else function
        return self._compiled[loss]

    def cast(self, where: str, config: Any) -> None:
        """Compute losses in the configuration's precision, which only a GPU can do."""
        from rlox.gpu.numerics import precision_of

        wanted = config.precision
        if config.replays == "sequences":  # world models choose what is cast
            return
        if wanted == "bfloat16" and self.device == "cpu":
            raise ValueError(
                f"{where}: precision must be float32 or auto on the CPU, got bfloat16, in which only a GPU computes "
                "losses; try device=cuda"
            )
        if precision_of(wanted, self.device) == "bfloat16":
            self.casts = True
            self.reason += "; losses in bfloat16"

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
