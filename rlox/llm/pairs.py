"""Pairs of completions as one batch of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlox.config import shown
from rlox.llm.encoded import Encoded
from rlox.llm.tokens import Sequences


@dataclass(frozen=True)
class Pairs:
    """B pairs: the first B sequences have the chosen completions, the last B the rejected ones."""

    sequences: Sequences
    numbers: np.ndarray  # (B,) int64, their rows in the dataset
    margins: np.ndarray | None = None  # (B,) f32, required difference of the rewards, if the dataset has margins

    def __len__(self) -> int:
        return len(self.sequences) // 2


def pairs_of(rows: Encoded, numbers: np.ndarray) -> Pairs:
    """Return the pairs `numbers` of `rows`; raise a ValueError if a ``margin`` is not a number."""
    sides = [side[i] for side in (rows.chosen, rows.rejected) for i in numbers]
    margins = None
    if "margin" in rows.columns:
        try:
            margins = np.array([rows.columns["margin"][i] for i in numbers], np.float32)
        except (TypeError, ValueError) as e:
            raise ValueError(f"dataset: margin must hold numbers, got {shown(rows.columns['margin'][:3])}") from e
    return Pairs(Sequences([rows.prompts[i] for i in numbers] * 2, sides), numbers, margins)
