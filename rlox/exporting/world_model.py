"""The acting part of DreamerV3 as operations: encoder, recurrent model and actor, for one step."""

from __future__ import annotations

import math

import numpy as np
import torch

from rlox.exporting.graph import Graph, Value
from rlox.exporting.networks import add_lerp, arrays_of
from rlox.nn.modules import to_array
from rlox.world_models.acting import DreamerPolicy
from rlox.world_models.rssm import EPS, MLP, RSSM, Dense, Encoder, ImageEncoder, Norm


def add_dreamer(
    graph: Graph, policy: DreamerPolicy, obs: Value, state: Value, noise: Value
) -> tuple[list[Value], Value | None, Value]:
    """Add one step, whose latents are drawn with `noise` (K,), uniform in [0, 1).

    Returns
    -------
    actions
        The actions in the environment's form: an integer for each choice, or one vector in units of the environment.
    scores
        The logits of the choices; None for continuous actions.
    state
        What the next step starts with, see `DreamerPolicy.packed`.
    """
    rssm, actor, spec = policy.rssm, policy.actor, policy.spec
    deter, classes, before = graph.split(state, [rssm.deter, rssm.stoch, actor.width])
    deter = _add_step(graph, rssm, deter, graph.one_hot(classes, rssm.classes), before)
    tokens = graph.linear(_add_encoder(graph, policy.encoder, obs), to_array(rssm.post_tokens))
    joined = graph.arithmetic("add", graph.linear(deter, *arrays_of(rssm.post_deter)), tokens)
    logits = graph.linear(_add_norm(graph, rssm.post_norm, joined), *arrays_of(rssm.post_out))
    drawn = graph.draw(logits, noise, rssm.unimix)
    out = _add_mlp(graph, actor.mlp, graph.concat([deter, graph.one_hot(drawn, rssm.classes)]))
    if not actor.choices:
        mean = graph.elementwise("tanh", graph.slice(out, 0, actor.width))
        half = (spec.act_high - spec.act_low) / 2
        action = graph.arithmetic("add", graph.arithmetic("mul", mean, half), spec.act_low + half)
        return [action], None, graph.concat([deter, drawn, mean])
    actions = [graph.argmax(part) for part in graph.split(out, actor.choices)]
    one = np.float32(1)
    flags = [
        graph.one_hot(graph.arithmetic("add", graph.as_floats(action), one), n)
        for action, n in zip(actions, actor.choices, strict=True)
    ]
    return actions, out, graph.concat([deter, drawn, *flags])


def _add_step(graph: Graph, rssm: RSSM, h: Value, stoch: Value, action: Value) -> Value:
    """Add `RSSM.step`, with the embedding of the action."""
    size = graph.clip(graph.elementwise("abs", action), 1.0, np.inf)
    embedded = _add_dense(graph, rssm.of_action, graph.arithmetic("div", action, size))
    parts = [_add_dense(graph, rssm.of_deter, h), _add_dense(graph, rssm.of_stoch, stoch), embedded]
    shared = graph.linear(graph.concat(parts), *arrays_of(rssm.shared))
    own = graph.block_linear(h, to_array(rssm.own))
    x = _add_norm(graph, rssm.norm, graph.arithmetic("add", shared, own))
    weights = np.split(to_array(rssm.gate_weight), 3, -1)
    biases = np.split(to_array(rssm.gate_bias), 3, -1)
    reset, candidate, update = (graph.block_linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    candidate = graph.arithmetic("mul", graph.elementwise("sigmoid", reset), candidate)
    share = graph.elementwise("sigmoid", graph.arithmetic("sub", update, 1.0))
    return add_lerp(graph, h, graph.elementwise("tanh", candidate), share)


def _add_encoder(graph: Graph, encoder: Encoder, obs: Value) -> Value:
    if encoder.image:
        return _add_images(graph, encoder.convs[0], graph.scale_bytes(obs))
    tokens, start, numbers = [], 0, []
    for convs, (first, shape) in zip(encoder.convs, encoder.places, strict=True):
        stop = first + math.prod(shape)
        pixels = graph.arithmetic("div", graph.slice(obs, first, stop), 255.0)
        tokens.append(_add_images(graph, convs, graph.reshape(pixels, tuple(shape))))
        numbers.append((start, first))
        start = stop
    numbers.append((start, obs.size))
    if encoder.mlp is None:
        return graph.concat(tokens)
    with torch.no_grad():
        mean, deviation = to_array(encoder.mean), to_array(encoder.deviation)
    parts = []
    for first, stop in numbers:
        if first < stop:
            x = graph.arithmetic("sub", graph.slice(obs, first, stop), mean[first:stop])
            parts.append(graph.elementwise("symlog", graph.arithmetic("div", x, deviation[first:stop])))
    return graph.concat([*tokens, _add_mlp(graph, encoder.mlp, graph.concat(parts))])


def _add_images(graph: Graph, encoder: ImageEncoder, x: Value) -> Value:
    x = graph.arithmetic("sub", x, 0.5)
    for layer in encoder.layers:
        _, height, width = x.shape
        x = graph.conv(x, *_conv_arrays(layer), (2, 2), (2, 2, 2 + height % 2, 2 + width % 2))
        x = _add_norm(graph, layer.norm, x)
    return graph.reshape(x, (x.size,))


def _conv_arrays(layer: torch.nn.Module) -> tuple[np.ndarray, np.ndarray]:
    return to_array(layer.weight), to_array(layer.bias)


def _add_mlp(graph: Graph, mlp: MLP, x: Value) -> Value:
    for dense in mlp.hidden:
        x = _add_dense(graph, dense, x)
    return x if isinstance(mlp.out, torch.nn.Identity) else graph.linear(x, *arrays_of(mlp.out))


def _add_dense(graph: Graph, dense: Dense, x: Value) -> Value:
    return _add_norm(graph, dense.norm, graph.linear(x, *arrays_of(dense.linear)))


def _add_norm(graph: Graph, norm: Norm, x: Value) -> Value:
    return graph.elementwise("silu", graph.rms_norm(x, to_array(norm.scale), EPS))
