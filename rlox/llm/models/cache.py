"""A cache of keys and values that grows in place."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """Keys and values (R, H, T, D) of one layer, in buffers with room for more tokens.

    Hugging Face's own layer copies its whole contents for each token that is added.
    """

    def __init__(self, layer: DynamicLayer, room: int) -> None:
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        length = layer.keys.shape[-2]
        self._buffers = []
        for held in (layer.keys, layer.values):
            buffer = held.new_empty(*held.shape[:-2], length + room, held.shape[-1])
            buffer[..., :length, :] = held
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
