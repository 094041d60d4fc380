"""The actor-critics that a kernel computes: what `rlox.policies` defines for perceptrons, without PyTorch.

One truth for parameters and moments: the kernel's flat block. The module that `NativePolicy.module` gives has views of
it for parameters, so that both always see the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rlox.config import OnPolicyConfig
from rlox.envs import EnvSpec
from rlox.initial import mlp_weights
from rlox.kernels.nn.learner import MAX_HIDDEN, NativeActorCritic
from rlox.kernels.rng import Rng

if TYPE_CHECKING:
    import torch

    from rlox.policies import ActorCritic


def layout(obs_dim: int, n_outputs: int, hidden: Sequence[int], gaussian: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters of a `DiscretePolicy` or `ContinuousPolicy`, in their order."""
    found: list[tuple[str, tuple[int, ...]]] = [("log_std", (n_outputs,))] if gaussian else []
    for net, last in (("actor", n_outputs), ("critic", 1)):
        for i, (n_in, n_out) in enumerate(pairwise([obs_dim, *hidden, last])):
            found += [(f"{net}.{2 * i}.weight", (n_out, n_in)), (f"{net}.{2 * i}.bias", (n_out,))]
    return found


def obstacle(spec: EnvSpec, config: OnPolicyConfig, policy: ActorCritic | None) -> str | None:
    """Why the kernel cannot compute this policy exactly; None where it can."""
    if len(spec.obs_shape) != 1:
        return "images go through a convolutional network"
    if not (spec.discrete or spec.continuous):
        return f"the actions are {spec.action_kind}"
    hidden = config.hidden_sizes
    if policy is not None:
        if (other := _foreign(spec, policy)) is not None:
            return other
        hidden = [p.shape[0] for name, p in policy.actor.named_parameters() if name.endswith("weight")][:-1]
    if len(hidden) > MAX_HIDDEN:
        return f"the kernel takes at most {MAX_HIDDEN} hidden layers, and there are {len(hidden)}"
    return None


def _foreign(spec: EnvSpec, policy: ActorCritic) -> str | None:
    """Why a module that a user gave is not one that the kernel knows."""
    import torch

    from rlox.policies import ContinuousPolicy, DiscretePolicy

    if type(policy) is not (DiscretePolicy if spec.discrete else ContinuousPolicy):
        return f"the policy is a module of your own ({type(policy).__name__})"
    kinds, widths = [], []
    for net in (policy.actor, policy.critic):
        layers = list(net) if type(net) is torch.nn.Sequential else [net]
        kinds.append([type(layer) for layer in layers])
        widths.append([layer.out_features for layer in layers[::2] if type(layer) is torch.nn.Linear][:-1])
    activation = kinds[0][1] if len(kinds[0]) > 1 else torch.nn.Tanh
    expected = [torch.nn.Linear, *[activation, torch.nn.Linear] * len(widths[0])]
    n_outputs = spec.n_actions if spec.discrete else spec.act_dim
    plan = layout(spec.obs_dim, n_outputs, widths[0], spec.continuous)
    parameters = list(policy.named_parameters())
    if (
        kinds != [expected, expected]
        or activation not in (torch.nn.Tanh, torch.nn.ReLU)
        or [(name, tuple(p.shape)) for name, p in parameters] != plan
        or list(policy.buffers())
    ):
        return "the policy's networks are not those it was made with for this environment"
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for _, p in parameters):
        return "the policy's parameters are not float32 on the CPU"
    if not all(p.requires_grad for _, p in parameters):
        return "some of the policy's parameters are frozen"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name, None) for module in policy.modules() for name in hooks):
        return "the policy has hooks, which a kernel does not call"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for _, p in parameters):
        return "the policy's parameters have hooks, which a kernel does not call"
    return None


class NativePolicy:
    """A perceptron actor and critic with a categorical or Gaussian head, from NumPy arrays to NumPy arrays.

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
        plan = layout(obs_dim, n_outputs, hidden, gaussian)
        if block is None:
            block = np.zeros(sum(int(np.prod(shape)) for _, shape in plan), np.float32)
        self.net = NativeActorCritic(block, obs_dim, n_outputs, list(hidden), activation, gaussian, optimizer)
        self.parameters: dict[str, np.ndarray] = {}  # views of the block by their state_dict names
        self._gradients: dict[str, np.ndarray] = {}
        at = 0
        for name, shape in plan:
            part = slice(at, at + int(np.prod(shape)))
            self.parameters[name] = block[part].reshape(shape)
            self._gradients[name] = self.net.gradient[part].reshape(shape)
            at = part.stop
        self._module: ActorCritic | None = None
        self._addresses: list[int] = []

    @classmethod
    def make(cls, spec: EnvSpec, config: OnPolicyConfig, rng: Rng) -> NativePolicy:
        """With the weights that `rlox.policies.make_policy` would start from."""
        n_outputs = spec.n_actions if spec.discrete else spec.act_dim
        c = config
        policy = cls(spec.obs_dim, n_outputs, c.hidden_sizes, spec.continuous, c.activation, c.optimizer)
        for net, last, gain in (("actor", n_outputs, 0.01), ("critic", 1, 1.0)):
            sizes = [spec.obs_dim, *c.hidden_sizes, last]
            for i, (weight, bias) in enumerate(mlp_weights(sizes, gain, c.ortho_init, rng)):
                policy.parameters[f"{net}.{2 * i}.weight"][:] = weight
                policy.parameters[f"{net}.{2 * i}.bias"][:] = bias
        if spec.continuous:
            policy.parameters["log_std"][:] = c.log_std_init
        return policy

    @classmethod
    def _of(cls, module: ActorCritic, spec: EnvSpec, optimizer: str, block: np.ndarray | None) -> NativePolicy:
        from torch import nn

        n_outputs = spec.n_actions if spec.discrete else spec.act_dim
        hidden = [layer.out_features for layer in module.actor if isinstance(layer, nn.Linear)][:-1]
        activation = "relu" if any(isinstance(layer, nn.ReLU) for layer in module.actor) else "tanh"
        return cls(spec.obs_dim, n_outputs, hidden, spec.continuous, activation, optimizer, block)

    @classmethod
    def adopt(cls, module: ActorCritic, spec: EnvSpec, config: OnPolicyConfig) -> NativePolicy:
        """A module in which `obstacle` found nothing; its parameters become views of the block."""
        policy = cls._of(module, spec, config.optimizer, None)
        for name, parameter in module.named_parameters():
            policy.parameters[name][:] = parameter.detach().numpy()
        policy._attach(module)
        return policy

    @classmethod
    def beside(cls, module: ActorCritic, spec: EnvSpec, config: OnPolicyConfig, block: np.ndarray) -> NativePolicy:
        """What acts as a module that PyTorch trains, whose parameters are views of `block` in their order."""
        policy = cls._of(module, spec, config.optimizer, block)
        policy._addresses = [array.ctypes.data for array in policy.parameters.values()]
        return policy

    def still_beside(self, module: ActorCritic, spec: EnvSpec) -> bool:
        """Whether the module is still what `beside` was given: same parameters in the same place, no hooks."""
        return _foreign(spec, module) is None and self._addresses == [p.data_ptr() for p in module.parameters()]

    def _attach(self, module: ActorCritic) -> None:
        import torch

        for name, parameter in module.named_parameters():
            parameter.data = torch.from_numpy(self.parameters[name])
            parameter.grad = torch.from_numpy(self._gradients[name])
        self._module = module

    def module(self) -> ActorCritic:
        """The policy as a PyTorch module, whose parameters and gradients are views of the kernel's."""
        if self._module is None:
            from rlox.policies import ContinuousPolicy, DiscretePolicy

            obs_dim, n_outputs, hidden, activation, gaussian = self._sizes
            kind = ContinuousPolicy if gaussian else DiscretePolicy
            # ortho_init=False: these weights are replaced, and orthogonal ones take longer.
            self._attach(kind(obs_dim, n_outputs, hidden, activation, ortho_init=False, rng=Rng(0)))
        return self._module

    def weights(self) -> dict[str, np.ndarray]:
        """All parameters by their ``state_dict`` names, copies."""
        return {name: array.copy() for name, array in self.parameters.items()}

    def load(self, arrays: dict[str, np.ndarray], what: str) -> None:
        """Put in what `weights` returned; a ValueError that names `what` where it does not fit."""
        ours = {name: array.shape for name, array in self.parameters.items()}
        theirs = {name: array.shape for name, array in arrays.items()}
        if ours != theirs:
            differ = [
                f"{name} must have shape {ours.get(name, 'none')}, got {theirs.get(name, 'none')}"
                for name in {**ours, **theirs}
                if ours.get(name) != theirs.get(name)
            ]
            raise ValueError(f"{what} does not fit the checkpoint: {'; '.join(differ)}")
        for name, array in self.parameters.items():
            array[:] = arrays[name]

    def noise_shape(self, n: int) -> tuple[int, ...]:
        """Shape of the noise that `act` takes for `n` observations."""
        return (n, self.net.n_outputs)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        """Fill the f32 array `out` with the noise this policy samples by."""
        (rng.normal if self.net.gaussian else rng.gumbel)(out=out)

    def act(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Sampled actions, a function of observation and noise alone."""
        return self.net.act(obs, noise)

    def mode(self, obs: np.ndarray) -> np.ndarray:
        """The most likely actions."""
        return self.net.mode(obs)

    def sample(self, obs: np.ndarray, rng: Rng | None = None) -> np.ndarray:
        """Sampled actions; without `rng` a generator seeded from PyTorch's decides the noise."""
        if rng is None:
            from rlox.networks import rng_from_torch

            rng = rng_from_torch()
        noise = np.empty(self.noise_shape(len(obs)), np.float32)
        self.fill_noise(rng, noise)
        return self.act(obs, noise)


class NativeOptimizer:
    """The kernel's optimiser as `rlox.optimizers.FlatOptimizer` is used: for gradients that PyTorch computes.

    Both count and average in the same arrays, so that either may take the next step.

    Parameters
    ----------
    net : NativeActorCritic
        Of a `NativePolicy`.
    learning_rate : float
        Step size.
    """

    def __init__(self, net: NativeActorCritic, learning_rate: float):
        self._net = net
        self.learning_rate = learning_rate

    def step(self, loss: torch.Tensor, max_grad_norm: float | None) -> torch.Tensor:
        """Differentiate `loss`, clip the global gradient norm (None: do not), take one step.

        Returns the norm before clipping, ().
        """
        import torch

        self._net.gradient.fill(0.0)
        loss.backward()
        return torch.tensor(self._net.apply(self.learning_rate, max_grad_norm), dtype=torch.float32)

    def state(self) -> dict[str, np.ndarray]:
        """Moments (P,) and the step count (), copies."""
        return self._net.get_state()

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned; a ValueError where kind or size differ."""
        self._net.set_state(state)
