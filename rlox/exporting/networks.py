"""Networks as operations: perceptrons, convolutions and memories made of known layers; other layers as they are."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from rlox.exporting.graph import Graph, Value
from rlox.nn.critics import norms
from rlox.nn.critics.blocks import ResidualBlock
from rlox.nn.memory import Memory, MemoryNetwork
from rlox.nn.modules import copy_module, to_array
from rlox.nn.value_networks import ValueNetwork

_ACTIVATIONS = {nn.Tanh: "tanh", nn.ReLU: "relu", nn.Sigmoid: "sigmoid", nn.SiLU: "silu"}
_NOTHING = (nn.Identity, nn.Dropout)  # what does nothing to a policy that acts


def arrays_of(layer: nn.Module) -> tuple[np.ndarray, np.ndarray | None]:
    """Return weight and bias of a layer as float32."""
    bias = layer.bias
    return to_array(layer.weight).astype(np.float32), None if bias is None else to_array(bias).astype(np.float32)


def add_network(graph: Graph, network: nn.Module, x: Value) -> Value:
    """Add a network without a memory; layers that have no operations stay PyTorch modules."""
    kind = type(network)
    if _has_hooks(network):
        return add_module(graph, network, x)
    if kind is nn.Sequential or kind is ResidualBlock:
        inputs = x
        for layer in network:
            x = add_network(graph, layer, x)
        return x if kind is nn.Sequential else graph.arithmetic("add", inputs, x)
    if kind is nn.Linear and len(x.shape) == 1:
        return graph.linear(x, *arrays_of(network))
    if kind in _ACTIVATIONS:
        return graph.elementwise(_ACTIVATIONS[kind], x)
    if kind in _NOTHING:
        return x
    if kind is nn.Flatten and (network.start_dim, network.end_dim) == (1, -1):
        return graph.reshape(x, (x.size,))
    if kind is nn.LayerNorm and network.normalized_shape == x.shape and network.bias is not None:
        weight, bias = arrays_of(network)
        assert bias is not None
        return graph.layer_norm(x, weight, bias, network.eps)
    if kind is norms.LayerNorm and network.scale.dim() == 2:
        scale, shift = (to_array(part).astype(np.float32)[0] for part in (network.scale, network.shift))
        return graph.layer_norm(x, scale, shift, 1e-5)
    if kind is norms.RMSNorm and network.scale.dim() == 2:
        return graph.rms_norm(x, to_array(network.scale).astype(np.float32)[0], norms.RMS_EPSILON)
    if kind is norms.BatchNorm and network.scale.dim() == 2:
        return _add_batch_norm(graph, network, x)
    if kind is nn.Conv2d and _is_plain(network):
        weight, bias = arrays_of(network)
        down, right = network.padding
        bias = np.zeros(len(weight), np.float32) if bias is None else bias
        return graph.conv(x, weight, bias, tuple(network.stride), (down, right, down, right))
    return add_module(graph, network, x)


def _add_batch_norm(graph: Graph, layer: norms.BatchNorm, x: Value) -> Value:
    """Add a batch normalisation by running statistics, with the numbers of the layer.

    It is not folded into the linear layers beside it: for features whose deviation is far below their mean, products in
    another order differ by more than rounding.
    """
    with torch.no_grad():
        slope = layer.scale * (layer.var + norms.EPSILON).rsqrt()
        offset = torch.addcmul(layer.shift, layer.mean, slope, value=-1.0)
    slope, offset = (to_array(part)[0] for part in (slope, offset))
    return graph.affine(x, slope, offset)


def add_value_network(graph: Graph, network: ValueNetwork, x: Value) -> Value:
    """Add a network of values or distributions, without noise. Return the values of all actions.

    Means of atoms, and of advantages over actions, are linear: they become part of the last layers.
    """
    n_actions, head = network.n_actions, network.head
    activation = "tanh" if network._activate is torch.tanh else "relu"
    x = x if network.body is None else add_network(graph, network.body, graph.scale_bytes(x))
    x = _add_layers(graph, network.trunk, activation, x)

    def ends(layers: nn.Module, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the last layer as (n, N, inputs) and (n, N), or with the mean of its atoms as the only one."""
        weight, bias = arrays_of(layers.linear[-1])
        assert bias is not None
        weight, bias = weight.reshape(n, head.n_atoms, -1), bias.reshape(n, head.n_atoms)
        if head.kind == "categorical":
            return weight, bias
        mean, mean_bias = (part.mean(1, dtype=np.float64, keepdims=True) for part in (weight, bias))
        return mean.astype(np.float32), mean_bias.astype(np.float32)

    weight, bias = ends(network.advantage, n_actions)
    hidden = _add_layers(graph, network.advantage, activation, x)
    if network.value is not None:
        weight, bias = weight - weight.mean(0), bias - bias.mean(0)
    outputs = graph.linear(hidden, weight.reshape(-1, weight.shape[-1]), bias.ravel())
    if network.value is not None:
        weight, bias = (np.repeat(part, n_actions, 0) for part in ends(network.value, 1))
        value = graph.linear(_add_layers(graph, network.value, activation, x), weight.reshape(-1, weight.shape[-1]),
                             bias.ravel())  # fmt: skip
        outputs = graph.arithmetic("add", value, outputs)
    return graph.expectation(outputs, to_array(network.atoms)) if head.kind == "categorical" else outputs


def _add_layers(graph: Graph, layers: nn.Module, activation: str, x: Value) -> Value:
    """Add the layers that have an activation."""
    for i, layer in enumerate(layers.linear[: layers.n_activated]):
        x = graph.linear(x, *arrays_of(layer))
        x = add_network(graph, layers.norm[i], x) if len(layers.norm) else x
        x = graph.elementwise(activation, x)
    return x


def add_module(graph: Graph, module: nn.Module, x: Value, title: str | None = None) -> Value:
    """Add a module that only PyTorch can compute; a row of zeros shows the shape and the type of its result.

    Messages call it by its `title`, which is by default the name of its class.
    """
    kept = copy_module(module).to("cpu").eval().requires_grad_(False)
    with torch.no_grad():
        result = kept(torch.zeros(2, *x.shape, dtype=torch.uint8 if x.kind == "byte" else torch.float32))
    kind = "float" if result.is_floating_point() else "int"
    return graph.module(kept, x, tuple(result.shape[1:]), kind, title or type(module).__name__)


def add_memory_network(graph: Graph, network: MemoryNetwork, x: Value, state: Value) -> tuple[Value, Value]:
    """Add one step of a network with a memory. Return its outputs, and the state after the step."""
    x, after = add_memory(graph, network.memory, add_network(graph, network.trunk, x), state)
    return add_network(graph, network.head, x), after


def add_memory(graph: Graph, memory: Memory, x: Value, state: Value) -> tuple[Value, Value]:
    """Add one step of a memory. Return its outputs, and the state after the step."""
    add = _add_lstm if memory.kind == "lstm" else _add_gru
    after, n_layers = [], memory.n_layers
    for layer, before in enumerate(graph.split(state, [memory.state_dim // n_layers] * n_layers)):
        weights = [to_array(weight).astype(np.float32) for weight in memory.weights(layer)]
        parts = add(graph, memory.size, x, before, *weights)
        x = parts[0]
        after += parts
    return x, graph.concat(after)


def _add_lstm(
    graph: Graph, size: int, x: Value, state: Value, w_x: np.ndarray, w_h: np.ndarray, b_x: np.ndarray, b_h: np.ndarray
) -> list[Value]:
    """Return output and cell; gates and their order as in `rlox.nn.memory`."""
    h, c = graph.split(state, [size, size])
    gates = graph.linear(graph.concat([x, h]), np.concatenate([w_x, w_h], 1), b_x + b_h)
    i, f, g, o = graph.split(gates, [size] * 4)
    i, f, o = (graph.elementwise("sigmoid", gate) for gate in (i, f, o))
    kept, new = graph.arithmetic("mul", f, c), graph.arithmetic("mul", i, graph.elementwise("tanh", g))
    cell = graph.arithmetic("add", kept, new)
    return [graph.arithmetic("mul", o, graph.elementwise("tanh", cell)), cell]


def _add_gru(
    graph: Graph, size: int, x: Value, h: Value, w_x: np.ndarray, w_h: np.ndarray, b_x: np.ndarray, b_h: np.ndarray
) -> list[Value]:
    """Return the output, which is the state; gates and their order as in `rlox.nn.memory`."""
    r, z, n = graph.split(graph.linear(x, w_x, b_x), [size] * 3)
    from_r, from_z, from_n = graph.split(graph.linear(h, w_h, b_h), [size] * 3)
    reset = graph.elementwise("sigmoid", graph.arithmetic("add", r, from_r))
    update = graph.elementwise("sigmoid", graph.arithmetic("add", z, from_z))
    inner = graph.arithmetic("add", n, graph.arithmetic("mul", reset, from_n))
    return [add_lerp(graph, graph.elementwise("tanh", inner), h, update)]


def add_lerp(graph: Graph, start: Value, end: Value, share: Value) -> Value:
    """Return start + share (end - start)."""
    return graph.arithmetic("add", start, graph.arithmetic("mul", share, graph.arithmetic("sub", end, start)))


def _is_plain(conv: nn.Conv2d) -> bool:
    return (
        conv.groups == 1
        and conv.dilation == (1, 1)
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
