"""Kernels that replace the norms and gates of models with the architecture of Llama, in the passes made here.

PyTorch computes a norm in six passes over its rows, and its gradient in ten more. On one CPU thread these took a
quarter of an update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from rlox.kernels.llm.parts import rms_norm, rms_norm_gradient, swiglu, swiglu_gradient
from rlox.llm.models.families import FAMILIES, as_made, classes, plain
from rlox.llm.models.token_scores import kernels_take


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, out = x.detach().view(-1, x.shape[-1]), torch.empty_like(x)
        scales = rms_norm(rows.numpy(), weight.detach().numpy(), eps, out.view(rows.shape).numpy())
        ctx.save_for_backward(x, weight, torch.from_numpy(scales))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        out, shape = torch.empty_like(x), (-1, x.shape[-1])
        rows = (x.detach().view(shape), weight.detach(), scales, slopes.reshape(shape), out.view(shape))
        d_weight = rms_norm_gradient(*(array.numpy() for array in rows))
        return out, torch.from_numpy(d_weight), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(gate)
        swiglu(gate.detach().view(-1).numpy(), up.detach().view(-1).numpy(), out.view(-1).numpy())
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = (x.detach().view(-1) for x in ctx.saved_tensors)
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        swiglu_gradient(gate.numpy(), up.numpy(), slopes.reshape(-1).numpy(), d_gate.numpy(), d_up.numpy())
        return d_gate.view(slopes.shape), d_up.view(slopes.shape)


def _norm(part: Any, x: torch.Tensor) -> torch.Tensor:
    return _RMSNorm.apply(x, part.weight, part.variance_epsilon) if kernels_take(x) else type(part).forward(part, x)


def _mlp(part: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = part.gate_proj(x), part.up_proj(x)
    return part.down_proj(_SwiGLU.apply(gate, up) if kernels_take(gate, up) else part.act_fn(gate) * up)


def _parts(module: nn.Module, family: str) -> Iterator[tuple[nn.Module, Callable[..., torch.Tensor]]]:
    """Yield the parts of `module` that kernels replace, and their new forward functions."""
    known = classes(family)
    for part in module.modules():
        kind: Any = type(part)
        if kind not in (known.norm, known.mlp) or not as_made(part):
            continue
        # Skip a class whose forward was replaced.
        if kind.forward.__qualname__ != f"{kind.__name__}.forward" or kind.forward.__module__ != kind.__module__:
            continue
        if kind is known.norm:
            if plain(part.weight):
                yield part, partial(_norm, part)
        elif type(part.act_fn) is known.activation and as_made(part.act_fn):
            yield part, partial(_mlp, part)


@contextlib.contextmanager
def fuse_parts(module: nn.Module, config: Any) -> Iterator[None]:
    """Replace the norms and gates of `module` by kernels during a forward pass, and restore them afterwards.

    This applies to unmodified parts of models of a known family, in float32 on one CPU thread. Gradients may be
    computed later, outside this context.
    """
    family = getattr(config, "model_type", None)
    if family not in FAMILIES or torch.get_num_threads() > 1 or torch.is_autocast_enabled("cpu"):
        yield
        return
    installed = list(_parts(module, family))
    for part, forward in installed:
        part.__dict__["forward"] = forward
    try:
        yield
    finally:
        for part, _ in installed:
            part.__dict__.pop("forward", None)
