"""Whole updates from samples that a GPU replays as one graph: new rows, sample, update, priorities.

`update` remains the one definition of an algorithm. The host decides only numbers: it puts them, and the rows of the
last steps, into one block of memory that is copied without waiting, and starts the graph. Metrics are added up on the
device until the loop reports them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from rlox.gpu.ahead import NumbersAhead
from rlox.gpu.sources import Source
from rlox.nn.graphs import Graphed
from rlox.nn.transfers import Packing, stage


class CapturedReplay:
    """Samples and updates of an algorithm, each pair as one graph; called without arguments.

    Has the interface of `rlox.training.algorithm.Updates`.

    Parameters
    ----------
    algorithm : OffPolicyAlgorithm or OfflineAlgorithm
        The algorithm.
    source : Source
        Where its batches come from.

    Attributes
    ----------
    running : bool
        Whether the algorithm's `update` is being called from here.
    inputs : dict of Tensor
        What the host sent for the current update, by name.
    """

    def __init__(self, algorithm: Any, source: Source):
        a = self._algorithm = algorithm
        self.running = False
        self._source = source
        self._device = torch.device(a.device)
        self._update = torch.enable_grad()(a.update)
        self._graphed = Graphed(self._run, self._device, f"{a.name}.update")
        shapes = a._noise_shape(a._n_rows), a._uniform_shape(a._n_rows)
        self._numbers = NumbersAhead(a.rng, self._device, source.n_words, source.domain, *shapes, source.n_seeds)
        self._draws = source.n_words > 0 or any(shapes)
        self._packing: Packing | None = None
        self._block: Any = None
        self.inputs: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], list[str]] = {}  # of metrics, by branch of the update
        self._sums: dict[tuple[Any, ...], torch.Tensor] = {}  # of metrics since the last report
        self._counts: Counter[tuple[Any, ...]] = Counter()

    def __call__(self) -> None:
        """Sample and update once."""
        a = self._algorithm
        branch = a._branch()
        progress = np.array([a.counters.progress], np.float32)
        n_new, rows = self._source.next_inputs()
        index = np.array([self._numbers.advance() if self._draws else 0])
        self._send({"progress": progress, "index": index, **rows})
        result = self._graphed(n_new, *branch)
        self._counts[branch] += 1
        a._follow_replay()
        self._source.finish(result)

    def _send(self, arrays: dict[str, np.ndarray]) -> None:
        """Put `arrays` where the graph reads them, in one copy."""
        if self._packing is None:
            self._packing = Packing(arrays)
            self._block = torch.zeros(self._packing.n_bytes, dtype=torch.uint8, device=self._device)
            self.inputs = self._packing.views(self._block)
        host = self._packing.write(arrays, stage(self._packing.n_bytes, self._device))
        self._block.copy_(host, non_blocking=True)

    def _run(self, n_new: int, *branch: Any) -> torch.Tensor | None:
        """Store `n_new` rows, sample, and update. Returns what the batch has for a memory on the host."""
        inputs, counters = self.inputs, self._algorithm.counters
        words = self._numbers.words.index_select(0, inputs["index"]).view(-1)
        batch = self._source.make_batch(inputs, words, n_new)
        counters.captured_progress, self.running = inputs["progress"][0], True
        try:
            metrics = self._update(batch)
        finally:
            counters.captured_progress, self.running = None, False
        values = torch.stack(list(metrics.values()))
        if branch not in self._sums:  # in the first call, which is not captured
            self._names[branch] = list(metrics)
            self._sums[branch] = torch.zeros_like(values, dtype=torch.float64)
        self._sums[branch] += values
        return getattr(batch, "for_host", None)

    def noise(self) -> torch.Tensor:
        """Return the normal numbers of the current update."""
        return self._numbers.normals.index_select(0, self.inputs["index"])[0]

    def uniform(self) -> torch.Tensor:
        """Return the uniform numbers of the current update, in [0, 1)."""
        return self._numbers.uniforms.index_select(0, self.inputs["index"])[0]

    def average(self) -> dict[str, float]:
        """Return the mean of each metric over the updates since the last call that report it, in one transfer."""
        branches = [branch for branch in self._sums if self._counts[branch]]
        if not branches:
            return {}
        sums = iter(torch.cat([self._sums[branch] for branch in branches]).tolist())
        totals: dict[str, float] = {}
        counts: Counter[str] = Counter()
        for branch in branches:
            for name in self._names[branch]:
                totals[name] = totals.get(name, 0.0) + next(sums)
                counts[name] += self._counts[branch]
            self._sums[branch].zero_()
        self._counts.clear()
        return {name: total / counts[name] for name, total in totals.items()}
