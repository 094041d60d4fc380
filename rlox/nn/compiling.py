"""Losses compiled by PyTorch, with the way back where that fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

Loss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


class CompiledLoss:
    """A loss as ``torch.compile`` makes it: on CUDA replayed as one graph, on the CPU as fused C++ loops.

    Where PyTorch cannot compile it (no C++ compiler, a policy it does not understand), a `RuntimeWarning` says why,
    once, and the loss goes on as it was written.

    Parameters
    ----------
    loss : callable
        Anything to ``(loss (), metrics)``; Python numbers among its arguments are compiled in, so those that change
        from call to call are to be tensors.
    device : str
        ``cpu`` or ``cuda``.
    """

    def __init__(self, loss: Loss, device: str):
        self._plain = loss
        self._graphs = device == "cuda"
        # One compilation a size, and there are two at most: a minibatch, and a last one that is smaller.
        self._compiled: Loss | None = torch.compile(
            loss, dynamic=False, mode="reduce-overhead" if self._graphs else "default"
        )

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self._compiled is None:
            return self._plain(*arguments)
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            loss, metrics = self._compiled(*arguments)
        except Exception as e:
            # If the loss itself is at fault, its own error is the one to see.
            found = self._plain(*arguments)
            self._compiled = None
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            warnings.warn(f"compile: goes on without, for PyTorch cannot compile the loss: {reason}", RuntimeWarning, 2)
            return found
        # The next replay writes over what this one gave.
        return loss, {name: value.clone() for name, value in metrics.items()} if self._graphs else metrics
