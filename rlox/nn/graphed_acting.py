"""Policies that act on a GPU as one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rlox.nn.acting import Inputs, ModulePolicy
from rlox.nn.graphs import Graphed
from rlox.nn.modules import to_array
from rlox.nn.transfers import Packing, stage, upload

_MOST_SHAPES = 4  # collection and evaluation have different numbers of environments


class GraphedPolicy(ModulePolicy):
    """One of rlox's own policies on a GPU: for each step one copy to the device, one launch, and one copy back.

    Parameters as in `ModulePolicy`.
    """

    def __init__(self, module: torch.nn.Module, device: str = "cuda"):
        super().__init__(module, device)
        self._calls = GraphedCalls(device, repr(self))

    @property
    def epsilon(self) -> float:
        """That of an ε-greedy policy."""
        return self.module.epsilon

    @epsilon.setter
    def epsilon(self, value: float) -> None:
        self.module.epsilon = value

    def act(self, inputs: Inputs, noise: Any) -> tuple[np.ndarray, Any]:
        on_host = not isinstance(noise, np.ndarray) or hasattr(self.module, "choose")
        if on_host or inputs.mask is not None:
            return super().act(inputs, noise)  # which takes the mode by the graph where it chooses on the host
        return self._call("act", {"obs": inputs.obs, "noise": noise}), None

    def mode(self, inputs: Inputs, noise: np.ndarray | None = None) -> tuple[np.ndarray, Any]:
        if inputs.mask is None:
            return self._call("mode", {"obs": inputs.obs}), None
        if hasattr(self.module, "choose"):
            return self._call("mode", {"obs": inputs.obs, "masks": inputs.mask}), None
        return super().mode(inputs, noise)

    def _call(self, method: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Return the result of a method of the module for `arrays`."""
        with self.context():
            return self._calls(method, getattr(self.module, method), arrays)


class GraphedCalls:
    """Calls of functions on a GPU with arrays of the host: one copy there, one launch, and one copy back.

    Parameters
    ----------
    device : str
        The GPU.
    name : str
        Start of the warning if a function cannot be captured.
    """

    def __init__(self, device: str, name: str):
        self._device, self._name = torch.device(device), name
        self._graphs: dict[Any, tuple[Packing, torch.Tensor, Graphed]] = {}

    def __call__(self, key: str, function: Callable[..., torch.Tensor], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the result of `function` for tensors with the values of `arrays`, on the host.

        There is a graph for each `key` and shapes. A function with the same key must do the same.
        """
        where = key, *((x.shape, x.dtype) for x in arrays.values())
        if where not in self._graphs:
            if len(self._graphs) == _MOST_SHAPES:
                return to_array(function(*upload(arrays, self._device).values()))
            packing = Packing(arrays)
            block = torch.zeros(packing.n_bytes, dtype=torch.uint8, device=self._device)
            columns = packing.views(block).values()
            self._graphs[where] = packing, block, Graphed(lambda: function(*columns), block.device, self._name)
        packing, block, graphed = self._graphs[where]
        block.copy_(packing.write(arrays, stage(packing.n_bytes, block.device)), non_blocking=True)
        return to_array(graphed())
