"""Where the batches of captured updates come from: a replay memory or a dataset on the device, or rows of the host.

A source gives the host what an update needs from it, as arrays that are copied to the device together, and makes a
batch of them on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlox.buffers.device import DeviceReplayBuffer, PrioritizedDeviceReplayBuffer
from rlox.buffers.device_dataset import DeviceDataset
from rlox.envs import EnvSpec
from rlox.nn.batch import SequenceBatch, TransitionBatch

# Rows of a round that are sent together with the numbers of an update; more of them go on their own.
_MOST_SENT = 64


class MemorySource:
    """Transitions of a replay memory on the device, and the newest ones, which are still on the host.

    Parameters
    ----------
    algorithm : OffPolicyAlgorithm
        The algorithm, with its memory.

    Attributes
    ----------
    n_words, domain : int
        Random words that a batch takes, and their domain; 0: the host draws the rows itself.
    n_seeds : int
        Seeds that the host draws itself for a batch.
    """

    n_seeds = 0

    def __init__(self, algorithm: Any):
        self._algorithm, self._memory = algorithm, algorithm.buffer
        steps = algorithm._round_steps()
        self._n_round = steps if steps <= min(_MOST_SENT, self._memory.capacity) else 0
        self.n_words = algorithm._n_rows * self._memory.words_per_row
        self.domain = self._memory.domain

    def next_inputs(self) -> tuple[int, dict[str, np.ndarray]]:
        """Return how many rows are new, and what the next update needs from the host."""
        a, memory = self._algorithm, self._memory
        if memory.n_pending not in (0, self._n_round):
            memory.flush()
        n_new, beta = memory.n_pending, a._beta(a.counters.progress)
        if isinstance(memory, PrioritizedDeviceReplayBuffer) and beta is not None:
            memory.beta = beta
        new = memory.take_pending()
        return n_new, {
            "extent": memory.host_extent(),
            "slots": memory.newest_slots(self._n_round),
            "beta": np.array([0.0 if beta is None else beta]),
            "rows": new if len(new) else np.zeros((self._n_round, new.shape[1]), np.float32),
        }

    def make_batch(self, inputs: dict[str, torch.Tensor], words: torch.Tensor, n_new: int) -> TransitionBatch:
        """Store `n_new` rows, and return the batch that random `words` (n_words,) choose."""
        a, memory = self._algorithm, self._memory
        memory.extent.copy_(inputs["extent"])
        if n_new:
            memory.absorb(inputs["rows"], inputs["slots"])
        return TransitionBatch.from_tensors(memory.draw(words, inputs["beta"][0]), a.config.gamma, a.spec)

    def finish(self, result: torch.Tensor | None) -> None:
        """Receive what the batch kept for the host, as ``for_host``, after an update has run."""


class DatasetSource:
    """Transitions of a dataset on the device; attributes and methods as those of `MemorySource`."""

    n_seeds = 0

    def __init__(self, dataset: DeviceDataset, batch_size: int, gamma: float, spec: EnvSpec):
        self._dataset, self._gamma, self._spec = dataset, gamma, spec
        self.n_words = batch_size * dataset.words_per_row
        self.domain = dataset.domain

    def next_inputs(self) -> tuple[int, dict[str, np.ndarray]]:
        return 0, {}

    def make_batch(self, inputs: dict[str, torch.Tensor], words: torch.Tensor, n_new: int) -> TransitionBatch:
        return TransitionBatch.from_tensors(self._dataset.draw(words), self._gamma, self._spec)

    def finish(self, result: torch.Tensor | None) -> None:
        """Do nothing: all transitions are equally likely."""


class HostSource:
    """Rows that the host draws for each update; attributes and methods as those of `MemorySource`."""

    n_words = domain = 0

    def __init__(self, algorithm: Any, gamma: float, n_seeds: int):
        self._algorithm, self._gamma, self.n_seeds = algorithm, gamma, n_seeds
        self._batch: Any = None
        self._indices: np.ndarray | None = None

    def next_inputs(self) -> tuple[int, dict[str, np.ndarray]]:
        rows = TransitionBatch.columns_of(self._algorithm._host_rows(), self._gamma, self._algorithm.spec)
        self._indices = rows.pop("indices", None)
        return 0, rows

    def make_batch(self, inputs: dict[str, torch.Tensor], words: torch.Tensor, n_new: int) -> TransitionBatch:
        if self._batch is None:
            self._batch = _StaticBatch(**{name: x for name, x in inputs.items() if name not in ("progress", "index")})
        return self._batch

    def finish(self, result: torch.Tensor | None) -> None:
        if self._indices is not None and result is not None:
            self._batch.indices = self._indices
            TransitionBatch.update_priorities(self._batch, self._algorithm.buffer, result)


class _StaticBatch(TransitionBatch):
    """A batch whose columns stay where they are, and whose priorities the host updates after a replay."""

    for_host: torch.Tensor | None = None  # TD errors (B,)

    def update_priorities(self, buffer: Any, td_errors: Any) -> None:
        self.for_host = td_errors


class SequenceSource:
    """Sequences, and the numbers that their update draws, of the host; attributes and methods as `MemorySource`."""

    n_words = domain = 0
    n_seeds = 1

    def __init__(self, algorithm: Any):
        self._algorithm = algorithm
        self._batch: Any = None
        self._columns: list[str] = []

    def next_inputs(self) -> tuple[int, dict[str, np.ndarray]]:
        a = self._algorithm
        rows = a._host_rows()
        self._indices = rows["indices"]
        columns = SequenceBatch.columns_of(rows, a.spec)
        self._columns = list(columns)
        return 0, {**columns, **a._host_numbers()}

    def make_batch(self, inputs: dict[str, torch.Tensor], words: torch.Tensor, n_new: int) -> SequenceBatch:
        if self._batch is None:
            self._batch = _StaticSequences(**{name: inputs[name] for name in self._columns})
        return self._batch

    def finish(self, result: torch.Tensor | None) -> None:
        if result is not None:
            self._batch.indices = self._indices
            SequenceBatch.update_states(self._batch, self._algorithm.buffer, result)


class _StaticSequences(SequenceBatch):
    """Sequences whose columns stay where they are, and whose states the host updates after a replay."""

    for_host: torch.Tensor | None = None  # states (B, T, S)

    def update_states(self, buffer: Any, states: Any) -> None:
        self.for_host = states


Source = MemorySource | DatasetSource | HostSource | SequenceSource


def source_of_memory(algorithm: Any) -> Source:
    """Return the batches of an off-policy algorithm, whose memory is on its device or on the host."""
    if isinstance(algorithm.buffer, DeviceReplayBuffer):
        return MemorySource(algorithm)
    return HostSource(algorithm, algorithm.config.gamma, 1 if algorithm._dataset is None else 2)
