"""From an agent to the graphs of its policies: one for each policy that acts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import rlox
from rlox.collectors.vec_normalize import VecNormalize
from rlox.envs import EnvSpec, env_name
from rlox.exporting.graph import Graph, Value
from rlox.exporting.networks import add_memory_network, add_module, add_network, add_value_network
from rlox.exporting.world_model import add_dreamer
from rlox.multi_agent.players import Player, only_player
from rlox.nn.actors import (
    BoundedPolicy,
    CategoricalPolicy,
    DiscreteQNetwork,
    QPolicy,
    RecurrentQNetwork,
    SquashedGaussianPolicy,
)
from rlox.nn.memory import MemoryNetwork
from rlox.nn.policies import ActorCritic, ContinuousPolicy, MultiDiscretePolicy
from rlox.nn.value_networks import ValueNetwork

# What determines the actions of rlox's own policies. Where a subclass replaces one of these, it acts in its own way.
_DECISIVE = ("mode", "pick_mode", "features", "forward", "unit_mode", "to_env", "follow")


@dataclass
class ExportedPolicy:
    """A policy of an agent, with the graph that computes its actions."""

    player: Player  # its agents
    module: nn.Module
    graph: Graph
    state_dim: int = 0  # S, the numbers of the agent's state that it reads: the first ones


def export_graphs(agent: Any) -> list[ExportedPolicy]:
    """Return the policies of an agent as graphs, one for each player.

    Raises
    ------
    TypeError
        If `agent` is not one, or its policy can only sample.
    """
    if not hasattr(agent, "spec") or not hasattr(agent, "predict"):
        name = getattr(agent, "name", type(agent).__name__)
        raise TypeError(
            f"export: agent must act in an environment, got {name}; language models have save_pretrained, which writes "
            "a folder that other programs read"
            if hasattr(agent, "generate")
            else f"export: agent must be an agent of rlox, got {name}"
        )
    players = getattr(agent, "players", None) or [only_player(agent.spec)]
    modules = list(agent.policy.players) if getattr(agent, "several", False) else [agent.policy]
    return [_export(agent, player, module) for player, module in zip(players, modules, strict=True)]


def _export(agent: Any, player: Player, module: nn.Module) -> ExportedPolicy:
    spec, state_dim = player.spec, 0
    graph = Graph(_describe(agent, player))
    obs = graph.input("obs", spec.obs_shape, "byte" if spec.image else "float")
    mask = graph.input("mask", (sum(spec.choices),), "bool") if spec.masked else None
    x = obs if agent.normalizer is None else _add_normalizer(graph, agent.normalizer, obs)
    if player.n_ids:
        one = np.float32(1)
        who = graph.arithmetic("add", graph.as_floats(graph.input("agent", (), "int")), one)
        x = graph.concat([x, graph.one_hot(who, player.n_ids)])
    scores: Value | None = None
    if hasattr(module, "rssm"):
        state_dim = module.n_carried
        state, noise = graph.input("state", (state_dim,)), graph.input("noise", (module.rssm.stoch,))
        actions, scores, after = add_dreamer(graph, module, x, state, noise)
    elif _acts_in_its_own_way(module):
        if not callable(getattr(module, "mode", None)):
            raise TypeError(
                f"export: the policy {type(module).__name__} must define mode(obs) -> actions, since a file holds the "
                "deterministic policy"
            )
        if mask is not None:
            raise ValueError(
                f"export: the policy {type(module).__name__} must not replace methods of rlox's policies in an "
                "environment with action masks"
            )
        actions, after = [add_module(graph, _Mode(module), x, type(module).__name__)], None
    else:
        scores, after, state_dim = _add_outputs(graph, module, x)
        actions = _add_choice(graph, module, spec, scores, mask)
        scores = None if spec.continuous else scores
    graph.outputs["action"] = _as_environment_takes_it(graph, spec, actions)
    if scores is not None:
        graph.outputs["scores"] = scores
    if after is not None:
        graph.outputs["next_state"] = after
    return ExportedPolicy(player, module, graph, state_dim)


class _Mode(nn.Module):
    """The actions of a custom policy as the result of a module."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy = policy

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.policy.mode(obs)


def _acts_in_its_own_way(module: nn.Module) -> bool:
    """Return whether not rlox's methods alone determine the actions."""
    if not isinstance(module, (ActorCritic, QPolicy, CategoricalPolicy, BoundedPolicy)):
        return True
    methods = [getattr(type(module), name) for name in _DECISIVE if hasattr(type(module), name)]
    return not all(method.__module__.startswith(("rlox.nn.", "torch.nn.modules.")) for method in methods)


def _add_normalizer(graph: Graph, normalizer: Any, obs: Value) -> Value:
    """Add the normalisation of observations with frozen statistics."""
    if isinstance(normalizer, VecNormalize) or hasattr(normalizer, "obs_moments"):
        if not normalizer.obs:
            return obs
        moments, limit = normalizer.obs_moments, float(normalizer.clip_obs)
        mean, var = (np.asarray(_on_host(x), np.float64) for x in (moments.mean, moments.var))
        std = np.sqrt(var + VecNormalize.EPSILON)
    elif normalizer.mean is None:
        return obs
    else:
        mean, std, limit = normalizer.mean, normalizer.std, math.inf
    # Two float32 numbers hold a mean almost as exactly as the float64 of the training.
    high = mean.astype(np.float32)
    x = graph.arithmetic("sub", obs, high)
    if np.any(rest := (mean - high).astype(np.float32)):
        x = graph.arithmetic("sub", x, rest)
    return graph.clip(graph.arithmetic("div", x, std.astype(np.float32)), -limit, limit)


def _on_host(x: Any) -> Any:
    return x.cpu().numpy() if isinstance(x, torch.Tensor) else x


def _add_outputs(graph: Graph, module: nn.Module, x: Value) -> tuple[Value, Value | None, int]:
    """Add the networks of one of rlox's policies. Return their outputs, the next state, and the size S of a state."""
    network = module
    if isinstance(module, ActorCritic):
        x, network = _add_body(graph, module.body, x), module.actor
    elif isinstance(module, QPolicy):
        network = module.q
    elif isinstance(module, CategoricalPolicy):
        x, network = _add_body(graph, module.body, x), module.net
    elif isinstance(module, BoundedPolicy):
        network = module.net
    if isinstance(network, RecurrentQNetwork) and type(network) is RecurrentQNetwork:
        x = _add_body(graph, network.body, x)
        state = graph.input("state", (network.state_dim,))
        outputs, after = add_memory_network(graph, network.net, x, state)
        if network.dueling:
            value, advantages = graph.split(outputs, [1, outputs.size - 1])
            outputs = _add_duel(graph, value, advantages)
        return outputs, after, network.state_dim
    if isinstance(network, MemoryNetwork):
        state = graph.input("state", (network.state_dim,))
        return *add_memory_network(graph, network, x, state), network.state_dim
    if type(network) is DiscreteQNetwork:
        x = _add_body(graph, network.body, x)
        if network.value is None:
            return add_network(graph, network.head, x), None, 0
        x = add_network(graph, network.trunk, x)
        advantages = add_network(graph, network.head, x)
        return _add_duel(graph, add_network(graph, network.value, x), advantages), None, 0
    if type(network) is ValueNetwork:
        return add_value_network(graph, network, x), None, 0
    return add_network(graph, network, x), None, 0


def _add_body(graph: Graph, body: nn.Module | None, x: Value) -> Value:
    return x if body is None else add_network(graph, body, graph.scale_bytes(x))


def _add_duel(graph: Graph, value: Value, advantages: Value) -> Value:
    total = graph.arithmetic("add", value, advantages)
    return graph.arithmetic("sub", total, graph.mean(advantages))


def _add_choice(graph: Graph, module: nn.Module, spec: EnvSpec, outputs: Value, mask: Value | None) -> list[Value]:
    """Return the most likely action: an integer for each choice, or one vector."""
    if isinstance(module, ContinuousPolicy):
        return [outputs]
    if isinstance(module, BoundedPolicy):
        if isinstance(module, SquashedGaussianPolicy):
            outputs = graph.slice(outputs, 0, module.act_dim)
        unit = graph.elementwise("tanh", outputs)
        scaled = graph.arithmetic("mul", unit, module.scale.cpu().numpy())
        return [graph.arithmetic("add", scaled, module.centre.cpu().numpy())]
    legal = outputs if mask is None else graph.mask(outputs, mask)
    sizes = module.n_choices if isinstance(module, MultiDiscretePolicy) else [outputs.size]
    return [graph.argmax(part) for part in graph.split(legal, sizes)]


def _as_environment_takes_it(graph: Graph, spec: EnvSpec, actions: list[Value]) -> Value:
    """Return the action within its bounds, or integers that start where those of the environment start."""
    if spec.continuous:
        assert spec.act_low is not None
        assert spec.act_high is not None
        return graph.clip(graph.reshape(actions[0], spec.action_shape), spec.act_low, spec.act_high)
    # A custom policy returns all of its integers as one value.
    action = actions[0] if spec.discrete or actions[0].shape else graph.stack(actions)
    return graph.shift(action, first_actions(spec))


def first_actions(spec: EnvSpec) -> np.ndarray:
    """Return the number of the first choice of each component, () or (K,); the policy counts from 0."""
    zeros = np.zeros((1, *spec.action_shape), np.int64)
    first = zeros if spec.adapter is None else np.asarray(spec.adapter.write(zeros))
    return first.reshape(spec.action_shape).astype(np.int64)


def _describe(agent: Any, player: Player) -> dict[str, Any]:
    """Return what a file says about its policy."""
    spec = player.spec
    about: dict[str, Any] = {
        "rlox": rlox.__version__,
        "algorithm": agent.name,
        "env": None if agent.env_id is None else env_name(agent.env_id),
        "observation": _describe_observation(spec),
        "action_kind": spec.action_kind,
    }
    if spec.continuous:
        assert spec.act_low is not None
        assert spec.act_high is not None
        # JSON has no infinity.
        bounds = (bound.tolist() for bound in (spec.act_low, spec.act_high))
        low, high = ([x if math.isfinite(x) else None for x in bound] for bound in bounds)
        about |= {"low": low, "high": high}
    else:
        about |= {"n_choices": list(spec.choices), "first": first_actions(spec).reshape(-1).tolist()}
    if getattr(agent, "several", False):
        about |= {"policy": player.name, "agents": list(player.agents)}
    return about


def _describe_observation(spec: EnvSpec) -> str:
    if spec.image:
        return "an image of bytes, channels first: {}, {}, {}".format(*spec.obs_shape)
    if spec.parts:
        return f"a vector of {spec.described_parts()}, in this order"
    return f"a vector of {spec.obs_dim} numbers"
