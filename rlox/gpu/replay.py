"""Whole updates of off-policy algorithms that a GPU replays as one graph: new rows, sample, update, priorities.

`update` remains the one definition of an algorithm. The host decides only numbers: it puts them, and the rows of the
last steps, into one block of memory that is copied without waiting, and starts the graph. Metrics are added up on the
device until the loop reports them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from rlox.buffers.device import DeviceReplayBuffer, PrioritizedDeviceReplayBuffer
from rlox.gpu.ahead import NumbersAhead
from rlox.nn.batch import TransitionBatch
from rlox.nn.graphs import Graphed
from rlox.nn.transfers import Packing, stage

# Rows of a round that are sent together with the numbers of an update; more of them go on their own.
_MOST_SENT = 64


class _StaticBatch(TransitionBatch):
    """A batch whose columns stay where they are, and whose priorities the host updates after a replay."""

    td_errors: torch.Tensor | None = None

    def update_priorities(self, buffer: Any, td_errors: Any) -> None:
        self.td_errors = td_errors


class CapturedReplay:
    """Samples and updates of an off-policy algorithm, each pair as one graph; called without arguments.

    Has the interface of `rlox.training.algorithm.Updates`.

    Parameters
    ----------
    algorithm : OffPolicyAlgorithm
        The algorithm. Its memory is on its device, or on the host.

    Attributes
    ----------
    running : bool
        Whether the algorithm's `update` is being called from here.
    """

    def __init__(self, algorithm: Any):
        a = self._algorithm = algorithm
        self.running = False
        memory: Any = a.buffer
        self._memory = memory if isinstance(memory, DeviceReplayBuffer) else None
        self._device = torch.device(a.device)
        self._update = torch.enable_grad()(a.update)
        self._graphed = Graphed(self._run, self._device, f"{a.name}.update")
        n, shape = a._n_rows, a._noise_shape(a._n_rows)
        if self._memory is None:
            self._n_round, n_words, domain = 0, 0, 0
        else:
            steps = a._round_steps()
            self._n_round = steps if steps <= min(_MOST_SENT, memory.capacity) else 0
            n_words, domain = n * memory.words_per_row, memory.domain
        others = 0 if self._memory is not None else 1 if a._dataset is None else 2  # seeds that the host draws itself
        self._numbers = NumbersAhead(a.rng, self._device, n_words, domain, shape, others)
        self._packing: Packing | None = None
        self._block: Any = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._batch: Any = None  # of rows from the host
        self._names: dict[tuple[Any, ...], list[str]] = {}  # of metrics, by branch of the update
        self._sums: dict[tuple[Any, ...], torch.Tensor] = {}  # of metrics since the last report
        self._counts: Counter[tuple[Any, ...]] = Counter()

    def __call__(self) -> None:
        """Sample and update once."""
        a, memory = self._algorithm, self._memory
        branch = a._branch()
        numbers = np.array([a.counters.progress], np.float32)
        rows: dict[str, Any] = {}
        n_new, indices = 0, None
        if memory is not None:
            if memory.n_pending not in (0, self._n_round):
                memory.flush()
            n_new = memory.n_pending
            beta = a._beta(a.counters.progress)
            if isinstance(memory, PrioritizedDeviceReplayBuffer) and beta is not None:
                memory.beta = beta
            rows = {
                "extent": memory.host_extent(),
                "slots": memory.newest_slots(self._n_round),
                "beta": np.array([0.0 if beta is None else beta]),
                "rows": self._room_for(memory.take_pending()),
            }
        else:
            rows = TransitionBatch.columns_of(a._host_rows(), a.config.gamma, a.spec)
            indices = rows.pop("indices", None)
        index = np.array([self._numbers.advance()])
        self._send({"progress": numbers, "index": index, **rows})
        td_errors = self._graphed(n_new, *branch)
        self._counts[branch] += 1
        a._follow_replay()
        if indices is not None and td_errors is not None:
            self._batch.indices = indices
            TransitionBatch.update_priorities(self._batch, a.buffer, td_errors)

    def _room_for(self, rows: np.ndarray) -> np.ndarray:
        """Return `rows` of the last round, or as many of zeros if there are none."""
        if len(rows):
            return rows
        return np.zeros((self._n_round, rows.shape[1]), np.float32)

    def _send(self, arrays: dict[str, np.ndarray]) -> None:
        """Put `arrays` where the graph reads them, in one copy."""
        if self._packing is None:
            self._packing = Packing(arrays)
            self._block = torch.zeros(self._packing.n_bytes, dtype=torch.uint8, device=self._device)
            self._inputs = self._packing.views(self._block)
            if self._memory is None:
                own = {name: x for name, x in self._inputs.items() if name not in ("progress", "index")}
                self._batch = _StaticBatch(**own)
        host = self._packing.write(arrays, stage(self._packing.n_bytes, self._device))
        self._block.copy_(host, non_blocking=True)

    def _run(self, n_new: int, *branch: Any) -> torch.Tensor | None:
        """Store `n_new` rows, sample, and update. Returns TD errors for the priorities of a memory on the host."""
        a, memory, inputs = self._algorithm, self._memory, self._inputs
        batch = self._batch
        if memory is not None:
            memory.extent.copy_(inputs["extent"])
            if n_new:
                memory.absorb(inputs["rows"], inputs["slots"])
            words = self._numbers.words.index_select(0, inputs["index"]).view(-1)
            batch = TransitionBatch.from_tensors(memory.draw(words, inputs["beta"][0]), a.config.gamma, a.spec)
        counters = a.counters
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
        return getattr(batch, "td_errors", None)

    def noise(self) -> torch.Tensor:
        """Return the normal numbers of the current update."""
        return self._numbers.normals.index_select(0, self._inputs["index"])[0]

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
