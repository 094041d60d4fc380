"""Attention masks in their final form, for models on a GPU.

Hugging Face looks at the values of masks and positions in every forward pass, to leave out masks that hide nothing. On
a GPU the host waits for these values, and the GPU then for the host. Here what they hide is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_UNMASKED = "rlox_causal"  # PyTorch's attention, for which Hugging Face makes no masks


def takes_final_masks(model: Any) -> bool:
    """Return whether a `LanguageModel` is one of Hugging Face on a GPU that takes masks (R, 1, Q, T) bool: all its
    layers have PyTorch's attention over all tokens."""
    return model.device.type != "cpu" and model.hugging_face and model.attention == "sdpa" and sees_all_tokens(model)


def sees_all_tokens(model: Any) -> bool:
    """Return whether all layers of a `LanguageModel` of Hugging Face have attention over all tokens that takes masks of
    their final form, (R, 1, Q, T)."""
    if model.attention not in ("sdpa", "eager"):
        return False
    config: Any = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None


def mask_packed(positions: torch.Tensor) -> torch.Tensor:
    """Return which tokens of packed rows see which, (R, 1, T, T) bool, given their positions (R, T) in sequences."""
    sequence = (positions == 0).cumsum(-1)
    return (sequence[:, :, None] == sequence[:, None, :]).tril()[:, None]


def mask_prompts(mask: torch.Tensor) -> torch.Tensor:
    """Return which tokens of prompts see which, (R, 1, T, T) bool, given which of them (R, T) are no padding.

    Padding sees itself, so that its values, which nobody reads, stay finite.
    """
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    return (mask[:, None].bool().expand(-1, mask.shape[1], -1).tril() | itself)[:, None]


def mask_step(mask: torch.Tensor) -> torch.Tensor:
    """Return what one more token of each row sees, (R, 1, 1, T) bool, given which tokens (R, T) are no padding."""
    return mask[:, None, None].bool()


@contextlib.contextmanager
def without_masks(model: Any) -> Iterator[None]:
    """Let rows from their first token on, without padding before it, go through `model` without masks."""
    # Whether the model looks up its attention in each pass, by the name in its configuration.
    by_name = getattr(model.base, "_can_set_attn_implementation", lambda: False)
    if not takes_final_masks(model) or not by_name():
        yield
        return
    config = model.config.get_text_config()
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_UNMASKED, sdpa_attention_forward)
    config._attn_implementation_internal = _UNMASKED
    try:
        yield
    finally:
        config._attn_implementation_internal = "sdpa"
