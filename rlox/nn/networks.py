"""Perceptrons and convolutional networks whose initial weights come from rlox's own generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from rlox.config import ACTIVATIONS, nearest
from rlox.kernels.rng import Rng
from rlox.nn.initial import layer_weights, mlp_weights

_NONLINEARITIES = {"tanh": nn.Tanh, "relu": nn.ReLU}


def rng_from_torch() -> Rng:
    """Return a generator seeded from PyTorch's, for modules built outside of a run; see ``torch.manual_seed``."""
    return Rng(int(torch.randint(2**63 - 1, (), device="cpu").item()))


@torch.no_grad()
def _set_(layer: nn.Linear | nn.Conv2d, weight: np.ndarray, bias: np.ndarray) -> nn.Module:
    """Set the weights of `layer` in place; a layer on the device ``meta`` uses the arrays' memory."""
    for name, array in (("weight", weight), ("bias", bias)):
        parameter = getattr(layer, name)
        values = torch.from_numpy(array).view(parameter.shape)
        if parameter.is_meta:
            setattr(layer, name, nn.Parameter(values))
        else:
            parameter.copy_(values)
    return layer


def init_layer_(layer: nn.Linear | nn.Conv2d, gain: float, orthogonal: bool, rng: Rng) -> nn.Module:
    """Set weights in place: orthogonal with zero bias, or U(-1/sqrt(fan_in), 1/sqrt(fan_in)) for weight and bias.

    A convolution's kernel counts as the matrix (channels out, channels in * height * width).
    """
    rows, cols = layer.weight.flatten(1).shape
    return _set_(layer, *layer_weights(rows, cols, gain, orthogonal, rng))


def mlp(
    sizes: Sequence[int],
    activation: str = "tanh",
    out_gain: float = 1.0,
    orthogonal: bool = True,
    rng: Rng | None = None,
) -> nn.Sequential:
    """Build a perceptron with widths `sizes` (input, hidden …, output) and no activation after the last layer.

    Raises
    ------
    ValueError
        If `activation` is unknown.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"mlp: activation must be known, got {activation!r}; {nearest(activation, ACTIVATIONS)}")
    rng = rng or rng_from_torch()
    layers: list[nn.Module] = []
    for weight, bias in mlp_weights(sizes, out_gain, orthogonal, rng):
        # On other devices than meta, nn.Linear would draw weights from PyTorch's global generator, which is the user's.
        linear = nn.Linear(*weight.shape[::-1], device="meta")
        layers += [_set_(linear, weight, bias), _NONLINEARITIES[activation]()]
    layers = layers[:-1]
    return nn.Sequential(*layers)


def nature_cnn(shape: tuple[int, ...], orthogonal: bool, rng: Rng) -> tuple[nn.Sequential, int]:
    """Build the convolutional network of Mnih et al. 2015 (doi:10.1038/nature14236) for images (C, H, W). Returns it
    with its number of features, 512.

    Its convolutions need 36 x 36 pixels. An image with a shorter side gets as many channels from windows of 3 x 3
    pixels with a border of zeros, with strides 1, 2 and 2.
    """
    channels, height, width = shape
    large = min(height, width) >= 36
    windows, border = (((8, 4), (4, 2), (3, 1)), 0) if large else (((3, 1), (3, 2), (3, 2)), 1)
    gain, layers = math.sqrt(2.0), []
    for n_out, (size, stride) in zip((32, 64, 64), windows, strict=True):
        convolution = nn.Conv2d(channels, n_out, size, stride, border, device="meta")
        layers += [init_layer_(convolution, gain, orthogonal, rng), nn.ReLU()]
        channels = n_out
        height, width = ((side + 2 * border - size) // stride + 1 for side in (height, width))
    linear = nn.Linear(channels * height * width, 512, device="meta")
    return nn.Sequential(*layers, nn.Flatten(), init_layer_(linear, gain, orthogonal, rng), nn.ReLU()), 512


class NetworkSpec:
    """Common settings of all networks of a module; builds them one after the other from one generator.

    Parameters
    ----------
    obs : int or (C, H, W)
        Observation size D, or the shape of an image.
    hidden : int or sequence of int
        Width of both hidden layers, or the widths themselves; after the features of an image they may be ``()``.
    activation : str
        ``tanh`` or ``relu``.
    orthogonal : bool
        Orthogonal initial weights and zero biases; else both start at U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
    rng : Rng, optional
        Generator of the initial weights; by default seeded from PyTorch's.

    Attributes
    ----------
    body : nn.Module or None
        `nature_cnn` for images.
    widths : list of int
        Width of the perceptrons' input (the observation, or the features of an image), and of their hidden layers.
    """

    def __init__(
        self, obs: int | Sequence[int], hidden: int | Sequence[int], activation: str, orthogonal: bool, rng: Rng | None
    ):
        self.activation, self.orthogonal, self.rng = activation, orthogonal, rng or rng_from_torch()
        self.body: nn.Module | None = None
        if isinstance(obs, int):
            n_inputs = obs
        else:
            self.body, n_inputs = nature_cnn(tuple(obs), orthogonal, self.rng)
        self.widths = [n_inputs, *([hidden, hidden] if isinstance(hidden, int) else hidden)]

    def mlp(self, n_outputs: int, out_gain: float = 1.0, first: int = 0) -> nn.Sequential:
        """Build a perceptron of these widths, or of the widths from index `first` on."""
        return mlp([*self.widths[first:], n_outputs], self.activation, out_gain, self.orthogonal, self.rng)
