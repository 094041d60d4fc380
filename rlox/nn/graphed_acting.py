"""A policy that acts on a GPU as one graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlox.nn.acting import Inputs, ModulePolicy
from rlox.nn.graphs import Graphed
from rlox.nn.modules import to_array
from rlox.nn.transfers import Packing, stage

_MOST_SHAPES = 4  # collection and evaluation have different numbers of environments


class GraphedPolicy(ModulePolicy):
    """One of rlox's own policies on a GPU: for each step one copy to the device, one launch, and one copy back.

    Parameters as in `ModulePolicy`.
    """

    def __init__(self, module: torch.nn.Module, device: str = "cuda"):
        super().__init__(module, device)
        self._graphs: dict[Any, tuple[Packing, torch.Tensor, Graphed]] = {}

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
        key = method, *((x.shape, x.dtype) for x in arrays.values())
        with self.context():
            if key not in self._graphs:
                if len(self._graphs) == _MOST_SHAPES:
                    return to_array(getattr(self.module, method)(*map(self.place, arrays.values())))
                packing, device = Packing(arrays), torch.device(self.device)
                block = torch.zeros(packing.n_bytes, dtype=torch.uint8, device=device)
                columns, function = packing.views(block).values(), getattr(self.module, method)
                graphed = Graphed(lambda: function(*columns), device, f"{self}.{method}")
                self._graphs[key] = packing, block, graphed
            packing, block, graphed = self._graphs[key]
            block.copy_(packing.write(arrays, stage(packing.n_bytes, block.device)), non_blocking=True)
            return to_array(graphed())
