"""Whole updates that a GPU replays as one graph: loss, gradient, clipping, optimiser and schedules, of all minibatches.

An algorithm's `update` remains its only definition. What it reads is put where the graph reads it: the columns of the
batch, and the progress of its schedules. Minibatches and noise are drawn on the device (`rlox.nn.random.DeviceRng`).
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch

from rlox.nn.graphs import Graphed

_MOST_SHAPES = 4  # of batches, each of which has a graph


def find_capture_obstacle(algorithm: Any) -> str | None:
    """Return why a GPU cannot replay the updates of `algorithm` as one graph; None if it can."""
    if algorithm.device != "cuda":
        return "it runs on the CPU"
    if algorithm.ranks.joined:
        return "the ranks of distributed=ddp exchange gradients"
    definer = next(cls for cls in type(algorithm).__mro__ if "update" in vars(cls))
    if "update" in vars(algorithm) or not definer.__module__.startswith("rlox."):
        return f"the update of {definer.__name__} is not rlox's own"
    if algorithm._own_policy:
        return "the policy is custom, and may run Python code that a replay would skip"
    if algorithm.config.recurrent:
        return "a memory runs through its sequences step by step"
    return algorithm._capture_obstacle()


class CapturedUpdate:
    """The `update` of an algorithm on a GPU, captured as a graph and replayed. Called with a batch, returns metrics.

    There is a graph for each of the first shapes of batches; batches of further shapes are not captured. Numbers of the
    host that decide an update are constants of the graph, with the exception of `counters.progress`, which is a tensor
    while it is captured.

    Attributes
    ----------
    graphs : dict
        By the shapes of batches: the batch that a graph reads, and the graph.
    """

    def __init__(self, algorithm: Any):
        self._algorithm = algorithm
        self._update = torch.enable_grad()(algorithm.update)
        self._progress = torch.zeros((), dtype=torch.float32, device=algorithm.device)
        self.graphs: dict[Hashable, tuple[Any, Graphed]] = {}  # by shapes: where a graph reads its batch, and the graph

    def __call__(self, batch: Any) -> dict[str, Any]:
        self._progress.fill_(self._algorithm.counters.progress)
        graphed = self._take(batch)
        if graphed is None:
            return self._update(batch)
        names, values, numbers = graphed()
        # One copy, because the next replay overwrites the values, and a loop may read them later.
        tensors = dict(zip(names, values.clone().unbind(), strict=True))
        return {name: tensors.get(name, value) for name, value in numbers.items()}

    def _take(self, batch: Any) -> Graphed | None:
        """Put the columns of `batch` where a graph reads them, and return it; None if there is none for them."""
        columns = batch.columns()
        if not all(isinstance(column, torch.Tensor) for column in columns.values()):
            return None  # the number of frames of stacked images varies
        shapes = tuple((name, x.shape, x.dtype) for name, x in columns.items())
        if shapes not in self.graphs:
            if len(self.graphs) == _MOST_SHAPES:
                return None
            # A reused batch is in the same memory next time; others are copied into that of the first one.
            own = batch if batch.reused else batch.with_columns({name: x.clone() for name, x in columns.items()})
            name = f"{self._algorithm.name}.update"
            self.graphs[shapes] = own, Graphed(partial(self._run, own), self._algorithm.device, name)
            return self.graphs[shapes][1]
        own, graphed = self.graphs[shapes]
        for name, column in own.columns().items():
            if columns[name].data_ptr() != column.data_ptr():
                column.copy_(columns[name])
        return graphed

    def _run(self, batch: Any) -> tuple[list[str], torch.Tensor, dict[str, Any]]:
        """Run the update on the memory of a graph. Returns the names of metrics that are tensors, their values (K,)
        f64, and all metrics in order."""
        counters = self._algorithm.counters
        counters.captured_progress = self._progress
        try:
            metrics = self._update(batch)
        finally:
            counters.captured_progress = None
        tensors = {name: value for name, value in metrics.items() if isinstance(value, torch.Tensor)}
        return list(tensors), torch.stack([value.double() for value in tensors.values()]), dict(metrics)
