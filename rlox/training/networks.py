"""Several networks, each with an optimiser of its own, on which PyTorch or a kernel computes; twin critics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rlox.compiled import NativeAdam
from rlox.kernels.nn.twin_critics import n_parameters
from rlox.kernels.rng import Rng
from rlox.training.agent import Agent

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.nn.actors import TwinQNetwork
    from rlox.nn.optimizers import FlatOptimizer


class SeparateNetworks(Agent):
    """Base class of the families whose algorithms have several networks."""

    critics: TwinQNetwork
    target: TwinQNetwork
    _target_block: torch.Tensor  # all parameters of `target`

    @property
    def optimizers(self) -> list[FlatOptimizer | NativeAdam]:
        """Those that `adam` has created, for `follow_schedule`."""
        return self._optimizers

    def adam(self, block: str, parameters: Iterable[nn.Parameter]) -> FlatOptimizer | NativeAdam:
        """Create an Adam for `parameters` and add it to `optimizers`; `block` is the kernel's name for them."""
        from rlox.nn.optimizers import FlatOptimizer

        rate = self.config.learning_rate
        native = self.backend == "native"
        made = NativeAdam(parameters, block, rate) if native else FlatOptimizer(parameters, rate, eps=1e-8)
        self.optimizers.append(made)
        return made

    def _use_kernel(self, kernel: Callable[..., Any], **blocks: torch.Tensor) -> None:
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
        for optimizer in self.optimizers:
            if isinstance(optimizer, NativeAdam):
                optimizer.net = self._net

    def _make_critics(self, rng: Rng) -> None:
        """Create twin critics, their target network, and the flat tensor of its parameters; checkpoints store both.

        The target is copied before the optimisers move the online networks' parameters into one block.
        """
        from rlox.nn.actors import TwinQNetwork
        from rlox.nn.modules import flat_copy

        c, spec = self.config, self.spec
        self.critics = TwinQNetwork(spec.obs_dim, spec.act_dim, c.hidden_sizes, c.activation, rng).to(self.device)
        self.target, self._target_block = flat_copy(self.critics)
        self.keep("critics", self.critics)
        self.keep("target", self.target)

    def _twin_critics_size(self) -> int:
        """Return the number of parameters of the networks that `_make_critics` creates, without the target."""
        return n_parameters(self.spec.obs_dim, self.spec.act_dim, self.config.hidden_sizes, False)[1]
