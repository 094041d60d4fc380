"""Initial weights as NumPy arrays, shared by PyTorch's modules and the native networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rlox.kernels.rng import Rng


def layer_weights(rows: int, cols: int, gain: float, orthogonal: bool, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """Draw weight (rows, cols) and bias (rows,) f32: orthogonal and 0, or both U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    Orthogonal weights have orthonormal rows or columns times `gain` (Saxe et al. 2014, arXiv:1312.6120).
    """
    if orthogonal:
        q, r = np.linalg.qr(rng.normal((max(rows, cols), min(rows, cols)), dtype=np.float64))
        q *= np.sign(np.diagonal(r))  # makes the distribution uniform over orthogonal matrices
        weight, bias = gain * (q if rows >= cols else q.T), np.zeros(rows)
    else:
        bound = 1.0 / math.sqrt(cols)
        weight = bound * (2.0 * rng.uniform((rows, cols), dtype=np.float64) - 1.0)
        bias = bound * (2.0 * rng.uniform((rows,), dtype=np.float64) - 1.0)
    return np.ascontiguousarray(weight, np.float32), bias.astype(np.float32)


def mlp_weights(
    sizes: Sequence[int], out_gain: float, orthogonal: bool, rng: Rng
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw weight and bias of each layer of a perceptron with widths `sizes`: gain sqrt 2, `out_gain` in the last."""
    gains = [math.sqrt(2.0)] * (len(sizes) - 2) + [out_gain]
    shapes = zip(pairwise(sizes), gains, strict=True)
    return [layer_weights(n_out, n_in, gain, orthogonal, rng) for (n_in, n_out), gain in shapes]
