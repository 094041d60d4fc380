"""Caches of keys and values: whether a model's can be used for sampling, and one that grows in place."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from rlox.llm.models.language import LanguageModel
from rlox.llm.tokens import pad_left

# Allowed difference of logits, as a share of the largest, also in bfloat16; a wrong position or mask changes them more.
TOLERANCE = 0.1


def samples_with_cache(model: LanguageModel) -> bool:
    """Return whether a Hugging Face model's cache of padded prompts can be repeated for several completions.

    One token after two prompts is computed with the repeated cache, and from whole rows. Models with recurrent layers
    have caches that cannot be repeated, and some old models have none, or count positions in their own way.
    """
    size = model.vocabulary or 4
    rows, new = [[1 % size, 2 % size, 3 % size], [3 % size]], 2 % size
    last = torch.full((4, 1), new, device=model.device)
    ids, mask = (torch.as_tensor(x, device=model.device) for x in pad_left(rows, model.pad))
    position = (mask.cumsum(1) - 1).clamp(min=0)
    try:
        output = model.module(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=True)
        cache = getattr(output, model.cache_name)
        cache.batch_repeat_interleave(2)
        mask = torch.cat([mask.repeat_interleave(2, 0), torch.ones_like(last)], 1)
        position = position[:, -1:].repeat_interleave(2, 0) + 1
        ours = model.module(
            input_ids=last, attention_mask=mask, position_ids=position, use_cache=True, **{model.cache_name: cache}
        ).logits[:, -1]
    except Exception as e:  # a reason that has nothing to do with the cache is raised by the pass over whole rows, too
        why = f"cannot be used ({type(e).__name__})"
    else:
        alone = [model.row_logits(torch.tensor([[*row, new]], device=model.device))[0, -1] for row in rows]
        theirs = torch.stack(alone).repeat_interleave(2, 0)
        # Logits that are not finite are an error of `sample`.
        if not float((ours - theirs).abs().max()) > TOLERANCE * float(theirs.abs().max()):
            return True
        why = "gives other logits than whole rows"
    warnings.warn(
        f"{model.where}: the cache of {model.kind} {why}; completions are sampled without it, which takes longer the "
        "longer they are",
        stacklevel=2,
    )
    return False


class RoomyLayer(DynamicLayer):
    """Keys and values (R, H, T, D) of one layer, in buffers with room for more tokens.

    Hugging Face's own layer copies its whole contents for each token that is added.
    """

    def __init__(self, layer: DynamicLayer, room: int) -> None:
        super().__init__()
        self.device, self.is_initialized = layer.keys.device, True
        length = layer.keys.shape[-2]
        self._buffers = []
        for x in (layer.keys, layer.values):
            buffer = x.new_empty(*x.shape[:-2], length + room, x.shape[-1])
            buffer[..., :length, :] = x
            self._buffers.append(buffer)
        self._show(length)

    def _show(self, length: int) -> None:
        self.keys, self.values = (buffer[..., :length, :] for buffer in self._buffers)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., start:end, :] = new
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._show(self.keys.shape[-2])


def with_room(cache: Any, room: int) -> None:
    """Give the layers of a Hugging Face cache that grow without limit room for `room` more tokens in place."""
    for i, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[i] = RoomyLayer(layer, room)
