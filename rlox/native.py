"""What a kernel computes in place of `rlox.policies`: perceptrons that act and learn without PyTorch.

One truth for parameters and moments: the kernel's flat block. The modules that are given out have views of it for
parameters, so that both always see the same numbers.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlox.config import DQNConfig, OnPolicyConfig, TwinCriticConfig
from rlox.envs import EnvSpec
from rlox.initial import mlp_weights
from rlox.kernels.nn.learner import MAX_HIDDEN, NativeActorCritic
from rlox.kernels.nn.q_learner import NativeQ
from rlox.kernels.rng import Rng

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.kernels.nn.ac_learner import NativeSAC, NativeTD3
    from rlox.policies import ActorCritic, BoundedPolicy, QPolicy


class Perceptron(NamedTuple):
    """A perceptron within a module."""

    name: str  # its name there
    widths: list[int]  # of its input, its hidden layers and its output
    activated: bool = False  # whether an activation follows the last layer too

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of its parameters in their order."""
        found: list[tuple[str, tuple[int, ...]]] = []
        for i, (n_in, n_out) in enumerate(pairwise(self.widths)):
            found += [(f"{self.name}.{2 * i}.weight", (n_out, n_in)), (f"{self.name}.{2 * i}.bias", (n_out,))]
        return found


def _actor_critic(obs_dim: int, n_outputs: int, hidden: Sequence[int]) -> list[Perceptron]:
    return [Perceptron("actor", [obs_dim, *hidden, n_outputs]), Perceptron("critic", [obs_dim, *hidden, 1])]


def _q_network(obs_dim: int, n_actions: int, hidden: Sequence[int], dueling: bool) -> list[Perceptron]:
    """Of a `QPolicy` around a `DiscreteQNetwork`; a trunk without layers has no parameters."""
    widths = [obs_dim, *hidden]
    if not dueling:
        return [Perceptron("q.head", [*widths, n_actions])]
    trunk = widths[:-1] if hidden else widths
    heads = (("q.head", n_actions), ("q.value", 1))
    return [Perceptron("q.trunk", trunk, True), *(Perceptron(name, [*widths[-2:], n]) for name, n in heads)]


def layout(obs_dim: int, n_outputs: int, hidden: Sequence[int], gaussian: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters of a `DiscretePolicy` or `ContinuousPolicy`, in their order."""
    log_std = [("log_std", (n_outputs,))] if gaussian else []
    return [*log_std, *_shapes(_actor_critic(obs_dim, n_outputs, hidden))]


def _shapes(nets: list[Perceptron]) -> list[tuple[str, tuple[int, ...]]]:
    return [shape for net in nets for shape in net.shapes()]


def obstacle(spec: EnvSpec, config: OnPolicyConfig, policy: ActorCritic | None) -> str | None:
    """Why the kernel cannot compute this policy exactly; None where it can."""
    if not (spec.discrete or spec.continuous):
        return f"the actions are {spec.action_kind}"
    return _obstacle(spec, config.hidden_sizes, policy, _foreign)


def q_obstacle(spec: EnvSpec, config: DQNConfig, policy: nn.Module | None) -> str | None:
    """Why the kernel cannot compute this value network exactly; None where it can."""
    return _obstacle(spec, config.hidden_sizes, policy, _foreign_q)


def _obstacle(spec: EnvSpec, hidden: Sequence[int], module: nn.Module | None, foreign: Any) -> str | None:
    if len(spec.obs_shape) != 1:
        return "images go through a convolutional network"
    if module is not None:
        other, hidden = foreign(spec, module)
        if other is not None:
            return other
    if len(hidden) > MAX_HIDDEN:
        return f"the kernel takes at most {MAX_HIDDEN} hidden layers, and there are {len(hidden)}"
    return None


def _foreign(spec: EnvSpec, policy: ActorCritic) -> tuple[str | None, list[int]]:
    """Why a module that a user gave is not one that the kernel knows, or None; and its hidden widths."""
    from rlox.policies import ContinuousPolicy, DiscretePolicy

    if type(policy) is not (DiscretePolicy if spec.discrete else ContinuousPolicy):
        return f"the policy is a module of your own ({type(policy).__name__})", []
    hidden = _hidden(policy.actor)
    n_outputs = spec.n_actions if spec.discrete else spec.act_dim
    nets = _actor_critic(spec.obs_dim, n_outputs, hidden)
    return _altered(policy, nets, layout(spec.obs_dim, n_outputs, hidden, spec.continuous)), hidden


def _foreign_q(spec: EnvSpec, policy: nn.Module) -> tuple[str | None, list[int]]:
    """As `_foreign`, of a `DiscreteQNetwork` or the `QPolicy` around one."""
    from rlox.networks import DiscreteQNetwork
    from rlox.policies import QPolicy

    q = policy.q if type(policy) is QPolicy else policy
    if type(q) is not DiscreteQNetwork:
        return f"the policy is a module of your own ({type(q).__name__})", []
    policy = policy if q is not policy else QPolicy(q, spec.n_actions)
    hidden = _hidden(q.trunk, q.head)
    nets = _q_network(spec.obs_dim, spec.n_actions, hidden, q.dueling)
    return _altered(policy, nets, _shapes(nets)), hidden


def _layers(net: nn.Module) -> list[nn.Module]:
    from torch import nn

    return list(net) if type(net) is nn.Sequential else [net]


def _hidden(*nets: nn.Module) -> list[int]:
    """Widths of the hidden layers of perceptrons of which each goes on from the one before."""
    from torch import nn

    return [layer.out_features for net in nets for layer in _layers(net) if type(layer) is nn.Linear][:-1]


def _altered(module: nn.Module, nets: list[Perceptron], shapes: list[tuple[str, tuple[int, ...]]]) -> str | None:
    """Why a module of the right class is no longer the perceptrons it was made as; None where it is."""
    import torch
    from torch import nn

    kinds = [[type(layer) for layer in _layers(module.get_submodule(net.name))] for net in nets]
    activation = next((kind for each in kinds for kind in each if kind is not nn.Linear), nn.Tanh)
    for net, found in zip(nets, kinds, strict=True):
        expected = [nn.Linear, activation] * (len(net.widths) - 1)
        if found != (expected if net.activated else expected[:-1]):
            return "the policy's networks are not those it was made with for this environment"
    parameters = list(module.named_parameters())
    if (
        activation not in (nn.Tanh, nn.ReLU)
        or [(name, tuple(p.shape)) for name, p in parameters] != shapes
        or list(module.buffers())
    ):
        return "the policy's networks are not those it was made with for this environment"
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for _, p in parameters):
        return "the policy's parameters are not float32 on the CPU"
    if not all(p.requires_grad for _, p in parameters):
        return "some of the policy's parameters are frozen"
    return ModuleWatch("policy", module).altered()


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleWatch:
    """Notices where a module is no longer what it was, so that a kernel on its memory would compute something else.

    Parameters
    ----------
    what : str
        Its name, for messages.
    module : nn.Module
        Its parameters lie where they are to stay.
    """

    def __init__(self, what: str, module: nn.Module):
        self._what = what
        self._parts = [
            (part, type(part), _members(part), len(vars(part)), _functions(part)) for part in module.modules()
        ]
        # Those would not be called, and go before the methods of the class.
        self._own = next((name for part, kind, *_, own in self._parts for name in own if hasattr(kind, name)), None)
        self._parameters = [(p, p.data_ptr(), p.requires_grad) for p in module.parameters()]

    def altered(self) -> str | None:
        """What has changed; None: nothing that counts. It takes some microseconds."""
        from torch.nn.modules.module import _has_any_global_hook

        what = self._what
        if self._own is not None:
            return f"the {what} has a method of its own, {self._own}"
        for part, kind, members, size, functions in self._parts:
            held = vars(part)
            if type(part) is not kind or _members(part) != members:
                return f"the {what}'s networks are not those it was made with"
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
                return f"some of the {what}'s parameters were frozen, or made to learn"
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                return f"the {what}'s parameters have hooks, which a kernel does not call"
        return None


def _members(part: nn.Module) -> list[int]:
    held = vars(part)
    return [*map(id, held["_modules"].values()), *map(id, held["_parameters"].values())]


def _functions(part: nn.Module) -> dict[str, Any]:
    """What can be called among the attributes of the object itself."""
    return {name: value for name, value in vars(part).items() if callable(value)}


class Watch:
    """Notices where an algorithm no longer holds what its kernel computes on: networks and optimisers.

    Parameters
    ----------
    owner : object
        The algorithm, complete.
    actor : NativeActor, optional
        What acts for it.
    """

    def __init__(self, owner: object, actor: NativeActor | None = None):
        kinds: tuple[type, ...] = (NativeOptimizer, NativeAdam)
        if "torch" in sys.modules:
            from torch import nn

            kinds = (*kinds, nn.Module, nn.Parameter)
        self._actor = actor
        self._next_look = self._next_difference = 0.0
        self._owner = type(owner).__name__
        self._attributes = vars(owner)
        self._held = {name: value for name, value in vars(owner).items() if isinstance(value, kinds)}
        self._modules = [
            ModuleWatch(name.lstrip("_").replace("_", " "), value)
            for name, value in self._held.items()
            if hasattr(value, "named_modules")
        ]
        self._addresses = {name: value.data_ptr() for name, value in self._held.items() if hasattr(value, "data_ptr")}

    def require(self, where: str, functions: bool, difference: Callable[[], str | None]) -> None:
        """A ValueError where something has changed, or where there is a `difference` between functions.

        For a difference is looked where `functions` says so, and every second. A training's rounds, which may take less
        than a look does, are looked at every 5 ms.
        """
        now = time.monotonic()
        if where == "train" and not functions and now < self._next_look:
            return
        self._next_look = now + 0.005
        found = self._altered() or (None if self._actor is None else self._actor.altered())
        if found is None and (functions or now > self._next_difference):
            found = difference()
            self._next_difference = now + 1.0
        if found is not None:
            raise ValueError(
                f"{self._owner}.{where}: a native run must stay as it was made: {found}; change it before "
                f"{self._owner} is made, or make it with backend='torch'"
            )

    def _altered(self) -> str | None:
        replaced = next((name for name, value in self._held.items() if self._attributes.get(name) is not value), None)
        if replaced is None:
            moved = (name for name, address in self._addresses.items() if self._held[name].data_ptr() != address)
            replaced = next(moved, None)
        if replaced is not None:
            return f"{replaced.lstrip('_')} of this {self._owner} was replaced"
        return next((found for module in self._modules if (found := module.altered()) is not None), None)


def _activation(*nets: nn.Module) -> str:
    from torch import nn

    return "relu" if any(type(layer) is nn.ReLU for net in nets for layer in _layers(net)) else "tanh"


def _views(block: np.ndarray, shapes: list[tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """The parts of a flat block by their names."""
    found, at = {}, 0
    for name, shape in shapes:
        part = slice(at, at + int(np.prod(shape)))
        found[name] = block[part].reshape(shape)
        at = part.stop
    return found


def _size(shapes: list[tuple[str, tuple[int, ...]]]) -> int:
    return sum(int(np.prod(shape)) for _, shape in shapes)


def _fill(views: dict[str, np.ndarray], arrays: dict[str, np.ndarray], what: str) -> None:
    """Copy `arrays` into `views`; a ValueError that names `what` where they do not fit."""
    ours = {name: array.shape for name, array in views.items()}
    theirs = {name: array.shape for name, array in arrays.items()}
    if ours != theirs:
        differ = [
            f"{name} must have shape {ours.get(name, 'none')}, got {theirs.get(name, 'none')}"
            for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)
        ]
        raise ValueError(f"{what} does not fit the checkpoint: {'; '.join(differ)}")
    for name, array in views.items():
        array[:] = arrays[name]


def _attach(module: nn.Module, parameters: dict[str, np.ndarray], gradients: dict[str, np.ndarray] | None) -> None:
    """Make the parameters of `module` views of a block, and their gradients of another; without one they have none."""
    import torch

    for name, parameter in module.named_parameters():
        parameter.data = torch.from_numpy(parameters[name])
        if gradients is None:
            parameter.requires_grad_(False)
    if gradients is not None:
        _attach_gradients(module, gradients)


def _attach_gradients(module: nn.Module, gradients: dict[str, np.ndarray]) -> None:
    import torch

    for name, parameter in module.named_parameters():
        array = gradients[name]
        if parameter.grad is None or parameter.grad.data_ptr() != array.ctypes.data:
            parameter.grad = torch.from_numpy(array)


def bounded_obstacle(config: TwinCriticConfig, policy: nn.Module | None) -> str | None:
    """Why the kernel cannot compute SAC's or TD3's networks exactly; None where it can."""
    if policy is not None:
        return f"the policy is a module of your own ({type(policy).__name__})"
    if len(config.hidden_sizes) > MAX_HIDDEN:
        return f"the kernel takes at most {MAX_HIDDEN} hidden layers, and there are {len(config.hidden_sizes)}"
    return None


class NativeActor:
    """What acts by a kernel, from NumPy arrays to NumPy arrays; the base of the kinds below.

    Pickled, it is a copy that acts as it does; what it learned by, such as an optimiser's moments, is not part of it.

    Attributes
    ----------
    net : kernel
        Holds the flat block, its gradient, and the optimiser.
    parameters : dict
        Views of the block by the names of the module's ``state_dict``.
    """

    def __init__(self, net: Any, shapes: list[tuple[str, tuple[int, ...]]]):
        self.net = net
        self.parameters = _views(net.parameters, shapes)
        self._gradients = _views(net.gradient, shapes)
        self._module: nn.Module | None = None
        self._watched: list[ModuleWatch] = []  # the modules that were given out

    def _set_initial(self, net: Perceptron, gain: float, orthogonal: bool, rng: Rng) -> None:
        if len(net.widths) > 1:
            for i, (weight, bias) in enumerate(mlp_weights(net.widths, gain, orthogonal, rng)):
                self.parameters[f"{net.name}.{2 * i}.weight"][:] = weight
                self.parameters[f"{net.name}.{2 * i}.bias"][:] = bias

    def _take_over(self, module: nn.Module, keep: bool = True) -> None:
        """Make the module's parameters views of the block; to `keep` them, the block starts from them."""
        if keep:
            for name, parameter in module.named_parameters():
                self.parameters[name][:] = parameter.detach().numpy()
        _attach(module, self.parameters, self._gradients)
        self._module = module
        self._watched.append(ModuleWatch("policy", module))

    def _make_module(self) -> nn.Module:
        """The module that computes the same; its parameters are replaced."""
        raise NotImplementedError

    def module(self) -> nn.Module:
        """The PyTorch module that computes the same; its parameters and gradients are views of the kernel's."""
        if self._module is None:
            self._take_over(self._make_module(), keep=False)
        return self._module

    def attach_gradients(self) -> None:
        """Make the module's gradients views of the kernel's again, which ``zero_grad`` or another optimiser ended."""
        _attach_gradients(self.module(), self._gradients)

    def altered(self) -> str | None:
        """Why the kernel may not compute for the modules that were given out; None: it may."""
        return next((found for module in self._watched if (found := module.altered()) is not None), None)

    def weights(self) -> dict[str, np.ndarray]:
        """All parameters by their ``state_dict`` names, copies."""
        return {name: array.copy() for name, array in self.parameters.items()}

    def load(self, arrays: dict[str, np.ndarray], what: str) -> None:
        """Put in what `weights` returned; a ValueError that names `what` where it does not fit."""
        _fill(self.parameters, arrays, what)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        """Shape of the noise that `act` takes for `n` observations."""
        raise NotImplementedError

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        """Fill the f32 array `out` with the noise this policy samples by."""
        raise NotImplementedError

    def act(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Sampled actions, a function of observation and noise alone."""
        return self.net.act(obs, noise)

    def mode(self, obs: np.ndarray) -> np.ndarray:
        """The most likely actions, or the best ones."""
        return self.net.mode(obs)

    def sample(self, obs: np.ndarray, rng: Rng | None = None) -> np.ndarray:
        """Sampled actions; without `rng` a generator seeded from PyTorch's decides the noise."""
        if rng is None:
            from rlox.networks import rng_from_torch

            rng = rng_from_torch()
        noise = np.empty(self.noise_shape(len(obs)), np.float32)
        self.fill_noise(rng, noise)
        return self.act(obs, noise)


class NativePolicy(NativeActor):
    """A perceptron actor and critic with a categorical or Gaussian head.

    Parameters
    ----------
    obs_dim, n_outputs, hidden, gaussian
        Sizes as in `layout`.
    activation, optimizer
        As `rlox.config.OnPolicyConfig` has them.
    block : array, optional
        The parameters (P,) f32, kept and not copied; zeros by default.
    """

    def __init__(
        self,
        obs_dim: int,
        n_outputs: int,
        hidden: Sequence[int],
        gaussian: bool,
        activation: str = "tanh",
        optimizer: str = "adam",
        block: np.ndarray | None = None,
    ):
        self._sizes = (obs_dim, n_outputs, list(hidden), activation, gaussian)
        shapes = layout(obs_dim, n_outputs, hidden, gaussian)
        block = np.zeros(_size(shapes), np.float32) if block is None else block
        super().__init__(
            NativeActorCritic(block, obs_dim, n_outputs, list(hidden), activation, gaussian, optimizer), shapes
        )

    def __reduce__(self):
        obs_dim, n_outputs, hidden, activation, gaussian = self._sizes
        block = np.array(self.net.parameters)
        return NativePolicy, (obs_dim, n_outputs, hidden, gaussian, activation, "adam", block)

    @classmethod
    def make(cls, spec: EnvSpec, config: OnPolicyConfig, rng: Rng) -> NativePolicy:
        """With the weights that `rlox.policies.make_policy` would start from."""
        n_outputs = spec.n_actions if spec.discrete else spec.act_dim
        c = config
        policy = cls(spec.obs_dim, n_outputs, c.hidden_sizes, spec.continuous, c.activation, c.optimizer)
        for net, gain in zip(_actor_critic(spec.obs_dim, n_outputs, c.hidden_sizes), (0.01, 1.0), strict=True):
            policy._set_initial(net, gain, c.ortho_init, rng)
        if spec.continuous:
            policy.parameters["log_std"][:] = c.log_std_init
        return policy

    @classmethod
    def _of(cls, module: ActorCritic, spec: EnvSpec, optimizer: str, block: np.ndarray | None) -> NativePolicy:
        n_outputs = spec.n_actions if spec.discrete else spec.act_dim
        hidden, activation = _hidden(module.actor), _activation(module.actor)
        return cls(spec.obs_dim, n_outputs, hidden, spec.continuous, activation, optimizer, block)

    @classmethod
    def adopt(cls, module: ActorCritic, spec: EnvSpec, config: OnPolicyConfig) -> NativePolicy:
        """A module in which `obstacle` found nothing; its parameters become views of the block."""
        policy = cls._of(module, spec, config.optimizer, None)
        policy._take_over(module)
        return policy

    @classmethod
    def beside(cls, module: ActorCritic, spec: EnvSpec, config: OnPolicyConfig, block: np.ndarray) -> NativePolicy:
        """What acts as a module that PyTorch trains, whose parameters are views of `block` in their order."""
        policy = cls._of(module, spec, config.optimizer, block)
        policy._watched.append(ModuleWatch("policy", module))
        return policy

    def _make_module(self) -> ActorCritic:
        from rlox.policies import ContinuousPolicy, DiscretePolicy

        obs_dim, n_outputs, hidden, activation, gaussian = self._sizes
        kind = ContinuousPolicy if gaussian else DiscretePolicy
        # ortho_init=False: these weights are replaced, and orthogonal ones take longer.
        return kind(obs_dim, n_outputs, hidden, activation, ortho_init=False, rng=Rng(0))

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.net.n_outputs)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        (rng.normal if self.net.gaussian else rng.gumbel)(out=out)


class NativeQPolicy(NativeActor):
    """ε-greedy over the values of a perceptron, and the target network beside it.

    Parameters
    ----------
    obs_dim, n_actions, hidden, activation, dueling
        As `rlox.networks.DiscreteQNetwork` takes them.

    Attributes
    ----------
    epsilon : float
        Probability that `act` takes an action at random; the module's as well.
    target_parameters : dict
        Views of the target network's block, by the same names as `parameters`.
    """

    def __init__(self, obs_dim: int, n_actions: int, hidden: Sequence[int], activation: str, dueling: bool):
        self._sizes = (obs_dim, n_actions, list(hidden), activation, dueling)
        shapes = _shapes(_q_network(obs_dim, n_actions, hidden, dueling))
        blocks = (np.zeros(_size(shapes), np.float32) for _ in range(2))
        super().__init__(NativeQ(*blocks, obs_dim, n_actions, list(hidden), activation, dueling), shapes)
        self.target_parameters = _views(self.net.target, shapes)
        self._target: QPolicy | None = None
        self._epsilon = 0.0

    def __reduce__(self):
        return _acting_q, (self._sizes, np.array(self.net.parameters), self._epsilon)

    @classmethod
    def make(cls, spec: EnvSpec, config: DQNConfig, rng: Rng) -> NativeQPolicy:
        """With the weights that `rlox.networks.DiscreteQNetwork` would start from, twice."""
        c = config
        policy = cls(spec.obs_dim, spec.n_actions, c.hidden_sizes, c.activation, c.dueling)
        for net in _q_network(spec.obs_dim, spec.n_actions, c.hidden_sizes, c.dueling):
            policy._set_initial(net, 1.0, False, rng)
        policy.net.move_target(1.0)
        return policy

    @classmethod
    def adopt(cls, module: nn.Module, spec: EnvSpec) -> NativeQPolicy:
        """A module in which `q_obstacle` found nothing; its parameters become views of the block."""
        from rlox.policies import QPolicy

        module = module if isinstance(module, QPolicy) else QPolicy(module, spec.n_actions)
        q = module.q
        hidden, activation = _hidden(q.trunk, q.head), _activation(q.trunk, q.head)
        policy = cls(spec.obs_dim, spec.n_actions, hidden, activation, q.dueling)
        policy._take_over(module)
        policy.net.move_target(1.0)
        return policy

    @property
    def epsilon(self) -> float:
        return self._epsilon

    @epsilon.setter
    def epsilon(self, value: float) -> None:
        self._epsilon = value
        if self._module is not None:
            self._module.epsilon = value

    def _make_module(self) -> QPolicy:
        from rlox.networks import DiscreteQNetwork
        from rlox.policies import QPolicy

        obs_dim, n_actions, hidden, activation, dueling = self._sizes
        q = DiscreteQNetwork(obs_dim, n_actions, hidden, activation, dueling, Rng(0))
        return QPolicy(q, n_actions, self._epsilon)

    def target(self) -> QPolicy:
        """The target network as a module without gradients, whose parameters are views of the kernel's."""
        if self._target is None:
            self._target = self._make_module()
            _attach(self._target, self.target_parameters, None)
            self._watched.append(ModuleWatch("target", self._target))
        return self._target

    def target_weights(self) -> dict[str, np.ndarray]:
        """As `weights`, of the target network."""
        return {name: array.copy() for name, array in self.target_parameters.items()}

    def load_target(self, arrays: dict[str, np.ndarray], what: str) -> None:
        """As `load`, into the target network."""
        _fill(self.target_parameters, arrays, what)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, 2)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        rng.uniform(out=out)

    def act(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions (B,) int64: the first number of each row decides whether to explore, the second which action."""
        return self.net.act(obs, noise, self._epsilon)


def _acting_q(sizes: tuple[Any, ...], block: np.ndarray, epsilon: float) -> NativeQPolicy:
    policy = NativeQPolicy(*sizes)
    policy.net.parameters[:] = block
    policy.epsilon = epsilon
    return policy


class NativeBoundedPolicy(NativeActor):
    """A policy of bounded actions whose module's parameters already lie in the kernel's block.

    Parameters
    ----------
    module : BoundedPolicy
        Bounds and, where there is one, ``noise_std`` are read from it.

    Attributes
    ----------
    net : NativeSAC or NativeTD3
        There after `use`, which is called when the critics and their optimisers are there, too.
    """

    net: NativeSAC | NativeTD3

    def __init__(self, module: BoundedPolicy):
        self._module = module
        self._watched = []  # by `Watch`, which sees it among the algorithm's networks

    def use(self, kernel: type, blocks: dict[str, np.ndarray], **sizes: Any) -> None:
        """Act by a `kernel` on the memory of the networks; `blocks` and `sizes` in its constructor's words."""
        self.net = kernel(**blocks, **sizes)
        self._made_by = (kernel, {name: len(block) for name, block in blocks.items()}, sizes)

    def __reduce__(self):
        return _acting_bounded, (copy.deepcopy(self._module), np.array(self.net.parameters["policy"]), *self._made_by)

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Views of the module's, and so of the block."""
        return {name: p.detach().numpy() for name, p in self._module.named_parameters()}

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return self._module.noise_shape(n)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        self._module.fill_noise(rng, out)

    def _to_env(self, unit: np.ndarray) -> np.ndarray:
        return self._module.centre.numpy() + unit * self._module.scale.numpy()

    def to_unit(self, actions: np.ndarray) -> np.ndarray:
        """The environment's actions as numbers in [-1, 1]."""
        return (actions - self._module.centre.numpy()) / self._module.scale.numpy()

    def act(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        std = getattr(self._module, "noise_std", None)
        return self._to_env(self.net.act(obs, noise) if std is None else self.net.act(obs, noise, std))

    def mode(self, obs: np.ndarray) -> np.ndarray:
        return self._to_env(self.net.mode(obs))


def _acting_bounded(
    module: BoundedPolicy, block: np.ndarray, kernel: type, lengths: dict[str, int], sizes: dict[str, Any]
) -> NativeBoundedPolicy:
    policy = NativeBoundedPolicy(module)
    blocks = {name: np.zeros(length, np.float32) for name, length in lengths.items()}
    policy.use(kernel, {**blocks, "policy": block}, **sizes)
    return policy


class NativeAdam:
    """One of the optimisers of a `NativeBoundedPolicy`'s kernel as `rlox.optimizers.FlatOptimizer` is saved.

    Parameters
    ----------
    parameters : iterable of nn.Parameter
        Laid out anew as views of one block.
    block : str
        The kernel's name for it.
    learning_rate : float
        Step size.
    """

    net: NativeSAC | NativeTD3  # given when there is one

    def __init__(self, parameters: Iterable[nn.Parameter], block: str, learning_rate: float):
        from rlox.optimizers import flatten_

        self.flat = flatten_(list(parameters))
        self.block = block
        self.learning_rate = learning_rate

    def descend(self, *arguments: Any) -> torch.Tensor:
        raise RuntimeError("update: it must be called where the backend is torch, got native; there is update_native")

    step = descend

    def state(self) -> dict[str, np.ndarray]:
        """Moments (P,) and the step count (), copies."""
        return self.net.get_state()[self.block]

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned; a ValueError where kind or size differ."""
        self.net.set_state({**self.net.get_state(), self.block: state})


class NativeOptimizer:
    """The kernel's optimiser as `rlox.optimizers.FlatOptimizer` is used: for gradients that PyTorch computes.

    Both count and average in the same arrays, so that either may take the next step.

    Parameters
    ----------
    net : NativeActorCritic or NativeQ
        Of a `NativeActor`.
    learning_rate : float
        Step size.
    """

    actor: NativeActor | None = None  # that of the net; the algorithm sets it

    def __init__(self, net: NativeActorCritic | NativeQ, learning_rate: float):
        self._net = net
        self.learning_rate = learning_rate

    def step(self, loss: torch.Tensor, max_grad_norm: float | None) -> torch.Tensor:
        """Differentiate `loss`, clip the global gradient norm (None: do not), take one step.

        Returns the norm before clipping, ().
        """
        import torch

        if self.actor is not None:
            self.actor.attach_gradients()
        self._net.gradient.fill(0.0)
        loss.backward()
        return torch.tensor(self._net.apply(self.learning_rate, max_grad_norm), dtype=torch.float32)

    def state(self) -> dict[str, np.ndarray]:
        """Moments (P,) and the step count (), copies."""
        return self._net.get_state()

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned; a ValueError where kind or size differ."""
        self._net.set_state(state)
