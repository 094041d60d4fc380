"""Reasons why a kernel cannot be used: sizes, layers and changes that it cannot compute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from rlox.config import DQNConfig, OnPolicyConfig, TwinCriticConfig
from rlox.envs import EnvSpec
from rlox.kernels.nn.core import MAX_HIDDEN

if TYPE_CHECKING:
    from torch import nn

    from rlox.nn.policies import ActorCritic


class Perceptron(NamedTuple):
    """A perceptron within a module."""

    name: str  # its name in the module
    widths: list[int]  # widths of its input, its hidden layers and its output
    activated: bool = False  # whether an activation also follows the last layer


def actor_critic(obs_dim: int, n_outputs: int, hidden: Sequence[int], state_dim: int | None = None) -> list[Perceptron]:
    seen = obs_dim if state_dim is None else state_dim
    return [Perceptron("actor", [obs_dim, *hidden, n_outputs]), Perceptron("critic", [seen, *hidden, 1])]


def q_network(obs_dim: int, n_actions: int, hidden: Sequence[int], dueling: bool) -> list[Perceptron]:
    """Return the perceptrons of a `QPolicy` around a `DiscreteQNetwork`; a trunk without layers has no parameters."""
    widths = [obs_dim, *hidden]
    if not dueling:
        return [Perceptron("q.head", [*widths, n_actions])]
    trunk = widths[:-1] if hidden else widths
    heads = (("q.head", n_actions), ("q.value", 1))
    return [Perceptron("q.trunk", trunk, True), *(Perceptron(name, [*widths[-2:], n]) for name, n in heads)]


def layout(nets: list[Perceptron], n_std: int = 0) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the parameters of a policy in their order: `n_std` deviations and perceptrons."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("log_std", (n_std,))] if n_std else []
    for net in nets:
        for i, (n_in, n_out) in enumerate(pairwise(net.widths)):
            shapes += [(f"{net.name}.{2 * i}.weight", (n_out, n_in)), (f"{net.name}.{2 * i}.bias", (n_out,))]
    return shapes


def obstacle(spec: EnvSpec, config: OnPolicyConfig, policy: ActorCritic | None) -> str | None:
    """Return why the kernel cannot compute this policy exactly; None if it can."""
    if not (spec.discrete or spec.continuous):
        return f"the actions are {spec.action_kind}"
    if len(spec.obs_shape) != 1 or policy is None:
        return _size_obstacle(spec, config.hidden_sizes)
    from rlox.nn.policies import ContinuousPolicy, DiscretePolicy

    if type(policy) is not (DiscretePolicy if spec.discrete else ContinuousPolicy):
        return f"the policy is a custom module ({type(policy).__name__})"
    hidden = read_perceptron(policy.actor)[0]
    nets = actor_critic(spec.obs_dim, spec.n_actions if spec.discrete else spec.act_dim, hidden)
    change = _find_change(policy, nets, layout(nets, spec.act_dim or 0))
    return change or _size_obstacle(spec, hidden)


def q_obstacle(spec: EnvSpec, config: DQNConfig, policy: nn.Module | None) -> str | None:
    """Return why the kernel cannot compute this value network exactly; None if it can.

    `policy` is a `DiscreteQNetwork`, or the `QPolicy` around one.
    """
    if len(spec.obs_shape) != 1 or policy is None:
        return _size_obstacle(spec, config.hidden_sizes)
    from rlox.nn.actors import DiscreteQNetwork, QPolicy

    q = policy.q if type(policy) is QPolicy else policy
    if type(q) is not DiscreteQNetwork:
        return f"the policy is a custom module ({type(q).__name__})"
    hidden = read_perceptron(q.trunk, q.head)[0]
    nets = q_network(spec.obs_dim, spec.n_actions, hidden, q.dueling)
    change = _find_change(policy if q is not policy else QPolicy(q, spec.n_actions), nets, layout(nets))
    return change or _size_obstacle(spec, hidden)


def _size_obstacle(spec: EnvSpec, hidden: Sequence[int]) -> str | None:
    if len(spec.obs_shape) != 1:
        return "images go through a convolutional network"
    if len(hidden) > MAX_HIDDEN:
        return f"the kernel supports at most {MAX_HIDDEN} hidden layers, but there are {len(hidden)}"
    return None


def read_perceptron(*nets: nn.Module) -> tuple[list[int], str]:
    """Return the widths of the hidden layers of consecutive perceptrons, and their activation: ``tanh`` or ``relu``."""
    from torch import nn

    layers = [layer for net in nets for layer in net.modules()]
    widths = [layer.out_features for layer in layers if type(layer) is nn.Linear]
    return widths[:-1], "relu" if any(type(layer) is nn.ReLU for layer in layers) else "tanh"


def _find_change(module: nn.Module, nets: list[Perceptron], shapes: list[tuple[str, tuple[int, ...]]]) -> str | None:
    """Return how a module of the right class differs from the perceptrons it was created with; None if it does not."""
    import torch
    from torch import nn

    parts = [module.get_submodule(net.name) for net in nets]
    kinds = [[type(layer) for layer in (part if type(part) is nn.Sequential else [part])] for part in parts]
    activation = next((kind for each in kinds for kind in each if kind is not nn.Linear), nn.Tanh)
    expected = [[nn.Linear, activation] * (len(net.widths) - 1) for net in nets]
    parameters = list(module.named_parameters())
    if (
        kinds != [each if net.activated else each[:-1] for net, each in zip(nets, expected, strict=True)]
        or activation not in (nn.Tanh, nn.ReLU)
        or [(name, tuple(p.shape)) for name, p in parameters] != shapes
        or list(module.buffers())
    ):
        return "the policy's networks are not those it was created with for this environment"
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for _, p in parameters):
        return "the policy's parameters are not float32 on the CPU"
    if not all(p.requires_grad for _, p in parameters):
        return "some of the policy's parameters are frozen"
    return ModuleWatch("policy", module).altered()


def bounded_obstacle(config: TwinCriticConfig, policy: nn.Module | None) -> str | None:
    """Return why the kernel cannot compute SAC's or TD3's networks exactly; None if it can."""
    if policy is not None:
        return f"the policy is a custom module ({type(policy).__name__})"
    if len(config.hidden_sizes) > MAX_HIDDEN:
        return f"the kernel supports at most {MAX_HIDDEN} hidden layers, but there are {len(config.hidden_sizes)}"
    return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleWatch:
    """Detects changes to a module because of which a kernel on its memory would compute something else.

    Parameters
    ----------
    what : str
        The module's name, for messages.
    module : nn.Module
        The module, whose parameters are at their final addresses.
    """

    def __init__(self, what: str, module: nn.Module):
        self._what = what
        self._parts = [
            (part, type(part), _members(part), len(vars(part)), _functions(part)) for part in module.modules()
        ]
        # Instance attributes that override methods of the class, which the kernel would not call.
        self._own = next((name for part, kind, *_, own in self._parts for name in own if hasattr(kind, name)), None)
        self._parameters = [(p, p.data_ptr(), p.requires_grad) for p in module.parameters()]

    def altered(self) -> str | None:
        """Return what has changed; None if nothing relevant has. Takes a few microseconds."""
        from torch.nn.modules.module import _has_any_global_hook

        what = self._what
        if self._own is not None:
            return f"the {what} has a method of its own, {self._own}"
        for part, kind, members, size, functions in self._parts:
            held = vars(part)
            if type(part) is not kind or _members(part) != members:
                return f"the {what}'s networks are not those it was created with"
            if any(held.get(name) is not own for name, own in functions.items()) or (
                len(held) != size and _functions(part) != functions
            ):
                return f"a method of the {what} was replaced"
            if any(held[name] for name in _HOOKS):
                return f"the {what} has hooks, which a kernel does not call"
        if _has_any_global_hook():
            return "all modules have hooks, which a kernel does not call"
        for p, address, learns in self._parameters:
            if p.data_ptr() != address:
                return f"the {what}'s parameters were moved or converted"
            if p.requires_grad is not learns:
                return f"some of the {what}'s parameters were frozen or unfrozen"
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                return f"the {what}'s parameters have hooks, which a kernel does not call"
        return None


def _members(part: nn.Module) -> list[int]:
    held = vars(part)
    return [*map(id, held["_modules"].values()), *map(id, held["_parameters"].values())]


def _functions(part: nn.Module) -> dict[str, Any]:
    """Return the callable attributes of the object itself, without those of its class."""
    return {name: value for name, value in vars(part).items() if callable(value)}
