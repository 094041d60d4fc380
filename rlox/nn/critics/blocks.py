"""Residual blocks as in FlashSAC (arXiv:2604.04539): their sizes and weights, and the networks of policies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from rlox.kernels.rng import Rng
from rlox.nn.critics.norms import RMSNorm, activate_and_normalize, make_linear, make_norm, normed_mlp
from rlox.nn.modules import layer_weights

EXPANSION = 4  # hidden units of a block for each of its features


def layer_sizes(n_in: int, hidden: Sequence[int], n_blocks: int, n_out: int) -> list[int]:
    """Return the sizes of all layers, from the input to the output, of a perceptron or a network with residual blocks.

    A block widens the features, of which `hidden` is then the only width, `EXPANSION` times, and narrows them again.
    """
    if n_blocks == 0:
        return [n_in, *hidden, n_out]
    (width,) = hidden
    return [n_in, width, *[EXPANSION * width, width] * n_blocks, n_out]


def count_parameters(sizes: Sequence[int]) -> int:
    """Return the number of weights and biases of layers of these `sizes`."""
    return sum((n_in + 1) * n_out for n_in, n_out in pairwise(sizes))


def residual_weights(sizes: Sequence[int], rng: Rng) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw orthogonal weights, and biases of 0, of each layer of a network with residual blocks."""
    return [layer_weights(n_out, n_in, 1.0, True, rng) for n_in, n_out in pairwise(sizes)]


class ResidualBlock(nn.Sequential):
    """The sum of features ``(B, F)`` and of what the layers make of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def residual_mlp(
    n_in: int, width: int, n_blocks: int, n_out: int, activation: str, norm: str, norm_after: bool, rng: Rng
) -> nn.Sequential:
    """Build a linear layer to `width` features, residual blocks, a division by the root mean square, and the outputs.

    A block is two hidden layers, of 4 times as many and of as many units, normalised as a `CriticEnsemble` is. Weights
    start orthogonal and biases at 0.
    """
    uses_batch = norm in ("batch", "batch_renorm")
    embedding, *inner, head = residual_weights(layer_sizes(n_in, [width], n_blocks, n_out), rng)
    has_bias = norm_after or not uses_batch

    def linear(weight, bias):
        return make_linear(weight, bias if has_bias else None)

    layers: list[nn.Module] = [make_norm(norm, n_in)] if uses_batch else []
    layers.append(linear(*embedding))
    for pair in zip(inner[::2], inner[1::2], strict=True):
        parts: list[nn.Module] = []
        for weight, bias in pair:
            parts += [linear(weight, bias), *activate_and_normalize(len(weight), activation, norm, norm_after)]
        layers.append(ResidualBlock(*parts))
    return nn.Sequential(*layers, RMSNorm(width), make_linear(*head))


def make_net(config: Any, n_in: int, n_out: int, rng: Rng) -> nn.Sequential | None:
    """Return a policy's network by the options of a `CriticConfig`; None for a plain perceptron."""
    c, norms = config, (config.activation, config.actor_norm, config.norm_after, rng)
    if c.residual_blocks:
        return residual_mlp(n_in, c.hidden_sizes[0], c.residual_blocks, n_out, *norms)
    return None if c.actor_norm == "none" else normed_mlp([n_in, *c.hidden_sizes, n_out], *norms)
