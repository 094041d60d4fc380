"""Losses compiled by PyTorch, with a fallback if compilation fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from rlox.nn.modules import out_of_memory

Loss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Compiled:
    """A function compiled with ``torch.compile``: on CUDA as fused kernels, on the CPU as fused C++ loops.

    If PyTorch cannot compile it (no C++ compiler, an unsupported policy), a single `RuntimeWarning` reports the reason,
    and the function continues uncompiled.

    Parameters
    ----------
    function : callable
        Function with any arguments. Python numbers among its arguments become constants of the compiled code, so
        arguments that change from call to call must be tensors.
    name : str
        What is compiled, for the warning.
    graphs : bool
        Whether CUDA replays the function and its gradient as one graph each.
    """

    def __init__(self, function: Callable[..., Any], name: str, graphs: bool = False):
        self._plain = function
        self._name = name
        self._graphs = graphs
        # One compilation per size. There are at most two sizes: a minibatch, and a smaller last minibatch.
        mode = "reduce-overhead" if graphs else "default"
        self._compiled: Callable[..., Any] | None = torch.compile(function, dynamic=False, mode=mode)

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            return self._plain(*arguments)
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            return self._compiled(*arguments)
        except Exception as e:
            if out_of_memory(e):
                raise
            # If the function itself fails, raise its own error.
            result = self._plain(*arguments)
            self._compiled = None
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            warnings.warn(
                f"compile: continuing without it, because PyTorch cannot compile {self._name}: {reason}",
                RuntimeWarning,
                2,
            )
            return result


class CompiledLoss(Compiled):
    """A compiled loss, a function that returns ``(loss (), metrics)``.

    Parameters
    ----------
    loss : callable
        See `Compiled`.
    graphs : bool
        Whether CUDA replays the loss and its gradient as one graph each, unless a graph of the whole update is to
        contain them.
    """

    def __init__(self, loss: Loss, graphs: bool):
        super().__init__(loss, "the loss", graphs)

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = super().__call__(*arguments)
        # The next replay overwrites these outputs.
        return loss, {name: value.clone() for name, value in metrics.items()} if self._graphs else metrics
