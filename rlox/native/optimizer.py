"""Optimisers of native learners, with PyTorch's interface."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.kernels.nn.dqn import NativeQ
from rlox.kernels.nn.policy_gradient import NativeActorCritic
from rlox.native.policies import NativeActor

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.kernels.nn.sac import NativeSAC
    from rlox.kernels.nn.td3 import NativeTD3


class NativeAdam:
    """One of the optimisers of a `NativeBoundedPolicy`'s kernel as `rlox.nn.optimizers.FlatOptimizer` is saved.

    Parameters
    ----------
    parameters : iterable of nn.Parameter
        Laid out anew as views of one block.
    block : str
        The kernel's name for it.
    learning_rate : float
        Step size.
    """

    net: NativeSAC | NativeTD3  # given when there is one

    def __init__(self, parameters: Iterable[nn.Parameter], block: str, learning_rate: float):
        from rlox.nn.optimizers import flatten_

        self.flat = flatten_(list(parameters))
        self.block = block
        self.learning_rate = learning_rate

    def descend(self, *arguments: Any) -> torch.Tensor:
        raise RuntimeError("update: it must be called where the backend is torch, got native; there is update_native")

    step = descend

    def state(self) -> dict[str, np.ndarray]:
        """Moments (P,) and the step count (), copies."""
        return self.net.get_state()[self.block]

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned; a ValueError where kind or size differ."""
        self.net.set_state({**self.net.get_state(), self.block: state})


class NativeOptimizer:
    """The kernel's optimiser as `rlox.nn.optimizers.FlatOptimizer` is used: for gradients that PyTorch computes.

    Both count and average in the same arrays, so that either may take the next step.

    Parameters
    ----------
    net : NativeActorCritic or NativeQ
        Of a `NativeActor`.
    learning_rate : float
        Step size.
    """

    actor: NativeActor | None = None  # that of the net; the algorithm sets it

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
        return torch.tensor(self._net.apply(self.learning_rate, max_grad_norm), dtype=torch.float32)

    def state(self) -> dict[str, np.ndarray]:
        """Moments (P,) and the step count (), copies."""
        return self._net.get_state()

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned; a ValueError where kind or size differ."""
        self._net.set_state(state)
