"""Losses compiled by PyTorch, with a fallback if compilation fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from rlox.nn.modules import out_of_memory

Loss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


class CompiledLoss:
    """A loss compiled with ``torch.compile``: on CUDA as fused kernels, on the CPU as fused C++ loops.

    If PyTorch cannot compile it (no C++ compiler, an unsupported policy), a single `RuntimeWarning` reports the reason,
    and the loss continues uncompiled.

    Parameters
    ----------
    loss : callable
        Function with any arguments that returns ``(loss (), metrics)``. Python numbers among its arguments become
        constants of the compiled code, so arguments that change from call to call must be tensors.
    graphs : bool
        Whether CUDA replays the loss and its gradient as one graph each, unless a graph of the whole update is to
        contain them.
    """

    def __init__(self, loss: Loss, graphs: bool):
        self._plain = loss
        self._graphs = graphs
        # One compilation per size. There are at most two sizes: a minibatch, and a smaller last minibatch.
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
            if out_of_memory(e):
                raise
            # If the loss itself fails, raise its own error.
            found = self._plain(*arguments)
            self._compiled = None
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            warnings.warn(
                f"compile: continuing without it, because PyTorch cannot compile the loss: {reason}", RuntimeWarning, 2
            )
            return found
        # The next replay overwrites these outputs.
        return loss, {name: value.clone() for name, value in metrics.items()} if self._graphs else metrics
