"""A deterministic policy as a short list of operations on one row, from which all files are written.

Shapes are those of one row; the writers for batches add an axis before them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ELEMENTWISE = ("tanh", "relu", "sigmoid", "silu", "abs", "symlog")
ARITHMETIC = ("add", "sub", "mul", "div")


@dataclass(frozen=True, eq=False)
class Value:
    """An input, or the result of an operation."""

    name: str
    shape: tuple[int, ...]  # of one row; () for a single integer
    kind: str = "float"  # float, byte, bool, or int

    @property
    def size(self) -> int:
        """How many numbers a row has."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Operation:
    """One step of the computation."""

    name: str
    inputs: tuple[Value, ...]
    output: Value
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # weights and other constants
    settings: dict[str, Any] = field(default_factory=dict)


class Graph:
    """Inputs, operations in the order of computation, and outputs of a policy.

    Attributes
    ----------
    inputs : list of Value
        In the order in which functions take them: ``obs``, then ``mask``, ``agent``, ``state`` and ``noise`` as far as
        the policy has them.
    outputs : dict of str to Value
        ``action``, then ``scores`` and ``next_state`` as far as the policy has them.
    operations : list of Operation
        All operations.
    about : dict
        What a file says about its policy, for people and programs: strings, numbers and lists.
    """

    def __init__(self, about: dict[str, Any]):
        self.inputs: list[Value] = []
        self.outputs: dict[str, Value] = {}
        self.operations: list[Operation] = []
        self.about = about

    # ---- inputs and outputs

    def input(self, name: str, shape: tuple[int, ...], kind: str = "float") -> Value:
        """Add an input."""
        value = Value(name, shape, kind)
        self.inputs.append(value)
        return value

    def _add(
        self,
        name: str,
        inputs: Sequence[Value],
        shape: tuple[int, ...],
        kind: str = "float",
        arrays: dict[str, np.ndarray] | None = None,
        **settings: Any,
    ) -> Value:
        output = Value(f"v{len(self.operations)}", shape, kind)
        held = {key: np.ascontiguousarray(array) for key, array in (arrays or {}).items()}
        self.operations.append(Operation(name, tuple(inputs), output, held, settings))
        return output

    # ---- layers

    def linear(self, x: Value, weight: np.ndarray, bias: np.ndarray | None = None) -> Value:
        """Return weight @ x + bias, for `weight` (n_out, n_in) and `bias` (n_out,)."""
        n_out = len(weight)
        bias = np.zeros(n_out, np.float32) if bias is None else bias
        return self._add("linear", [x], (n_out,), arrays={"weight": weight, "bias": bias})

    def block_linear(self, x: Value, weight: np.ndarray, bias: np.ndarray | None = None) -> Value:
        """Return the products of G equal slices of `x` with their own matrices, `weight` (G, n_in, n_out), joined."""
        n_blocks, _, n_out = weight.shape
        bias = np.zeros((n_blocks, n_out), np.float32) if bias is None else bias.reshape(n_blocks, n_out)
        return self._add("block_linear", [x], (n_blocks * n_out,), arrays={"weight": weight, "bias": bias})

    def conv(
        self, x: Value, weight: np.ndarray, bias: np.ndarray, stride: tuple[int, int], border: tuple[int, int, int, int]
    ) -> Value:
        """Return a convolution of the image `x` (C, H, W); `border` is top, left, bottom and right, of zeros."""
        n_out, _, *size = weight.shape
        sides = [x.shape[1] + border[0] + border[2], x.shape[2] + border[1] + border[3]]
        height, width = ((side - k) // s + 1 for side, k, s in zip(sides, size, stride, strict=True))
        arrays = {"weight": weight, "bias": bias}
        return self._add("conv", [x], (n_out, height, width), arrays=arrays, stride=stride, border=border)

    def rms_norm(self, x: Value, scale: np.ndarray, eps: float) -> Value:
        """Return x / sqrt(mean(x**2) + eps) * scale over the first axis: the numbers, or an image's channels."""
        return self._add("rms_norm", [x], x.shape, arrays={"scale": scale}, eps=eps)

    def layer_norm(self, x: Value, scale: np.ndarray, bias: np.ndarray, eps: float) -> Value:
        """Return numbers (n,) with mean 0 and variance 1, times `scale`, plus `bias`."""
        return self._add("layer_norm", [x], x.shape, arrays={"scale": scale, "bias": bias}, eps=eps)

    def module(self, module: Any, x: Value, shape: tuple[int, ...], kind: str, title: str) -> Value:
        """Return what a PyTorch module computes that has no operations here; C cannot call it."""
        return self._add("module", [x], shape, kind, module=module, title=title)

    # ---- numbers

    def elementwise(self, name: str, x: Value) -> Value:
        """Return one of `ELEMENTWISE` of each number."""
        if name not in ELEMENTWISE:
            raise ValueError(f"Graph.elementwise: name must be one of {', '.join(ELEMENTWISE)}, got {name!r}")
        return self._add(name, [x], x.shape)

    def arithmetic(self, name: str, a: Value, b: Value | np.ndarray | float) -> Value:
        """Return one of `ARITHMETIC` of two values; one of them may have a single number, and `b` may be constant."""
        if name not in ARITHMETIC:
            raise ValueError(f"Graph.arithmetic: name must be one of {', '.join(ARITHMETIC)}, got {name!r}")
        if isinstance(b, Value):
            return self._add(name, [a, b], a.shape if a.size >= b.size else b.shape)
        return self._add(name, [a], a.shape, arrays={"b": np.asarray(b, np.float32)})

    def affine(self, x: Value, scale: np.ndarray, shift: np.ndarray) -> Value:
        """Return x * scale + shift, rounded once, as PyTorch's ``addcmul`` does."""
        return self._add("affine", [x], x.shape, arrays={"scale": scale, "shift": shift})

    def clip(self, x: Value, low: np.ndarray | float, high: np.ndarray | float) -> Value:
        """Return numbers between bounds, which are single numbers or of the shape of `x`."""
        arrays = {"low": np.asarray(low, np.float32), "high": np.asarray(high, np.float32)}
        if not (np.isfinite(arrays["low"]).any() or np.isfinite(arrays["high"]).any()):
            return x
        return self._add("clip", [x], x.shape, arrays=arrays)

    def scale_bytes(self, x: Value) -> Value:
        """Return bytes as numbers in [0, 1]."""
        return self._add("scale_bytes", [x], x.shape)

    def mean(self, x: Value) -> Value:
        """Return the mean of the numbers (n,), as (1,)."""
        return self._add("mean", [x], (1,))

    def expectation(self, logits: Value, numbers: np.ndarray) -> Value:
        """Return the means (A,) of `numbers` (N,) under the softmax of N logits each, of `logits` (A N,)."""
        return self._add("expectation", [logits], (logits.size // len(numbers),), arrays={"numbers": numbers})

    # ---- shapes

    def reshape(self, x: Value, shape: tuple[int, ...]) -> Value:
        """Return the same numbers in another shape."""
        return x if shape == x.shape else self._add("reshape", [x], shape, x.kind)

    def slice(self, x: Value, start: int, stop: int) -> Value:
        """Return the numbers (n,) from `start` to before `stop`."""
        return x if (start, stop) == (0, x.size) else self._add("slice", [x], (stop - start,), x.kind, start=start)

    def split(self, x: Value, sizes: Sequence[int]) -> list[Value]:
        """Return consecutive parts of the numbers (n,)."""
        ends = np.cumsum(sizes).tolist()
        return [self.slice(x, end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def concat(self, parts: Sequence[Value]) -> Value:
        """Return the numbers of vectors one after the other."""
        return parts[0] if len(parts) == 1 else self._add("concat", parts, (sum(part.size for part in parts),))

    # ---- choices

    def mask(self, x: Value, flags: Value) -> Value:
        """Return numbers of which those without a flag are so low that they are never the largest."""
        return self._add("mask", [x, flags], x.shape)

    def argmax(self, x: Value) -> Value:
        """Return the index of the largest number, the first of equal ones."""
        return self._add("argmax", [x], (), "int")

    def stack(self, parts: Sequence[Value]) -> Value:
        """Return single integers as (K,)."""
        return self._add("stack", parts, (len(parts),), "int")

    def shift(self, x: Value, by: np.ndarray) -> Value:
        """Return integers plus constants."""
        if not np.any(by):
            return x
        return self._add("shift", [x], x.shape, "int", {"by": np.asarray(by, np.int64).reshape(x.shape)})

    def as_floats(self, x: Value) -> Value:
        """Return integers as floats (K,)."""
        return self._add("as_floats", [x], x.shape or (1,))

    def one_hot(self, x: Value, n: int) -> Value:
        """Return n flags for each class in `x` (K,), counted from 1; none is set for 0. They follow each other."""
        return self._add("one_hot", [x], (x.size * n,), n=n)

    def draw(self, logits: Value, uniform: Value, unimix: float) -> Value:
        """Draw classes (K,), counted from 1, from the softmax of `logits` (K C) mixed with the uniform distribution.

        A class is drawn if its number in `uniform` (K,) is below the sum of the probabilities up to it, and not below
        the sum before it.
        """
        return self._add("draw", [logits, uniform], uniform.shape, unimix=unimix)

    # ---- questions

    @property
    def foreign_modules(self) -> list[str]:
        """Titles of the modules that only PyTorch can compute."""
        return [op.settings["title"] for op in self.operations if op.name == "module"]

    @property
    def n_parameters(self) -> int:
        """Constant numbers of all operations."""
        return sum(array.size for op in self.operations for array in op.arrays.values())
