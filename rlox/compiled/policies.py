"""Native counterparts of `rlox.nn.policies`: perceptrons that act and learn in a kernel, without PyTorch, and their
optimisers.

Parameters and moments are stored once, in the kernel's flat block. The parameters of returned modules are views of it,
so that both always have the same values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.compiled.guard import ModuleWatch, Perceptron, actor_critic, layout, q_network, read_perceptron
from rlox.config import DQNConfig, OnPolicyConfig
from rlox.envs import EnvSpec
from rlox.kernels.nn.dqn import NativeQ
from rlox.kernels.nn.policy_gradient import NativeActorCritic
from rlox.kernels.rng import Rng
from rlox.nn.acting import ActingPolicy, Inputs
from rlox.nn.modules import mlp_weights

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlox.kernels.nn.sac import NativeSAC
    from rlox.kernels.nn.td3 import NativeTD3
    from rlox.nn.actors import BoundedPolicy, QPolicy
    from rlox.nn.policies import ActorCritic


class NativeActor(ActingPolicy):
    """Base class of policies that act with a kernel.

    A pickle contains a copy that acts in the same way, without the state of learning, such as an optimiser's moments.

    Attributes
    ----------
    net : kernel
        Contains the flat block, its gradient, and the optimiser.
    parameters : dict
        Views of the block by the names of the module's ``state_dict``.
    """

    def __init__(self, net: Any, shapes: list[tuple[str, tuple[int, ...]]]):
        self.net = net
        self.parameters = _views(net.parameters, shapes)
        self._gradients = _views(net.gradient, shapes)
        self._module: nn.Module | None = None
        self._watched: list[ModuleWatch] = []  # for the returned modules

    def _set_initial(self, net: Perceptron, gain: float, orthogonal: bool, rng: Rng) -> None:
        if len(net.widths) > 1:
            for i, (weight, bias) in enumerate(mlp_weights(net.widths, gain, orthogonal, rng)):
                self.parameters[f"{net.name}.{2 * i}.weight"][:] = weight
                self.parameters[f"{net.name}.{2 * i}.bias"][:] = bias

    def _take_over(self, module: nn.Module, keep: bool = True) -> None:
        """Make the module's parameters views of the block; with `keep`, copy their values into the block first."""
        if keep:
            for name, parameter in module.named_parameters():
                self.parameters[name][:] = parameter.detach().numpy()
        _attach(module, self.parameters, self._gradients)
        self._module = module
        self._watched.append(ModuleWatch("policy", module))

    def _make_module(self) -> nn.Module:
        """Create a module that computes the same; its parameters are replaced afterwards."""
        raise NotImplementedError

    def module(self) -> nn.Module:
        """Return the PyTorch module that computes the same; its parameters and gradients are views of the kernel's."""
        if self._module is None:
            self._take_over(self._make_module(), keep=False)
        return self._module

    def attach_gradients(self) -> None:
        """Make the module's gradients views of the kernel's again, after ``zero_grad`` or another optimiser."""
        _attach_gradients(self.module(), self._gradients)

    def altered(self) -> str | None:
        """Return why the kernel can no longer replace the returned modules; None if it can."""
        return next((found for module in self._watched if (found := module.altered()) is not None), None)

    def copy(self) -> NativeActor:
        """Return a policy that acts in the same way, without the state of learning."""
        reduced: Any = self.__reduce__()
        return reduced[0](*reduced[1])

    def weights(self) -> dict[str, np.ndarray]:
        """Return copies of all parameters by their ``state_dict`` names."""
        return {name: array.copy() for name, array in self.parameters.items()}

    def load(self, arrays: dict[str, np.ndarray], what: str) -> None:
        """Load the result of `weights`. Raises ValueError, which names `what`, if it does not fit."""
        _fill(self.parameters, arrays, what)

    def act(self, inputs: Inputs, noise: np.ndarray) -> tuple[np.ndarray, None]:
        return self.net.act(inputs.obs, self.mask_noise(noise, inputs.mask)), None

    def mode(self, inputs: Inputs, noise: np.ndarray | None = None) -> tuple[np.ndarray, None]:
        if inputs.mask is not None:
            return self.act(inputs, np.zeros(self.noise_shape(len(inputs.obs)), np.float32))
        return self.net.mode(inputs.obs), None


class NativePolicy(NativeActor):
    """A perceptron actor and critic with a categorical or Gaussian head.

    Parameters
    ----------
    obs_dim, n_outputs, hidden, gaussian
        Sizes of observations and of the actor's outputs, widths of the hidden layers, and whether actions are Gaussian.
    activation, optimizer
        As in `rlox.config.OnPolicyConfig`.
    block : array, optional
        The parameters (P,) f32, which are used without a copy; zeros by default.
    state_dim : int, optional
        Numbers that a central critic reads; None: the critic reads the observations.
    """

    net: NativeActorCritic

    def __init__(
        self,
        obs_dim: int,
        n_outputs: int,
        hidden: Sequence[int],
        gaussian: bool,
        activation: str = "tanh",
        optimizer: str = "adam",
        block: np.ndarray | None = None,
        state_dim: int | None = None,
    ):
        self._sizes = (obs_dim, n_outputs, list(hidden), gaussian, activation, state_dim)
        nets = actor_critic(obs_dim, n_outputs, hidden, state_dim)
        shapes = layout(nets, n_outputs if gaussian else 0)
        block = np.zeros(sum(math.prod(shape) for _, shape in shapes), np.float32) if block is None else block
        net = NativeActorCritic(block, obs_dim, n_outputs, list(hidden), activation, gaussian, optimizer, state_dim)
        super().__init__(net, shapes)
        self.adds_noise_to_logits = not gaussian

    def __reduce__(self):
        *sizes, state_dim = self._sizes
        return NativePolicy, (*sizes, "adam", np.array(self.net.parameters), state_dim)

    @classmethod
    def make(cls, spec: EnvSpec, config: OnPolicyConfig, rng: Rng, state_dim: int | None = None) -> NativePolicy:
        """Create a policy with the same initial weights as `rlox.nn.policies.make_policy`."""
        n_outputs = spec.n_actions if spec.discrete else spec.act_dim
        c = config
        policy = cls(
            spec.obs_dim, n_outputs, c.hidden_sizes, spec.continuous, c.activation, c.optimizer, state_dim=state_dim
        )
        nets = actor_critic(spec.obs_dim, n_outputs, c.hidden_sizes, state_dim)
        for net, gain in zip(nets, (0.01, 1.0), strict=True):
            policy._set_initial(net, gain, c.ortho_init, rng)
        if spec.continuous:
            policy.parameters["log_std"][:] = c.log_std_init
        return policy

    @classmethod
    def adopt(
        cls, module: ActorCritic, spec: EnvSpec, config: OnPolicyConfig, block: np.ndarray | None = None
    ) -> NativePolicy:
        """Create a policy from a module without `obstacle`, whose parameters become views of the policy's block.

        If they are already views of a `block`, in order, PyTorch may go on training it, and the policy acts for it.
        """
        n_outputs = spec.n_actions if spec.discrete else spec.act_dim
        hidden, activation = read_perceptron(module.actor)
        policy = cls(spec.obs_dim, n_outputs, hidden, spec.continuous, activation, config.optimizer, block)
        if block is None:
            policy._take_over(module)
        else:
            policy._watched.append(ModuleWatch("policy", module))
        return policy

    def _make_module(self) -> ActorCritic:
        from rlox.nn.policies import ContinuousPolicy, DiscretePolicy, give_critic

        obs_dim, n_outputs, hidden, gaussian, activation, state_dim = self._sizes
        kind = ContinuousPolicy if gaussian else DiscretePolicy
        # ortho_init=False, because these weights are replaced and orthogonal weights take longer.
        module = kind(obs_dim, n_outputs, hidden, activation, ortho_init=False, rng=Rng(0))
        return module if state_dim is None else give_critic(module, state_dim, hidden, activation, False, Rng(0))

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.net.n_outputs)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        (rng.normal if self.net.gaussian else rng.gumbel)(out=out)

    def act(self, inputs: Inputs, noise: np.ndarray) -> tuple[np.ndarray, None]:
        return self.net.act(inputs.obs, noise, inputs.mask), None

    def mode(self, inputs: Inputs, noise: np.ndarray | None = None) -> tuple[np.ndarray, None]:
        return self.net.mode(inputs.obs, inputs.mask), None

    def place(self, column: np.ndarray | None) -> np.ndarray | None:
        """Return a column of a batch as the kernels read it."""
        return column

    def evaluate_actions(
        self,
        obs: np.ndarray,
        actions: np.ndarray,
        after: np.ndarray,
        log_probs: Any = None,
        states: np.ndarray | None = None,
        masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, ...]:
        """Return the same as `rlox.nn.acting.ModulePolicy.evaluate_actions`, as arrays."""
        return obs, actions, *self.net.log_probs(obs, actions, after, states, masks)

    def flat_weights(self) -> np.ndarray:
        """Return a copy of all parameters, (P,) f32."""
        return np.array(self.net.parameters)

    def set_flat_weights(self, weights: np.ndarray) -> None:
        """Load the result of `flat_weights`."""
        self.net.parameters[:] = weights

    def log_probs(self, obs: np.ndarray, actions: np.ndarray, masks: np.ndarray | None = None) -> np.ndarray:
        """Return the log-probabilities (B,) f32 of B actions, of those that `masks` (B, n_outputs) allow."""
        return self.net.log_probs(obs, actions, masks=masks)[0]


class NativeQPolicy(NativeActor):
    """ε-greedy over the values of a perceptron, with its target network.

    Parameters
    ----------
    obs_dim, n_actions, hidden, activation, dueling
        As in `rlox.nn.actors.DiscreteQNetwork`.
    block : array, optional
        The parameters (P,) f32, which are used without a copy; zeros by default.
    adam_eps : float
        Added to the denominator of Adam's steps.

    Attributes
    ----------
    epsilon : float
        Probability that `act` takes a random action; also set in the module.
    target_parameters : dict
        Views of the target network's block, by the same names as `parameters`.
    """

    def __init__(
        self,
        obs_dim: int,
        n_actions: int,
        hidden: Sequence[int],
        activation: str,
        dueling: bool,
        block: np.ndarray | None = None,
        adam_eps: float = 1e-8,
    ):
        self._sizes = (obs_dim, n_actions, list(hidden), activation, dueling)
        shapes = layout(q_network(obs_dim, n_actions, hidden, dueling))
        block = np.zeros(sum(math.prod(shape) for _, shape in shapes), np.float32) if block is None else block
        super().__init__(
            NativeQ(block, np.zeros_like(block), obs_dim, n_actions, list(hidden), activation, dueling, adam_eps),
            shapes,
        )
        self.target_parameters = _views(self.net.target, shapes)
        self._target: QPolicy | None = None
        self._epsilon = 0.0

    def __reduce__(self):
        return _share_q, (self._sizes, np.array(self.net.parameters), self._epsilon)

    @classmethod
    def make(cls, spec: EnvSpec, config: DQNConfig, rng: Rng) -> NativeQPolicy:
        """Create a policy whose two networks have the same initial weights as `rlox.nn.actors.DiscreteQNetwork`."""
        c = config
        sizes = (spec.obs_dim, spec.n_actions, c.hidden_sizes, c.activation, c.dueling)
        policy = cls(*sizes, adam_eps=c.adam_eps)
        for net in q_network(spec.obs_dim, spec.n_actions, c.hidden_sizes, c.dueling):
            policy._set_initial(net, 1.0, False, rng)
        policy.net.move_target(1.0)
        return policy

    @classmethod
    def adopt(cls, module: nn.Module, spec: EnvSpec, adam_eps: float = 1e-8) -> NativeQPolicy:
        """Create a policy from a module without `q_obstacle`, whose parameters become views of the block."""
        from rlox.nn.actors import QPolicy

        module = module if isinstance(module, QPolicy) else QPolicy(module, spec.n_actions)
        q = module.q
        hidden, activation = read_perceptron(q.trunk, q.head)
        policy = cls(spec.obs_dim, spec.n_actions, hidden, activation, q.dueling, adam_eps=adam_eps)
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
        from rlox.nn.actors import DiscreteQNetwork, QPolicy

        obs_dim, n_actions, hidden, activation, dueling = self._sizes
        q = DiscreteQNetwork(obs_dim, n_actions, hidden, activation, dueling, Rng(0))
        return QPolicy(q, n_actions, self._epsilon)

    def target(self) -> QPolicy:
        """Return the target network as a module without gradients, whose parameters are views of the kernel's."""
        if self._target is None:
            self._target = self._make_module()
            _attach(self._target, self.target_parameters, None)
            self._watched.append(ModuleWatch("target", self._target))
        return self._target

    def target_weights(self) -> dict[str, np.ndarray]:
        """Return copies of the target network's parameters, as `weights`."""
        return {name: array.copy() for name, array in self.target_parameters.items()}

    def load_target(self, arrays: dict[str, np.ndarray], what: str) -> None:
        """Load parameters into the target network, as `load`."""
        _fill(self.target_parameters, arrays, what)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, 2)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        rng.uniform(out=out)

    def act(self, inputs: Inputs, noise: np.ndarray) -> tuple[np.ndarray, None]:
        """Return actions (N,) int64: the first number of each row decides whether to explore, the second the action."""
        return self.net.act(inputs.obs, noise, self._epsilon, inputs.mask), None

    def mode(self, inputs: Inputs, noise: np.ndarray | None = None) -> tuple[np.ndarray, None]:
        return self.net.mode(inputs.obs, inputs.mask), None


def _share_q(sizes: tuple[Any, ...], block: np.ndarray, epsilon: float) -> NativeQPolicy:
    policy = NativeQPolicy(*sizes)
    policy.net.parameters[:] = block
    policy.epsilon = epsilon
    return policy


class NativeBoundedPolicy(NativeActor):
    """A policy of bounded actions whose module's parameters are already in the kernel's block.

    Parameters
    ----------
    module : BoundedPolicy
        Provides the bounds and, if it has one, ``noise_std``.

    Attributes
    ----------
    net : NativeSAC or NativeTD3
        Set by `use`, which is called after the critics and their optimisers were created.
    """

    net: NativeSAC | NativeTD3
    _module: BoundedPolicy

    def __init__(self, module: BoundedPolicy):
        self._module = module
        self._watched = []  # `Watch` already watches the module as one of the algorithm's networks

    def use(self, kernel: type, blocks: dict[str, np.ndarray], **sizes: Any) -> None:
        """Act with a `kernel` on the networks' memory; `blocks` and `sizes` are arguments of its constructor."""
        self.net = kernel(**blocks, **sizes)
        self._made_by = (kernel, {name: len(block) for name, block in blocks.items()}, sizes)

    def __reduce__(self):
        return _share_bounded, (copy.deepcopy(self._module), np.array(self.net.parameters["policy"]), *self._made_by)

    @property
    def parameters(self) -> dict[str, np.ndarray]:  # type: ignore[override]
        """Views of the module's parameters, and thereby of the block."""
        return {name: p.detach().numpy() for name, p in self._module.named_parameters()}

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return self._module.noise_shape(n)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        self._module.fill_noise(rng, out)

    def _to_env(self, unit: np.ndarray) -> np.ndarray:
        return self._module.centre.numpy() + unit * self._module.scale.numpy()

    def act(self, inputs: Inputs, noise: np.ndarray) -> tuple[np.ndarray, None]:
        std, noise = getattr(self._module, "noise_std", None), self.mask_noise(noise, inputs.mask)
        return self._to_env(
            self.net.act(inputs.obs, noise) if std is None else self.net.act(inputs.obs, noise, std)
        ), None

    def mode(self, inputs: Inputs, noise: np.ndarray | None = None) -> tuple[np.ndarray, None]:
        return self._to_env(super().mode(inputs)[0]), None


def _share_bounded(
    module: BoundedPolicy, block: np.ndarray, kernel: type, lengths: dict[str, int], sizes: dict[str, Any]
) -> NativeBoundedPolicy:
    policy = NativeBoundedPolicy(module)
    blocks = {name: np.zeros(length, np.float32) for name, length in lengths.items()}
    policy.use(kernel, {**blocks, "policy": block}, **sizes)
    return policy


# ---- their optimisers, with PyTorch's interface


class NativeAdam:
    """One of the optimisers of a `NativeBoundedPolicy`'s kernel, saved like `rlox.nn.optimizers.FlatOptimizer`.

    Parameters
    ----------
    parameters : iterable of nn.Parameter
        Become views of one block.
    block : str
        The kernel's name for the block.
    learning_rate : float
        Step size.
    """

    net: NativeSAC | NativeTD3  # set when the kernel is created

    def __init__(self, parameters: Iterable[nn.Parameter], block: str, learning_rate: float):
        from rlox.nn.modules import flatten_

        self.flat = flatten_(list(parameters))
        self.block = block
        self.learning_rate = self.initial_rate = learning_rate

    def descend(self, *arguments: Any) -> torch.Tensor:
        raise RuntimeError("update: it must be called with backend torch, got native; call update_native instead")

    step = descend

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of the moments (P,) and the step count ()."""
        return self.net.get_state()[self.block]

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned. Raises ValueError if kind or size differ."""
        self.net.set_state({**self.net.get_state(), self.block: state})


class NativeOptimizer:
    """The kernel's optimiser with the interface of `rlox.nn.optimizers.FlatOptimizer`, for gradients from PyTorch.

    Both use the same arrays for moments and step count, so that either may take the next step.

    Parameters
    ----------
    net : NativeActorCritic or NativeQ
        The kernel of a `NativeActor`.
    learning_rate : float
        Step size.
    """

    actor: NativeActor | None = None  # the actor of the net; set by the algorithm

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
        return torch.tensor(self._net.apply(self.learning_rate, max_grad_norm), dtype=torch.float32, device="cpu")

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of the moments (P,) and the step count ()."""
        return self._net.get_state()

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned. Raises ValueError if kind or size differ."""
        self._net.set_state(state)


# ---- blocks of memory that a kernel and PyTorch's parameters share


def _views(block: np.ndarray, shapes: list[tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """Return the parts of a flat block by name."""
    views, at = {}, 0
    for name, shape in shapes:
        part = slice(at, at + int(np.prod(shape)))
        views[name] = block[part].reshape(shape)
        at = part.stop
    return views


def _fill(views: dict[str, np.ndarray], arrays: dict[str, np.ndarray], what: str) -> None:
    """Copy `arrays` into `views`. Raises ValueError, which names `what`, if they do not fit."""
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
    """Make the parameters of `module` views of one block, and their gradients views of another; None disables them."""
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
