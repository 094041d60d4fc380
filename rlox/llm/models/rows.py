"""Logits of each row's next token while completions are sampled: with a cache that grows, or from whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlox.llm.models.language import LanguageModel
from rlox.llm.models.masks import mask_prompts, mask_step, takes_final_masks
from rlox.llm.tokens import Sequences, pad_left
from rlox.nn.transfers import send

if TYPE_CHECKING:
    from rlox.llm.models.decoding import Native

# Least number of new tokens for which a cache gets its memory at once: copying a short one costs less than preparing.
LONG = 16


class CachedRows:
    """Computes the logits of each row's next token with the model's cache, or the native decoder if it can.

    Prompts are padded on the left, so that all rows grow at the same column, and read once for all their completions.

    Attributes
    ----------
    cache : object
        Hugging Face's cache of the tokens so far; None before `read`.
    mask : tensor or None
        Which tokens (R, T) are no padding; None if there is none.
    position : tensor or None
        Positions of the next tokens (R, 1), if `mask` is not None.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Any], n: int, room: int) -> None:
        self.model, self.n, self.room = model, n, room
        ids, mask = pad_left(prompts, model.pad)
        self.ids, self.mask = send(ids, model.device), None if mask is None else send(mask, model.device)
        self.cache: Any = None
        self.position: torch.Tensor | None = None
        self.native: Native | None = None

    def read(self) -> torch.Tensor:
        """Read the prompts. Returns the logits (B, V) f32 after their last tokens."""
        if self.mask is not None:
            self.position = (self.mask.cumsum(1) - 1).clamp(min=0)
        return self._forward(self.ids)

    def next(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """Return logits (R, V) f32 after one more token of each row; with None, after the prompts."""
        if tokens is None:
            return self._prompts()
        if self.native is not None:
            return self.native.next(tokens)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        return self._forward(tokens[:, None])

    def _prompts(self) -> torch.Tensor:
        from rlox.llm.models.cache import with_room
        from rlox.llm.models.decoding import native

        logits = self.read()
        self.native = native(self.model, self.ids, self.mask, self.cache, logits, self.n, self.room)
        if self.native is None:
            self.cache.batch_repeat_interleave(self.n)
            if self.room >= LONG:
                with_room(self.cache, self.room)
            if self.mask is not None:
                self.mask = self.mask.repeat_interleave(self.n, 0)
                self.position = self.position.repeat_interleave(self.n, 0)  # type: ignore[union-attr]
        return logits.repeat_interleave(self.n, 0)

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = self.model.module(
            input_ids=ids,
            attention_mask=self._attention_mask(),
            position_ids=self.position,
            use_cache=True,
            logits_to_keep=1,
            **{self.model.cache_name: self.cache},
        )
        self.cache = getattr(output, self.model.cache_name)
        if self.position is not None:
            self.position = self.position[:, -1:] + 1
        return output.logits[:, -1].float()

    def _attention_mask(self) -> torch.Tensor | None:
        """Return the mask as the model takes it."""
        if self.mask is None or not takes_final_masks(self.model):
            return self.mask
        return mask_prompts(self.mask) if self.cache is None else mask_step(self.mask)

    def keep(self, rows: torch.Tensor) -> None:
        """Continue with only these rows, in ascending order."""
        if self.native is not None:
            return self.native.keep(rows)
        self.cache.batch_select_indices(rows)
        if self.mask is not None:
            self.mask, self.position = self.mask[rows], self.position[rows]  # type: ignore[index]


class FullRows:
    """Counterpart of `CachedRows` that reads whole rows. Padding is on the right, where no token sees it."""

    def __init__(self, model: LanguageModel, prompts: Sequence[Any], n: int) -> None:
        self.model = model
        ids, lengths = Sequences(prompts, [()] * len(prompts)).padded_rows()
        self.length = send(lengths, model.device).repeat_interleave(n)
        self.ids = send(ids, model.device).repeat_interleave(n, 0)

    def next(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """Return logits (R, V) f32 after one more token of each row; with None, after the prompts."""
        row = torch.arange(len(self.ids), device=self.ids.device)
        if tokens is not None:
            if int(self.length.max()) == self.ids.shape[1]:
                self.ids = torch.nn.functional.pad(self.ids, (0, 1))
            self.ids[row, self.length] = tokens
            self.length = self.length + 1
        return self.model.row_logits(self.ids)[row, self.length - 1].float()

    def keep(self, rows: torch.Tensor) -> None:
        """Continue with only these rows, in ascending order."""
        self.ids, self.length = self.ids[rows], self.length[rows]
