"""What a world model learns from: sequences of a replay memory."""

from __future__ import annotations

from typing import Any

from rlox.nn.batch import SequenceBatch


def sample_sequences(algorithm: Any) -> SequenceBatch:
    """The next update's ``batch_size`` stretches of ``seq_len`` steps; the algorithm's generator decides them.

    Raises
    ------
    ValueError
        If the memory is empty, or no environment's part of it holds ``seq_len`` steps.
    """
    c, memory = algorithm.config, algorithm.buffer_config
    rows = algorithm.buffer.sample(
        c.batch_size,
        c.seq_len,
        algorithm.rng.integers(2**63),
        online=memory is None or memory.online,
        with_indices=True,
    )
    return SequenceBatch.from_rows(rows, algorithm.spec, algorithm.device)
