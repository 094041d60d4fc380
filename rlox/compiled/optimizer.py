"""Optimisers of native learners, with PyTorch's interface."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.compiled.policies import NativeActor
from rlox.kernels.nn.dqn import NativeQ
from rlox.kernels.nn.policy_gradient import NativeActorCritic

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.kernels.nn.sac import NativeSAC
    from rlox.kernels.nn.td3 import NativeTD3


class NativeAdam:
    """One of the optimisers of a `NativeBoundedPolicy`'s kernel, saved like `rlox.nn.optimizers.FlatOptimizer`.

    Parameters
    ----------
    parameters : iterable of nn.Parameter
        Become views of one block.
    block : str
        The kernel's name for the block.
    learning_rate : float
        Step size.
    """

    net: NativeSAC | NativeTD3  # set when the kernel is created

    def __init__(self, parameters: Iterable[nn.Parameter], block: str, learning_rate: float):
        from rlox.nn.optimizers import flatten_

        self.flat = flatten_(list(parameters))
        self.block = block
        self.learning_rate = learning_rate

    def descend(self, *arguments: Any) -> torch.Tensor:
        raise RuntimeError("update: it must be called with backend torch, got native; call update_native instead")

    step = descend

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of the moments (P,) and the step count ()."""
        return self.net.get_state()[self.block]

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned. Raises ValueError if kind or size differ."""
        self.net.set_state({**self.net.get_state(), self.block: state})


class NativeOptimizer:
    """The kernel's optimiser with the interface of `rlox.nn.optimizers.FlatOptimizer`, for gradients from PyTorch.

    Both use the same arrays for moments and step count, so that either may take the next step.

    Parameters
    ----------
    net : NativeActorCritic or NativeQ
        The kernel of a `NativeActor`.
    learning_rate : float
        Step size.
    """

    actor: NativeActor | None = None  # the actor of the net; set by the algorithm

    def __init__(self, net: NativeActorCritic | NativeQ, learning_rate: float):
        self._net = net
        self.learning_rate = learning_rate

    def step(self, loss: torch.Tensor, max_grad_norm: float | None) -> torch.Tensor:
        """Differentiate `loss`, clip the global gradient norm (None: do not), take one step.

        Returns the norm before clipping, ().
        """
        import torch

        if self.actor is not None:
            self.actor.attach_gradients()
        self._net.gradient.fill(0.0)
        loss.backward()
        return torch.tensor(self._net.apply(self.learning_rate, max_grad_norm), dtype=torch.float32, device="cpu")

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of the moments (P,) and the step count ()."""
        return self._net.get_state()

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned. Raises ValueError if kind or size differ."""
        self._net.set_state(state)
