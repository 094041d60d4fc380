"""Sample the sequences that a world model learns from."""

from __future__ import annotations

from typing import Any

from rlox.nn.batch import SequenceBatch


def sample_sequences(algorithm: Any) -> SequenceBatch:
    """Return ``batch_size`` sequences of ``seq_len`` steps for the next update, drawn with the algorithm's generator.

    Raises
    ------
    ValueError
        If the memory is empty, or no environment has ``seq_len`` steps in it.
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
