"""Normalisation of the features of perceptrons, of one network or an ensemble: batch, batch renormalisation, layer.

Letters: N networks (the axis is missing for a single one), B rows, F features.

Unlike PyTorch's layers, these do not look at ``training``: batch statistics are used inside of `batch_statistics`, and
running statistics everywhere else, so that acting, evaluation and the values in a policy's loss need no switch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rlox.kernels.nn import batch_norm as kernel
from rlox.kernels.rng import Rng
from rlox.nn.modules import mlp_weights
from rlox.nn.policies import _NONLINEARITIES

EPSILON = 1e-3  # added to variances over a batch, as in the references of CrossQ and XQC
MOMENTUM = 0.01  # share of a batch in the running statistics
RMS_EPSILON = 1e-6  # added to the mean square of a row, as in FlashSAC's reference
Chosen: TypeAlias = slice | torch.Tensor | None  # indices of networks; None: all
MOST_STRETCH, MOST_SHIFT = 3.0, 5.0  # bounds of batch renormalisation: r in [1/3, 3], d in [-5, 5]


def choose(parameter: torch.Tensor, chosen: Chosen) -> torch.Tensor:
    """Return the parts (M, …) of the `chosen` networks of a parameter (N, …)."""
    return parameter if chosen is None else parameter[chosen]


def _unhalved(x: torch.Tensor) -> torch.Tensor:
    """Return features that autocast has rounded to 16 bits as float32, in which statistics are computed."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class BatchNorm(nn.Module):
    """Batch normalisation (Ioffe and Szegedy 2015, arXiv:1502.03167) of ``([N,] B, F)``, each network by itself.

    In renormalisation (Ioffe 2017, arXiv:1702.03275, algorithm 1), a batch is normalised as with the running
    statistics, up to bounds, while the gradient remains that of batch normalisation.

    Parameters
    ----------
    width : int
        Features F.
    n_networks : int, optional
        Networks N; None: a single one, without that axis.
    may_renormalize : bool
        Whether `use_batch` can switch to renormalisation.

    Attributes
    ----------
    mean, var : Tensor ([N,] 1, F)
        Running statistics, of which each batch becomes a part of `MOMENTUM`. The variance is the biased one.
    """

    def __init__(self, width: int, n_networks: int | None = None, may_renormalize: bool = True):
        super().__init__()
        shape = (1, width) if n_networks is None else (n_networks, 1, width)
        self.may_renormalize = may_renormalize
        self.scale = nn.Parameter(torch.ones(shape, device="cpu"))
        self.shift = nn.Parameter(torch.zeros(shape, device="cpu"))
        self.register_buffer("mean", torch.zeros(shape, device="cpu"))
        self.register_buffer("var", torch.ones(shape, device="cpu"))
        self.leave_batch()

    def use_batch(self, renormalize: bool, learn: bool) -> None:
        """Normalise by the statistics of each batch from now on, and `learn` them as running ones."""
        self._uses_batch, self._renormalizes, self._learns = True, renormalize and self.may_renormalize, learn

    def leave_batch(self) -> None:
        """Normalise by running statistics from now on."""
        self._uses_batch, self._renormalizes, self._learns = False, False, False

    def forward(self, x: torch.Tensor, chosen: Chosen = None) -> torch.Tensor:
        """Normalise `x`; with `chosen` networks, (M, B, F), by running statistics."""
        x = _unhalved(x)
        if not self._uses_batch:
            scale, shift, mean, var = (choose(part, chosen) for part in (self.scale, self.shift, self.mean, self.var))
            slope = scale * (var + EPSILON).rsqrt()
            return torch.addcmul(torch.addcmul(shift, mean, slope, value=-1.0), x, slope)
        running = (self.mean, self.var) if self._renormalizes else (None, None)
        y, mean, var = normalize(x, self.scale, self.shift, *running)
        if self._learns:
            self.mean.lerp_(mean, MOMENTUM)
            self.var.lerp_(var, MOMENTUM)
        return y


def normalize(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `x` ([N,] B, F) normalised by its own statistics, its mean and its biased variance ([N,] 1, F).

    `scale`, `shift` and the running statistics, which are given for renormalisation, are ([N,] 1, F). On the CPU in
    float32 a kernel computes it: 0.39 ms with the gradient for 2 x 512 x 512 on one thread of an AMD EPYC, 2.1 by the
    operations of `_Normalize`.
    """
    on_cpu = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()
    return (_NormalizeByKernel if on_cpu else _Normalize).apply(x, scale, shift, running_mean, running_var)


class _NormalizeByKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, shift, running_mean, running_var):
        batches = x.detach().contiguous().view(-1, *x.shape[-2:])
        features = (None if one is None else _by_network(one) for one in (scale, shift, running_mean, running_var))
        y, parts = kernel.normalize(batches.numpy(), *features, EPSILON, MOST_STRETCH, MOST_SHIFT)
        kept = torch.from_numpy(parts)
        ctx.save_for_backward(batches, kept)
        mean, var = (one.reshape(scale.shape) for one in kept[:2])
        ctx.mark_non_differentiable(mean, var)
        return torch.from_numpy(y.reshape(x.shape)), mean, var

    @staticmethod
    def backward(ctx, d, _mean, _var):
        batches, parts = ctx.saved_tensors
        d_y = d.contiguous().view_as(batches).numpy()
        d_x, *d_features = kernel.gradient(d_y, batches.numpy(), parts.numpy(), ctx.needs_input_grad[0])
        shape = (*d.shape[:-2], 1, d.shape[-1])
        d_scale, d_shift = (torch.from_numpy(one).view(shape) for one in d_features)
        return None if d_x is None else torch.from_numpy(d_x).view_as(d), d_scale, d_shift, None, None


def _by_network(features: torch.Tensor) -> np.ndarray:
    """Return features ([N,] 1, F) as (N, F)."""
    return features.detach().contiguous().view(-1, features.shape[-1]).numpy()


class _Normalize(torch.autograd.Function):
    """The same by operations of PyTorch, for a GPU and float64, the backward pass in four sweeps over the features.

    PyTorch's own takes three times as long for a batch of 512 rows and 512 features on one core, and two thirds of that
    in the backward pass.
    """

    @staticmethod
    def forward(ctx, x, scale, shift, running_mean, running_var):
        mean = x.mean(-2, keepdim=True)
        standard = x - mean
        var = standard.square().mean(-2, keepdim=True)
        deviation = (var + EPSILON).sqrt()
        standard /= deviation
        if running_mean is None:
            stretch, offset = None, None
            y, slope = torch.addcmul(shift, standard, scale), scale / deviation
        else:
            running = (running_var + EPSILON).sqrt()
            stretch = (deviation / running).clamp_(1.0 / MOST_STRETCH, MOST_STRETCH)
            offset = ((mean - running_mean) / running).clamp_(-MOST_SHIFT, MOST_SHIFT)
            y = torch.addcmul(torch.addcmul(shift, offset, scale), standard, scale * stretch)
            slope = scale * stretch / deviation
        ctx.save_for_backward(standard, slope, stretch, offset)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx, d, _mean, _var):
        standard, slope, stretch, offset = ctx.saved_tensors
        d_shift = d.sum(-2, keepdim=True)
        along = (d * standard).sum(-2, keepdim=True)
        d_x = None
        if ctx.needs_input_grad[0]:
            share = slope / -d.shape[-2]
            d_x = torch.addcmul(d_shift * share, d, slope).addcmul_(standard, along * share)
        d_scale = along if stretch is None else torch.addcmul(d_shift * offset, along, stretch)
        return d_x, d_scale, d_shift, None, None


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450) of ``([N,] B, F)``; parameters as in `BatchNorm`."""

    def __init__(self, width: int, n_networks: int | None = None):
        super().__init__()
        shape = (1, width) if n_networks is None else (n_networks, 1, width)
        self.scale = nn.Parameter(torch.ones(shape, device="cpu"))
        self.shift = nn.Parameter(torch.zeros(shape, device="cpu"))

    def forward(self, x: torch.Tensor, chosen: Chosen = None) -> torch.Tensor:
        """Normalise `x`; with `chosen` networks, (M, B, F)."""
        normal = F.layer_norm(x, x.shape[-1:])
        return torch.addcmul(choose(self.shift, chosen), normal, choose(self.scale, chosen))


class RMSNorm(nn.Module):
    """Division of each row of ``([N,] B, F)`` by its root mean square (Zhang and Sennrich 2019, arXiv:1910.07467);
    parameters as in `BatchNorm`."""

    def __init__(self, width: int, n_networks: int | None = None):
        super().__init__()
        shape = (1, width) if n_networks is None else (n_networks, 1, width)
        self.scale = nn.Parameter(torch.ones(shape, device="cpu"))

    def forward(self, x: torch.Tensor, chosen: Chosen = None) -> torch.Tensor:
        """Normalise `x`; with `chosen` networks, (M, B, F)."""
        x = _unhalved(x)
        return x * (x.square().mean(-1, keepdim=True) + RMS_EPSILON).rsqrt() * choose(self.scale, chosen)


def make_norm(kind: str, width: int, n_networks: int | None = None) -> BatchNorm | LayerNorm:
    """Return the layer for a configuration's ``layer``, ``batch`` or ``batch_renorm``."""
    return LayerNorm(width, n_networks) if kind == "layer" else BatchNorm(width, n_networks, kind == "batch_renorm")


@contextmanager
def batch_statistics(network: nn.Module, renormalize: bool = False, learn: bool = True) -> Iterator[None]:
    """Let the `BatchNorm` layers of `network` use the statistics of their batch, and `learn` them as running ones."""
    layers = [part for part in network.modules() if isinstance(part, BatchNorm)]
    for layer in layers:
        layer.use_batch(renormalize, learn)
    try:
        yield
    finally:
        for layer in layers:
            layer.leave_batch()


def normed_mlp(sizes: Sequence[int], activation: str, norm: str, norm_after: bool, rng: Rng) -> nn.Sequential:
    """Build a perceptron with widths `sizes` (input, hidden …, output), normalised as a `CriticEnsemble` is."""
    uses_batch = norm in ("batch", "batch_renorm")
    layers: list[nn.Module] = [make_norm(norm, sizes[0])] if uses_batch else []
    last = len(sizes) - 2
    for i, (weight, bias) in enumerate(mlp_weights(sizes, 1.0, False, rng)):
        has_bias = norm_after or not uses_batch or i == last
        layers.append(make_linear(weight, bias if has_bias else None))
        if i < last:
            layers += activate_and_normalize(len(weight), activation, norm, norm_after)
    return nn.Sequential(*layers)


def make_linear(weight: np.ndarray, bias: np.ndarray | None) -> nn.Linear:
    """Return a layer with `weight` (O, I) and `bias` (O,), or none."""
    linear = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(torch.from_numpy(weight))
    if bias is not None:
        linear.bias = nn.Parameter(torch.from_numpy(bias))
    return linear


def activate_and_normalize(width: int, activation: str, norm: str, norm_after: bool) -> list[nn.Module]:
    """Return what follows a hidden layer of `width` units, in its order."""
    active = _NONLINEARITIES[activation]()
    if norm == "none":
        return [active]
    return [active, make_norm(norm, width)] if norm_after else [make_norm(norm, width), active]


@torch.no_grad()
def scale_to_unit_(weight: torch.Tensor, bias: torch.Tensor | None, dim: int) -> None:
    """Scale the weights of each unit of a layer, which are along `dim`, with its bias, to the norm 1, in place."""
    squares = weight.square().sum(dim, keepdim=True)
    if bias is not None:
        squares += bias.view_as(squares).square()
    scale = squares.clamp_(min=1e-24).rsqrt_()
    weight *= scale
    if bias is not None:
        bias *= scale.view_as(bias)


@torch.no_grad()
def scale_to_sphere_(norm: nn.Module) -> None:
    """Scale the scales and shifts ([N,] 1, F) of a layer of this module together to the norm sqrt(F), in place."""
    parts = list(norm.parameters())
    squares = torch.cat(parts, -1).square_().sum(-1, keepdim=True)
    scale = squares.clamp_(min=1e-24).rsqrt_().mul_(math.sqrt(parts[0].shape[-1]))
    for part in parts:
        part *= scale


def scale_units_(network: nn.Module) -> None:
    """Scale the weights of each unit of all linear layers of `network`, with its bias, to the norm 1, in place.

    If the network has residual blocks, its biases are left as they are, and scales and shifts are scaled, too, as in
    FlashSAC (arXiv:2604.04539).
    """
    layers = list(network.modules())
    has_blocks = any(isinstance(layer, RMSNorm) for layer in layers)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            scale_to_unit_(layer.weight, None if has_blocks else layer.bias, 1)
        elif has_blocks and isinstance(layer, (BatchNorm, LayerNorm, RMSNorm)):
            scale_to_sphere_(layer)
