"""Model families with the architecture of Llama: their classes, and checks for modified modules."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from rlox.llm.models.token_scores import kernels_take

# `model_type` of the configuration: prefix of the class names.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

_REPLAYABLE = frozenset({"torch", "transformers", "peft"})  # packages whose modules compute the same in every pass


class Classes(NamedTuple):
    """The classes that a model of a family consists of."""

    model: type
    rotary: type
    attention: type
    norm: type
    mlp: type
    activation: type
    others: frozenset[type]


@cache
def classes(family: str) -> Classes:
    from transformers.activations import ACT2FN

    module, prefix = importlib.import_module(f"transformers.models.{family}.modeling_{family}"), FAMILIES[family]
    model, rotary, attention, norm, mlp, *others = (
        getattr(module, prefix + part)
        for part in ("ForCausalLM", "RotaryEmbedding", "Attention", "RMSNorm", "MLP", "Model", "DecoderLayer")
    )
    plain = frozenset({*others, nn.ModuleList, nn.Linear, nn.Embedding})
    return Classes(model, rotary, attention, norm, mlp, type(ACT2FN["silu"]), plain)


def as_made(part: nn.Module) -> bool:
    """Return whether calling `part` runs only its class's forward, and nothing before or after it."""
    own: Any = part.__dict__
    return not (
        "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"] or own.get("_compiled_call_impl")
    )


def replayable(module: nn.Module) -> bool:
    """Return whether no code of a user runs in a forward pass of `module`.

    All its parts are of PyTorch's, Hugging Face's and peft's classes then, without replaced forward methods, and have
    no hooks but those of transformers.
    """
    for part in module.modules():
        own: Any = part.__dict__
        hooks = [*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()]
        if (
            type(part).__module__.partition(".")[0] not in _REPLAYABLE
            or "forward" in own
            or own.get("_compiled_call_impl")
            or not all((getattr(hook, "__module__", None) or "").startswith("transformers.") for hook in hooks)
        ):
            return False
    return not torch.nn.modules.module._has_any_global_hook()


def plain(p: torch.Tensor) -> bool:
    """Return whether `p` is a plain parameter that kernels accept unchanged."""
    return type(p) is nn.Parameter and kernels_take(p)
