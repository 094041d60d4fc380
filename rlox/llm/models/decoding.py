"""A native decoder that replaces the forward pass of a Hugging Face model when it decodes one token per row."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.kernels.llm.decoder import Decoder
from rlox.llm.models.families import FAMILIES, as_made, classes, plain
from rlox.llm.models.language import LanguageModel

# Rotary embeddings whose angles depend only on a token's position.
_ROPE = ("default", "linear", "llama3")
# With wider models the panels no longer fit in a core's cache, and packing all weights for each call, which copies them
# in memory, is no longer negligible: one row of a model of width 2048 took 1.2 times as long as with the module.
_WIDEST, _WIDEST_INNER, _LARGEST = 1024, 4096, 10**8
# Allowed difference of logits, as a share of the largest: 100 times the effect of a different summation order.
_TOLERANCE = 1e-4


def decodes(model: LanguageModel, length: int) -> bool:
    """Return whether the native decoder may replace `model`, on rows of up to `length` tokens.

    It may replace a float32 model on one CPU thread that is not too large, belongs to a supported family, consists only
    of that family's own classes, and has no hooks, replaced forward methods or adapters.
    """
    base: Any = model.module
    config = model.config
    family = getattr(config, "model_type", None)
    if not model.native or family not in FAMILIES or config is None or torch.is_autocast_enabled("cpu"):
        return False
    parts, kind = classes(family), type(base)
    window = getattr(config, "sliding_window", None)
    if (
        kind is not parts.model
        or torch.get_num_threads() > 1
        or max(config.hidden_size / _WIDEST, config.intermediate_size / _WIDEST_INNER, model.size / _LARGEST) > 1.0
        or config._attn_implementation not in ("sdpa", "eager")
        or (window is not None and length > window)
        or config.rope_parameters.get("rope_type", "default") not in _ROPE
        or config.num_hidden_layers != len(base.model.layers)
        or torch.nn.modules.module._has_any_global_hook()
    ):
        return False
    for part in base.modules():
        kind = type(part)
        if not as_made(part):
            return False
        if kind is parts.norm:
            if part.variance_epsilon != config.rms_norm_eps:
                return False
        elif kind is parts.attention:
            if part.scaling != part.head_dim**-0.5:
                return False
        elif kind not in parts.others and kind not in (parts.model, parts.rotary, parts.mlp, parts.activation):
            return False
    return all(map(plain, base.parameters()))


class Native:
    """Computes logits of each row's next token with the native decoder, starting from the model's cache of the prompts.

    The model has read the prompts `ids` (B, P), padded on the left where `mask` is 0, and left their keys and values in
    `past`. `n` rows continue each prompt, by at most `room` tokens.
    """

    def __init__(
        self, model: LanguageModel, ids: torch.Tensor, mask: torch.Tensor | None, past: Any, n: int, room: int
    ) -> None:
        width = ids.shape[1]
        padding = np.zeros(len(ids), np.int64) if mask is None else (mask == 0).sum(1).numpy()
        inner: Any = model.module.model
        angles = inner.rotary_emb(inner.norm.weight, torch.arange(width + room, device="cpu")[None])
        cosine, sine = (x[0].numpy() for x in angles)  # (T, D) of the positions from 0
        self._decoder = _decoder(model.module)
        layers = past.layers
        self._decoder.begin(
            [x.keys.numpy() for x in layers], [x.values.numpy() for x in layers], padding, n, room, cosine, sine
        )
        self._last = ids[:, -1].numpy()
        self._rows = np.arange(len(ids) * n)

    def again(self) -> torch.Tensor:
        """Return the decoder's logits after the last token of each prompt, (B, V) f32. Must be called first."""
        return torch.from_numpy(self._decoder.again(self._last))

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (R, V) f32 after one more token of each row. They are valid until the next call."""
        return torch.from_numpy(self._decoder.next(tokens.numpy(), self._rows))

    def keep(self, rows: torch.Tensor) -> None:
        """Continue with only these rows, in ascending order."""
        self._rows = self._rows[rows.numpy()]


def native(
    model: LanguageModel,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    past: Any,
    logits: torch.Tensor,
    n: int,
    room: int,
) -> Native | None:
    """Create a native decoder that continues the prompts instead of `model`.

    It must reproduce the model's `logits` (B, V) after the last tokens of the prompts. Returns None if the decoder does
    not support the model, or disagrees with it.
    """
    if room < 2 or not decodes(model, ids.shape[1] + room) or not bool(logits.isfinite().all()):
        return None
    decoder = Native(model, ids, mask, past, n, room)
    gap, largest = float((decoder.again() - logits).abs().max()), float(logits.abs().max())
    if not gap <= _TOLERANCE * largest:
        model.native = False
        warnings.warn(
            f"{model.where}: the native decoder disagrees with {type(model.base).__name__}, whose logits differ by "
            f"{gap:.1g} of {largest:.1g}; the model itself will decode from now on. Its classes may have been changed",
            stacklevel=2,
        )
        return None
    return decoder


def _decoder(module: Any) -> Decoder:
    def pair(linear: nn.Linear) -> tuple[np.ndarray, np.ndarray | None]:
        return linear.weight.detach().numpy(), None if linear.bias is None else linear.bias.detach().numpy()

    def norm(part: Any) -> np.ndarray | None:
        return None if part is None else part.weight.detach().numpy()

    layers = [
        {
            "input_norm": norm(layer.input_layernorm),
            "post_norm": norm(layer.post_attention_layernorm),
            "query_norm": norm(getattr(layer.self_attn, "q_norm", None)),
            "key_norm": norm(getattr(layer.self_attn, "k_norm", None)),
            **{name: pair(getattr(layer.self_attn, f"{name[0]}_proj")) for name in ("query", "key", "value", "output")},
            **{name: pair(getattr(layer.mlp, f"{name}_proj")) for name in ("gate", "up", "down")},
        }
        for layer in module.model.layers
    ]
    return Decoder(
        module.model.embed_tokens.weight.detach().numpy(),
        layers,
        norm(module.model.norm),
        module.lm_head.weight.detach().numpy(),
        module.model.layers[0].self_attn.head_dim,
        module.config.rms_norm_eps,
    )
