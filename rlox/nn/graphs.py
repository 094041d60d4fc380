"""Functions on tensors of a GPU, replayed as one CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch

from rlox.nn.modules import out_of_memory

# Calls before the capture: libraries create their handles and workspaces, and compilers their code, in the first ones.
N_EAGER = 3


class Graphed:
    """A function that is captured once as a CUDA graph, and replayed with a single launch afterwards.

    The first `N_EAGER` calls run `function` as it is, the next one captures it; every call counts and has the same
    effect. On the CPU, all calls run `function`.

    A replay repeats the kernels of the capture on the same memory, and none of the Python code. So `function`

    - reads its inputs from tensors that stay where they are (callers use ``copy_``), and writes its state into such,
    - may neither wait for the device nor choose shapes or branches by the values of tensors,
    - and treats every Python value as a constant, with the exception of its arguments: there is one graph for each.

    The result contains the tensors of the capture: the next call with the same arguments overwrites them.

    If the function cannot be captured, a single `RuntimeWarning` reports the reason, and it continues without a graph.

    Parameters
    ----------
    function : callable
        Called with positional arguments that are hashable Python values, such as whether the policy learns, too.
    device : str or torch.device
        Device of its tensors.
    name : str
        Start of the warning.
    stream : torch.cuda.Stream, optional
        One on which libraries are ready after one call; by default a new one, and `N_EAGER` calls.

    Attributes
    ----------
    obstacle : str or None
        Why it is not captured; None if it is or will be.
    """

    def __init__(self, function: Callable[..., Any], device: str | torch.device, name: str, stream: Any = None):
        self._function, self._name = function, name
        self._device = torch.device(device)
        self.obstacle: str | None = None if self._device.type == "cuda" else "it runs on the CPU"
        self._n_calls: dict[tuple[Hashable, ...], int] = {}
        self._captured: dict[tuple[Hashable, ...], tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._stream, self._n_eager = stream, N_EAGER if stream is None else 1  # never the default stream

    def __call__(self, *arguments: Hashable) -> Any:
        if self.obstacle is not None:
            return self._function(*arguments)
        if arguments not in self._captured:
            n = self._n_calls[arguments] = self._n_calls.get(arguments, 0) + 1
            if n <= self._n_eager:
                return self._run_beside(arguments)
            try:
                self._captured[arguments] = self._capture(arguments)
            except Exception as e:
                if out_of_memory(e):
                    raise
                # Nothing of a failed capture was executed. If the function itself fails, raise its own error.
                result = self._function(*arguments)
                self._give_up(e)
                return result
        graph, result = self._captured[arguments]
        graph.replay()
        return result

    def _run_beside(self, arguments: tuple[Hashable, ...]) -> Any:
        """Call the function on the stream of the later capture, between what the current stream runs before and
        after."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._function(*arguments)
        current.wait_stream(self._stream)
        return result

    def _capture(self, arguments: tuple[Hashable, ...]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Return the graph of the function with these arguments, which has not run yet, and its static result."""
        graph = torch.cuda.CUDAGraph()
        # PyTorch's context does not leave the stream if the capture fails; the outer one does. Errors of calls that
        # must not be captured are raised for this thread only: other ones may use the device meanwhile.
        with (
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = self._function(*arguments)
        return graph, result

    def _give_up(self, error: Exception) -> None:
        text = str(error).strip()
        self.obstacle = text.splitlines()[0] if text else type(error).__name__
        self._captured.clear()
        warnings.warn(
            f"{self._name}: continuing without a CUDA graph, because PyTorch cannot capture it: {self.obstacle}",
            RuntimeWarning,
            stacklevel=3,
        )
