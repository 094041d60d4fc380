"""A cache of keys and values of fixed size, with which every token of a completion is the same work on the same memory.

A GPU then replays one token's work as a CUDA graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from rlox.llm.models.cache import TOLERANCE
from rlox.llm.models.families import replayable
from rlox.llm.models.language import LanguageModel
from rlox.llm.models.masks import sees_all_tokens
from rlox.llm.models.rows import LONG, CachedRows

# Columns of the cache are a multiple of this: attention on GPUs copies masks whose rows are not aligned.
_ALIGNED = 8


def uses_static_cache(model: LanguageModel, room: int) -> bool:
    """Return whether completions of `model`, of up to `room` tokens, are sampled with a cache of fixed size.

    ``model.sample_cache`` decides: ``auto`` takes one on a GPU for long completions, if the model can, and warns once
    if it cannot.

    Raises
    ------
    ValueError
        If it is ``static``, and the model cannot.
    """
    wanted = model.sample_cache
    if wanted == "dynamic" or (wanted == "auto" and (model.device.type != "cuda" or room < LONG)):
        return False
    if model.static is None:
        why = static_obstacle(model)
        if why is not None and wanted == "static":
            raise ValueError(
                f"{model.where}: sample_cache must be auto or dynamic for {model.kind}, got 'static': {why}"
            )
        model.static = why is None
        if why is not None:
            warnings.warn(
                f"{model.where}: completions of {model.kind} are sampled with a cache that grows, launch by launch: "
                f"{why}",
                stacklevel=3,
            )
    return model.static


def static_obstacle(model: LanguageModel) -> str | None:
    """Return why a cache of fixed size cannot be used for `model`; None if it can.

    At the end, two tokens after two prompts are computed with it, and from whole rows.
    """
    if not model.hugging_face:
        return "a module of your own has no cache"
    if not model.cached:
        return "its cache cannot be used"
    if not sees_all_tokens(model):
        return f"it needs sdpa or eager attention over all tokens in all layers, and has {model.attention}"
    if not replayable(model.module):
        return "it has hooks or classes of your own, whose Python code a graph would leave out"
    size = model.vocabulary or 4
    prompts, new = [[1 % size, 2 % size, 3 % size], [3 % size]], [2 % size, 1 % size]
    try:
        rows = StaticRows(model, prompts, 2, 3)
        rows.next(None)
        ours = [rows.next(torch.full((4,), token, device=model.device)) for token in new]
    except Exception as e:  # a reason that has nothing to do with the cache is raised by other passes, too
        return f"a cache of fixed size cannot be used ({type(e).__name__})"
    for i, logits in enumerate(ours):
        alone = [model.row_logits(torch.tensor([[*row, *new[: i + 1]]], device=model.device))[0, -1] for row in prompts]
        whole = torch.stack(alone).float().repeat_interleave(2, 0)
        # Logits that are not finite are an error of `sample`.
        if float((logits - whole).abs().max()) > TOLERANCE * float(whole.abs().max()):
            return "a cache of fixed size gives other logits than whole rows"
    return None


class StaticLayer(DynamicLayer):
    """Keys and values (R, H, L, D) of one layer, in memory that stays where it is.

    Parameters
    ----------
    layer : DynamicLayer
        Keys and values (B, H, P, D) of the prompts.
    n : int
        Rows of each prompt; R = B * n.
    n_columns : int
        L.
    column : tensor (1,) int64
        The column of the next token, which all layers share, and which the owner advances.
    """

    def __init__(self, layer: DynamicLayer, n: int, n_columns: int, column: torch.Tensor) -> None:
        super().__init__()
        self.device, self.is_initialized = layer.keys.device, True
        self._column = column
        self.keys, self.values = (self._widen(x, n, n_columns) for x in (layer.keys, layer.values))

    @staticmethod
    def _widen(x: torch.Tensor, n: int, n_columns: int) -> torch.Tensor:
        # The columns to come are multiplied by weights of 0, and must be finite.
        block = x.new_zeros(len(x), n, x.shape[1], n_columns, x.shape[3])
        block[:, :, :, : x.shape[2]] = x[:, None]
        return block.flatten(0, 1)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for block, new in ((self.keys, key_states), (self.values, value_states)):
            block.index_copy_(2, self._column, new.to(block.dtype))
        return self.keys, self.values


class StaticRows:
    """Computes the logits of each row's next token with a cache of fixed size.

    Each call of `next` does the same operations on the same memory: columns to come are hidden by a mask.

    Parameters
    ----------
    model : LanguageModel
        A model for which there is no `static_obstacle`.
    prompts : sequence of integer arrays (P_i,)
        Token ids without padding.
    n : int
        Rows of each prompt.
    room : int
        Maximum number of new tokens of a row.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Any], n: int, room: int) -> None:
        self.model, self.n, self._room = model, n, room
        self._prompts = CachedRows(model, prompts, n, room)
        self._cache: Any = None

    def next(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """Return logits (R, V) f32 after one more token of each row; with None, after the prompts."""
        if tokens is None:
            logits = self._prompts.read()
            self._prepare()
            return logits.repeat_interleave(self.n, 0)
        self._mask.index_fill_(3, self._column, self._visible)
        output = self.model.module(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._position,
            use_cache=True,
            logits_to_keep=1,
            **{self.model.cache_name: self._cache},
        )
        self._column += 1
        self._position += 1
        return output.logits[:, -1].float()

    def _prepare(self) -> None:
        """Copy the keys and values of the prompts, once per row, into the cache."""
        layers, mask = self._prompts.cache.layers, self._prompts.mask
        if not all(type(layer) is DynamicLayer for layer in layers):
            raise TypeError(f"layers of the cache must be DynamicLayer, got {type(layers[0]).__name__}")
        n_prompts, width = self._prompts.ids.shape
        # The last token of a row is never read.
        n_columns = -(-(width + self._room - 1) // _ALIGNED) * _ALIGNED
        seen = torch.ones((n_prompts, width), dtype=torch.bool, device=self.model.device) if mask is None else mask > 0
        self._column = torch.full((1,), width, device=seen.device)
        self._position = seen.sum(1, keepdim=True).repeat_interleave(self.n, 0)
        seen = torch.nn.functional.pad(seen, (0, n_columns - width)).repeat_interleave(self.n, 0)[:, None, None]
        # `eager` adds its mask to the scores.
        is_added = self.model.attention == "eager"
        self._visible = 0.0 if is_added else True
        lowest = torch.finfo(torch.float32).min
        self._mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, lowest) if is_added else seen
        self._cache = Cache(layers=[StaticLayer(layer, self.n, n_columns, self._column) for layer in layers])
        self._prompts.cache = None

    def keep(self, rows: torch.Tensor) -> None:
        """Continue with only these rows, in ascending order, in new memory."""
        self._cache.batch_select_indices(rows)
        self._mask, self._position = self._mask[rows], self._position[rows]
