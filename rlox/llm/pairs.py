"""Pairs of completions as one batch of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlox.config import shown
from rlox.llm.encoded import Encoded
from rlox.llm.tokens import Sequences


@dataclass(frozen=True)
class Pairs:
    """B pairs: the chosen completions are the first B sequences, the rejected ones the others."""

    sequences: Sequences
    numbers: np.ndarray  # (B,) int64, their rows
    margins: np.ndarray | None = None  # (B,) f32, by how much rewards are to differ, where rows say so

    def __len__(self) -> int:
        return len(self.sequences) // 2


def pairs_of(rows: Encoded, numbers: np.ndarray) -> Pairs:
    """The pairs `numbers` of `rows`.

    Raises
    ------
    ValueError
        For a ``margin`` that is no number.
    """
    sides = [side[i] for side in (rows.chosen, rows.rejected) for i in numbers]
    margins = None
    if "margin" in rows.columns:
        try:
            margins = np.array([rows.columns["margin"][i] for i in numbers], np.float32)
        except (TypeError, ValueError) as e:
            raise ValueError(f"dataset: margin must hold numbers, got {shown(rows.columns['margin'][:3])}") from e
    return Pairs(Sequences([rows.prompts[i] for i in numbers] * 2, sides), numbers, margins)
