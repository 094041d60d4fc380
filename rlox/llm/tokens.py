"""Token sequences of unequal lengths, and their layout as a batch: one per row, or packed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rlox.kernels.llm.packing import pack_sequences
from rlox.nn.transfers import upload


@dataclass(frozen=True)
class Layout:
    """Sequences as the rows of a batch, and the places of their scored tokens.

    The input omits the last token of each row, which predicts nothing. Padding is on the right, where causal attention
    never looks, so that no mask is needed.
    """

    ids: torch.Tensor  # (R, T) int64, the input; padding is 0
    positions: torch.Tensor | None  # (R, T) int64, from 0 in each sequence, if rows are packed; None: one per row
    row: torch.Tensor  # (N,) row of each scored token ...
    column: torch.Tensor  # (N,) ... and the column whose logits predict it
    targets: torch.Tensor  # (N,) int64, ids of the scored tokens
    first_column: int  # the smallest of `column`

    def to(self, device: str | torch.device) -> Layout:
        """Return the layout on `device`, after one copy that the host does not wait for."""
        if torch.device(device).type == "cpu":
            return self
        tensors = {item.name: getattr(self, item.name) for item in fields(self)}
        arrays = {name: x.numpy() for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        return replace(self, **upload(arrays, device))


class Sequences:
    """B token sequences, each a prompt and its completion; tokens of the completions can be scored.

    Values of scored tokens are flat arrays (N,), sequence after sequence.

    Parameters
    ----------
    prompts : sequence of integer arrays (P_i,)
        Read but never scored; at least one token each.
    completions : sequence of integer arrays (C_i,)
        May be empty.
    scored : sequence of bool arrays (C_i,), optional
        Which tokens of the completions are scored; by default all. Tokens that an environment wrote are not scored.

    Attributes
    ----------
    ids : array (L,) int64
        All tokens, sequence after sequence.
    lengths : array (B,) int64
        Number of tokens of each sequence.
    n_scored : array (B,) int64
        Number of scored tokens of each sequence.
    """

    def __init__(self, prompts: Sequence[Any], completions: Sequence[Any], scored: Sequence[Any] | None = None) -> None:
        pairs = [(_array(p), _array(c)) for p, c in zip(prompts, completions, strict=True)]
        self.ids = np.concatenate([part for pair in pairs for part in pair]) if pairs else np.empty(0, np.int64)
        self.prompt_lengths = np.array([len(p) for p, _ in pairs], np.int64)
        self.lengths = self.prompt_lengths + np.array([len(c) for _, c in pairs], np.int64)
        if pairs and self.prompt_lengths.min() < 1:
            raise ValueError(
                f"Sequences: prompts must have at least one token, got none in {self.prompt_lengths.argmin()}"
            )
        self._columns = np.arange(len(self.ids)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        self._scored = self._columns >= np.repeat(self.prompt_lengths, self.lengths)
        if scored is not None:
            self._scored[self._scored] = np.concatenate([np.asarray(s, bool) for s in scored]) if pairs else []
        self._owner = np.repeat(np.arange(len(pairs)), self.lengths)
        self.n_scored = np.bincount(self._owner[self._scored], minlength=len(pairs)).astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def _ends(self) -> np.ndarray:
        """Boundaries (B + 1,) of each sequence's scored tokens in the flat arrays."""
        return np.concatenate([[0], np.cumsum(self.n_scored)])

    def take(self, rows: np.ndarray) -> tuple[Sequences, torch.Tensor]:
        """Return only the sequences `rows` (M,) int64, and the indices of their scored tokens in the flat arrays."""
        if np.array_equal(rows, np.arange(len(self))):
            return self, torch.arange(int(self.n_scored.sum()), device="cpu")
        starts = np.cumsum(self.lengths) - self.lengths
        taken = Sequences.__new__(Sequences)
        taken.prompt_lengths, taken.lengths = self.prompt_lengths[rows], self.lengths[rows]
        taken.n_scored = self.n_scored[rows]
        tokens = _ranges(starts[rows], taken.lengths)
        taken.ids, taken._columns, taken._scored = self.ids[tokens], self._columns[tokens], self._scored[tokens]
        taken._owner = np.repeat(np.arange(len(rows)), taken.lengths)
        return taken, torch.from_numpy(_ranges(self._ends[rows], taken.n_scored))

    @cached_property
    def owner(self) -> torch.Tensor:
        """Index of the sequence of each scored token, (N,) int64."""
        return torch.from_numpy(self._owner[self._scored])

    def padded(self) -> Layout:
        """Return a layout with one sequence per row."""
        ids, _ = self.padded_rows()
        return self._layout(ids[:, : max(ids.shape[1] - 1, 1)], None, self._owner, self._columns)

    def padded_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all tokens (B, T) int64, one sequence per row with padding 0 on the right, and the lengths (B,)."""
        ids = np.zeros((len(self), max(int(self.lengths.max(initial=0)), 1)), np.int64)
        ids[self._owner, self._columns] = self.ids
        return ids, self.lengths

    def packed(self, max_length: int) -> Layout:
        """Return a layout with as many sequences per row as fit, each with positions from 0.

        `max_length` is raised to the length of the longest sequence.
        """
        capacity = max(max_length, int(self.lengths.max(initial=1)), 2)  # the input has one column less
        index, _, positions = pack_sequences(self.lengths, capacity)
        filled = index >= 0
        used = max(int(filled.sum(1).max(initial=0)), 2)
        # Sequences in the order of their rows and columns.
        row, column = np.nonzero(filled)
        starts = np.cumsum(self.lengths) - self.lengths
        source = starts[index[filled]] + positions[filled]
        at_row, at_column = np.empty(len(self.ids), np.int64), np.empty(len(self.ids), np.int64)
        at_row[source], at_column[source] = row, column
        ids = np.zeros((len(index), used), np.int64)
        ids[at_row, at_column] = self.ids
        # Padding counts as a sequence of its own, to separate it from the last sequence of the row.
        counted = np.where(filled, positions, np.cumsum(~filled, 1) - 1)[:, :used]
        return self._layout(ids[:, :-1], counted[:, :-1], at_row, at_column)

    def _layout(self, ids: np.ndarray, positions: np.ndarray | None, row: np.ndarray, column: np.ndarray) -> Layout:
        targets, before = self.ids[self._scored], column[self._scored] - 1
        return Layout(
            torch.from_numpy(np.ascontiguousarray(ids)),
            None if positions is None else torch.from_numpy(np.ascontiguousarray(positions)),
            torch.from_numpy(row[self._scored]),
            torch.from_numpy(before),
            torch.from_numpy(targets),
            int(before.min(initial=ids.shape[1] - 1)),
        )


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return start, start + 1, … of each range, one range after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)


def _array(ids: Any) -> np.ndarray:
    """Convert a tensor, array or list to token ids (L,) int64."""
    array = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids, np.int64)
    return array.astype(np.int64, copy=False).reshape(-1)


def pad_left(rows: Iterable[Any], pad: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows of unequal lengths as (R, T) int64 with `pad` on the left, and the mask (R, T) of the other tokens.

    The mask is None if all lengths are equal.
    """
    arrays = [_array(row) for row in rows]
    lengths = np.array([len(array) for array in arrays])
    mask = np.arange(lengths.max()) >= lengths.max() - lengths[:, None]
    ids = np.full(mask.shape, pad, np.int64)
    ids[mask] = np.concatenate(arrays)
    return torch.from_numpy(ids), None if mask.all() else torch.from_numpy(mask.astype(np.int64))


def in_parts(n: int, count: int) -> list[np.ndarray]:
    """Split 0 … n-1 into at most `count` runs of nearly equal length, none of them empty."""
    return [part for part in np.array_split(np.arange(n), count) if len(part)]


def unique_rows(rows: Iterable[Any]) -> tuple[list[int], np.ndarray]:
    """Return the indices of rows of ids without their repetitions, and for each row (N,) its index among them."""
    seen: dict[bytes, tuple[int, int]] = {}  # the number of a row among the different ones, and its index
    numbers = []
    for i, row in enumerate(rows):
        numbers.append(seen.setdefault(np.asarray(row, np.int64).tobytes(), (len(seen), i))[0])
    return [i for _, i in seen.values()], np.array(numbers, np.int64)
