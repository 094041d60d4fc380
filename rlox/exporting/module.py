"""A graph as one plain PyTorch module, and TorchScript of it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlox.exporting.graph import Graph, Operation, Value

_DTYPES = {"float": torch.float32, "byte": torch.uint8, "bool": torch.bool, "int": torch.int64}
_LOWEST = -3.0e38  # of a number without a flag
_ARITHMETIC = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}
_ELEMENTWISE = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "abs": torch.abs,
    "symlog": lambda x: torch.sign(x) * torch.log1p(x.abs()),
}


class GraphModule(nn.Module):
    """Computes a graph for rows: takes its inputs in their order, (B, …) each, and returns a tuple of its outputs.

    Its constants are buffers.
    """

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph
        for i, op in enumerate(graph.operations):
            if op.name == "module":
                self.add_module(f"module_{i}", op.settings["module"])
            for name, array in op.arrays.items():
                self.register_buffer(f"{name}_{i}", torch.from_numpy(array.copy()))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = {value.name: x for value, x in zip(self.graph.inputs, inputs, strict=True)}
        for i, op in enumerate(self.graph.operations):
            arrays = {name: getattr(self, f"{name}_{i}") for name in op.arrays}
            values[op.output.name] = self._compute(op, i, [values[x.name] for x in op.inputs], arrays)
        return tuple(values[value.name] for value in self.graph.outputs.values())

    def _compute(self, op: Operation, index: int, inputs: list[Tensor], arrays: dict[str, Tensor]) -> Tensor:
        x, settings = inputs[0], op.settings
        if op.name == "module":
            return getattr(self, f"module_{index}")(x)
        if op.name in _ELEMENTWISE:
            return _ELEMENTWISE[op.name](x)
        if op.name in _ARITHMETIC:
            return _ARITHMETIC[op.name](x, inputs[1] if len(inputs) > 1 else arrays["b"])
        compute = getattr(self, f"_{op.name}")
        return compute(op, *inputs, **arrays, **settings)

    @staticmethod
    def _linear(op: Operation, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def _block_linear(op: Operation, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        blocks = x.reshape(-1, weight.shape[0], 1, weight.shape[1])
        return (blocks @ weight).squeeze(2).add(bias).flatten(1)

    @staticmethod
    def _conv(op: Operation, x: Tensor, weight: Tensor, bias: Tensor, stride, border) -> Tensor:
        top, left, bottom, right = border
        padded = F.pad(x, (left, right, top, bottom)) if any(border) else x
        return F.conv2d(padded, weight, bias, stride)

    @staticmethod
    def _rms_norm(op: Operation, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * scale.view(-1, *[1] * (x.dim() - 2))

    @staticmethod
    def _layer_norm(op: Operation, x: Tensor, scale: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, op.output.shape, scale, bias, eps)

    @staticmethod
    def _expectation(op: Operation, logits: Tensor, numbers: Tensor) -> Tensor:
        return logits.reshape(-1, op.output.size, numbers.shape[0]).softmax(-1) @ numbers

    @staticmethod
    def _affine(op: Operation, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.addcmul(shift, x, scale)

    @staticmethod
    def _clip(op: Operation, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, low), high)

    @staticmethod
    def _scale_bytes(op: Operation, x: Tensor) -> Tensor:
        return x.float() / 255.0

    @staticmethod
    def _mean(op: Operation, x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True)

    @staticmethod
    def _reshape(op: Operation, x: Tensor) -> Tensor:
        return x.reshape(-1, *op.output.shape)

    @staticmethod
    def _slice(op: Operation, x: Tensor, start: int) -> Tensor:
        return x[:, start : start + op.output.size]

    @staticmethod
    def _concat(op: Operation, *parts: Tensor) -> Tensor:
        return torch.cat(parts, 1)

    @staticmethod
    def _mask(op: Operation, x: Tensor, flags: Tensor) -> Tensor:
        return x.masked_fill(~flags, _LOWEST)

    @staticmethod
    def _argmax(op: Operation, x: Tensor) -> Tensor:
        return x.argmax(-1)

    @staticmethod
    def _stack(op: Operation, *parts: Tensor) -> Tensor:
        return torch.stack(parts, 1)

    @staticmethod
    def _shift(op: Operation, x: Tensor, by: Tensor) -> Tensor:
        return x + by

    @staticmethod
    def _as_floats(op: Operation, x: Tensor) -> Tensor:
        return x.float().reshape(-1, op.output.size)

    @staticmethod
    def _one_hot(op: Operation, x: Tensor, n: int) -> Tensor:
        classes = torch.arange(1, n + 1, dtype=x.dtype, device=x.device)
        return (x.unsqueeze(-1) == classes).to(x.dtype).flatten(1)

    @staticmethod
    def _draw(op: Operation, logits: Tensor, uniform: Tensor, unimix: float) -> Tensor:
        n = op.output.size
        classes = op.inputs[0].size // n
        probabilities = (1 - unimix) * logits.reshape(-1, n, classes).softmax(-1) + unimix / classes
        return (probabilities.cumsum(-1)[..., :-1] < uniform.unsqueeze(-1)).sum(-1).to(logits.dtype) + 1


def example_inputs(graph: Graph, n: int = 2) -> list[Tensor]:
    """Return inputs (n, …) with which a graph can be run: zeros, and masks that allow all."""
    fill = {"bool": torch.ones}
    return [fill.get(x.kind, torch.zeros)(n, *x.shape, dtype=_DTYPES[x.kind]) for x in graph.inputs]


def write_torchscript(graph: Graph, path: Path) -> None:
    """Write TorchScript, with what the graph is about as the extra file ``rlox.json``."""
    module = GraphModule(graph).eval()
    with warnings.catch_warnings(), torch.no_grad():
        # PyTorch recommends torch.export instead, whose files need Python.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        # What depends on the values of an example is found by running the file with others.
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        traced = torch.jit.trace(module, tuple(example_inputs(graph)), check_trace=False)
        about = {**graph.about, "inputs": _describe(graph.inputs), "outputs": list(graph.outputs)}
        torch.jit.save(traced, str(path), _extra_files={"rlox.json": json.dumps(about)})


def _describe(values: list[Value]) -> dict[str, list[int]]:
    return {value.name: list(value.shape) for value in values}
