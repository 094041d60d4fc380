"""Networks of Q-values, and policies whose algorithms learn values elsewhere: actions within bounds, labels, and
ε-greedy over Q-values.

Letters and observations as in `rlox.nn.policies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rlox.envs.spec import draw_legal
from rlox.kernels.rng import Rng
from rlox.nn.memory import MemoryNetwork, Sequences
from rlox.nn.policies import (
    _LOG_SQRT_2PI,
    _NONLINEARITIES,
    Actor,
    MemoryShape,
    NetworkSpec,
    _categorical,
    mlp,
    rng_from_torch,
)

LOG_STD_RANGE = (-20.0, 2.0)  # of the squashed Gaussian
_INSIDE = 1e-6  # smallest distance of an action from the bounds at which its density is computed


class BoundedPolicy(Actor):
    """Base class of policies of continuous actions that a tanh keeps within bounds.

    The network and critics use actions in [-1, 1]; `act` and `mode` return the environment's units.

    Parameters
    ----------
    obs_dim, act_dim : int
        Sizes D and A of observations and actions.
    hidden : int or sequence of int
        Width of both hidden layers, or the widths themselves.
    activation : str
        ``tanh`` or ``relu``.
    low, high : float or array (A,)
        Bounds of the environment's actions.
    rng : Rng, optional
        Generator of the initial weights U(-1/sqrt(fan_in), 1/sqrt(fan_in)); by default seeded from PyTorch's.
    net : nn.Module, optional
        A custom module instead of the perceptron, ``(B, D) -> (B, n_outputs)``; a `MemoryNetwork` has a memory.
    """

    outputs_per_action: ClassVar[int]

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        hidden: int | Sequence[int] = 256,
        activation: str = "relu",
        low: float | np.ndarray = -1.0,
        high: float | np.ndarray = 1.0,
        rng: Rng | None = None,
        net: nn.Module | None = None,
    ):
        super().__init__()
        self.act_dim = act_dim
        self.n_outputs = self.outputs_per_action * act_dim
        if net is None:
            net = NetworkSpec(obs_dim, hidden, activation, False, rng).mlp(self.n_outputs)
        self.net = net
        self.bound_(low, high)

    def bound_(self, low: float | np.ndarray, high: float | np.ndarray) -> None:
        """Set the bounds of actions to `low` and `high`."""
        low, high = (np.broadcast_to(np.asarray(bound, np.float32), self.act_dim) for bound in (low, high))
        # The bounds are the environment's and are not learned, so checkpoints do not contain them.
        self.register_buffer("scale", torch.from_numpy((high - low) / 2), persistent=False)
        self.register_buffer("centre", torch.from_numpy((high + low) / 2), persistent=False)

    @property
    def state_dim(self) -> int:
        """S, the numbers of the network's memory; 0: it has none."""
        return self.net.state_dim if isinstance(self.net, MemoryNetwork) else 0

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return the network's outputs, (B, n_outputs), as f32."""
        return self.net(obs).float()

    def follow(self, obs: torch.Tensor, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the memory through sequences. Return outputs (B, n_outputs) and the states (n, S) after their ends."""
        return self.net.follow(obs, sequences)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.act_dim)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.normal(out=out)

    def to_unit(self, actions: torch.Tensor) -> torch.Tensor:
        """Convert the environment's actions to numbers in [-1, 1]."""
        return (actions - self.centre) / self.scale

    def to_env(self, unit: torch.Tensor) -> torch.Tensor:
        """Convert numbers in [-1, 1] to actions of the environment."""
        return torch.addcmul(self.centre, unit, self.scale)

    def unit_mode(self, obs: torch.Tensor) -> torch.Tensor:
        """Return the most likely actions, (B, A) in [-1, 1]."""
        raise NotImplementedError

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.to_env(self.unit_mode(obs))


class SquashedGaussianPolicy(BoundedPolicy):
    """tanh of a diagonal Gaussian whose mean and deviation depend on the observation (Haarnoja et al. 2018, app. C).

    The network's outputs are A means, then A log standard deviations, clipped to [-20, 2]; parameters as in
    `BoundedPolicy`.
    """

    outputs_per_action = 2

    def _gaussian(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sample before the tanh, and the log standard deviations, both (B, A)."""
        mean, log_std = self.forward(obs).chunk(2, -1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        return torch.addcmul(mean, log_std.exp(), noise), log_std

    def unit_sample(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions (B, A) in [-1, 1] and their log-densities (B,) in this space, in nats; differentiable.

        `noise` (B, A) is standard normal.
        """
        x, log_std = self._gaussian(obs, noise)
        # log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)) avoids cancellation, and is finite for every x.
        terms = 2.0 * (x + F.softplus(-2.0 * x)) - log_std - 0.5 * noise.square()
        return x.tanh(), terms.sum(-1) - self.act_dim * (_LOG_SQRT_2PI + 2.0 * math.log(2.0))

    def log_prob(self, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Return log-densities (B,) of actions (B, A) in [-1, 1], nats; at the bounds, where the density is undefined,
        those of actions just inside."""
        mean, log_std = self.forward(obs).chunk(2, -1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        x = unit.clamp(-1.0 + _INSIDE, 1.0 - _INSIDE).atanh()
        z = (x - mean) * (-log_std).exp()
        terms = 2.0 * (x + F.softplus(-2.0 * x)) - log_std - 0.5 * z.square()
        return terms.sum(-1) - self.act_dim * (_LOG_SQRT_2PI + 2.0 * math.log(2.0))

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return actions (B, A) f32."""
        return self.to_env(self._gaussian(obs, noise)[0].tanh())

    def unit_mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.forward(obs)[:, : self.act_dim].tanh()

    def sample(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sampled actions (B, A) and their log-densities (B,) as in `unit_sample`, both differentiable.

        The noise is seeded by ``torch.manual_seed``.
        """
        noise = torch.empty(self.noise_shape(len(obs)), dtype=torch.float32, device="cpu")
        self.fill_noise(rng_from_torch(), noise.numpy())
        unit, log_probs = self.unit_sample(obs, noise.to(obs.device))
        return self.to_env(unit), log_probs


class DeterministicPolicy(BoundedPolicy):
    """tanh of the network's A outputs; parameters as in `BoundedPolicy`.

    Attributes
    ----------
    noise_std : float
        Standard deviation of the Gaussian noise that `act` adds to actions in [-1, 1], which are then clipped. It is
        set by the training and not part of checkpoints.
    """

    outputs_per_action = 1
    noise_std = 0.0

    def pick(self, outputs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return actions (B, A) f32 with `noise`, from the network's outputs."""
        return self.to_env(torch.add(outputs.tanh(), noise, alpha=self.noise_std).clamp_(-1.0, 1.0))

    def pick_mode(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return actions (B, A) f32 without noise, from the network's outputs."""
        return self.to_env(outputs.tanh())

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return actions (B, A) f32."""
        return self.to_env(torch.add(self.unit_mode(obs), noise, alpha=self.noise_std).clamp_(-1.0, 1.0))

    def unit_mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.forward(obs).tanh()


class TanhMeanPolicy(BoundedPolicy):
    """Gaussian around the tanh of the network's A outputs; its deviation does not depend on the observation.

    The policy of IQL's reference implementation (Kostrikov et al. 2021, arXiv:2110.06169, appendix B). Unlike the
    density of `SquashedGaussianPolicy`, its density is also defined at the bounds, where datasets have many actions.
    Parameters as in `BoundedPolicy`.
    """

    outputs_per_action = 1
    LOG_STD_RANGE = (-5.0, 2.0)

    def __init__(self, obs_dim: int, act_dim: int, *args, **kwargs):
        super().__init__(obs_dim, act_dim, *args, **kwargs)
        self.log_std = nn.Parameter(torch.zeros(act_dim, dtype=torch.float32, device="cpu"))

    def log_prob(self, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Return log-densities (B,) of actions (B, A) in [-1, 1], nats."""
        log_std = self.log_std.clamp(*self.LOG_STD_RANGE)
        z = (unit - self.unit_mode(obs)) * (-log_std).exp()
        return -0.5 * z.square().sum(-1) - (log_std.sum() + self.act_dim * _LOG_SQRT_2PI)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return actions (B, A) f32, clipped to the bounds."""
        std = self.log_std.clamp(*self.LOG_STD_RANGE).exp()
        return self.to_env(torch.addcmul(self.unit_mode(obs), std, noise).clamp_(-1.0, 1.0))

    def unit_mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.forward(obs).tanh()


class CategoricalPolicy(Actor):
    """Softmax of a network's outputs, one per action; parameters as in `BoundedPolicy`, `obs_dim` also (C, H, W)."""

    adds_noise_to_logits = True

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        n_actions: int,
        hidden: int | Sequence[int] = 256,
        activation: str = "relu",
        rng: Rng | None = None,
        net: nn.Module | None = None,
    ):
        super().__init__()
        spec = NetworkSpec(obs_dim, hidden, activation, False, rng) if net is None else None
        self.n_actions, self.body = n_actions, None if spec is None else spec.body
        self.net: Any = net if spec is None else spec.mlp(n_actions)

    @property
    def state_dim(self) -> int:
        """S, the numbers of the network's memory; 0: it has none."""
        return self.net.state_dim if isinstance(self.net, MemoryNetwork) else 0

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return logits (B, n_actions)."""
        return self.net(obs if self.body is None else self.body(obs.float() / 255.0))

    def follow(self, obs: torch.Tensor, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the memory through sequences. Return logits (B, n_actions) and the states (n, S) after their ends."""
        return self.net.follow(obs, sequences)

    def log_prob(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities (B,) of actions (B,) int64, nats."""
        return _categorical(self(obs), actions)[0]

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.n_actions)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.gumbel(out=out)

    def pick(self, outputs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return actions (B,) int64 sampled with `noise`, from logits."""
        return (outputs + noise).argmax(-1)

    def pick_mode(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the most likely actions (B,) int64, from logits."""
        return outputs.argmax(-1)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return actions (B,) int64."""
        return self.pick(self(obs), noise)

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.pick_mode(self(obs))


class QPolicy(Actor):
    """ε-greedy over the values of a module ``(B, D) -> (B, n_actions)``.

    Attributes
    ----------
    epsilon : float
        Probability that `act` takes a random action. It is set by the training and not part of checkpoints.
    """

    def __init__(self, q: nn.Module, n_actions: int, epsilon: float = 0.0):
        super().__init__()
        self.q = q
        self.n_actions = n_actions
        self.epsilon = epsilon

    @property
    def state_dim(self) -> int:
        """S, the numbers of the module's memory; 0: it has none."""
        return getattr(self.q, "state_dim", 0)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return values (B, n_actions)."""
        return self.q(obs)

    def follow(self, obs: torch.Tensor, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the memory through sequences, see `RecurrentQNetwork.follow`."""
        return self.q.follow(obs, sequences)

    def pick_mode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the actions (B,) int64 with the largest of the `values` (B, n_actions)."""
        return values.argmax(-1)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, 2)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.uniform(out=out)

    def act(self, obs: torch.Tensor, noise: torch.Tensor, masks: torch.Tensor | None = None) -> torch.Tensor:
        """Return actions (B,) int64: the first number of each row decides whether to explore, the second the action.

        `masks` (B, n_actions) bool are the legal actions; None: all.
        """
        legal = None if masks is None else masks.numpy(force=True)
        actions = self.choose(noise.numpy(force=True), lambda: self.mode(obs, masks).numpy(force=True), legal)
        return torch.from_numpy(actions).to(obs.device)

    def choose(self, noise: np.ndarray, best: Callable[[], np.ndarray], masks: np.ndarray | None = None) -> np.ndarray:
        """Return actions (B,) int64 for the `noise` (B, 2) and `masks` of `act`, decided on the host; `best` returns
        the most likely actions, and is only called if they are needed."""
        chance, which = noise.T
        explore = chance < self.epsilon
        # The largest f32 below 1 times n rounds to a number below n.
        random = (which * self.n_actions).astype(np.int64) if masks is None else draw_legal(masks, which)
        if explore.all():
            return random
        return np.where(explore, random, best()) if explore.any() else best()

    def mode(self, obs: torch.Tensor, masks: torch.Tensor | None = None) -> torch.Tensor:
        values = self.q(obs)
        return (values if masks is None else values.masked_fill(~masks, -torch.inf)).argmax(-1)


class QNetwork(nn.Module):
    """The value of an action in a state, ``(B, D), (B, A) -> (B, 1)``, in units of discounted return.

    Weights and biases start at U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    Parameters
    ----------
    obs_dim, act_dim : int
        Sizes D and A of observations and actions.
    hidden : int or sequence of int
        Width of both hidden layers, or the widths themselves.
    activation : str
        ``tanh`` or ``relu``.
    rng : Rng, optional
        Generator of the initial weights; by default seeded from PyTorch's.
    """

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        hidden: int | Sequence[int] = 256,
        activation: str = "relu",
        rng: Rng | None = None,
    ):
        super().__init__()
        self.layers = NetworkSpec(obs_dim + act_dim, hidden, activation, False, rng).mlp(1)

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([obs, actions], -1))


class DiscreteQNetwork(nn.Module):
    """Values of all actions at once, ``(B, D) -> (B, n_actions)``; images go through `nature_cnn` first.

    Weights and biases start at U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    Parameters
    ----------
    obs_dim : int or (C, H, W)
        Observation size D, or the shape of an image.
    n_actions : int
        Number of actions.
    hidden : int or sequence of int
        Width of both hidden layers, or the widths themselves; after the features of an image they may be ``()``.
    activation : str
        ``tanh`` or ``relu``.
    dueling : bool
        Q = V + A - mean(A) from two streams, each with its own last hidden layer (Wang et al. 2016, arXiv:1511.06581,
        eq. 9).
    rng : Rng, optional
        Generator of the initial weights; by default seeded from PyTorch's.
    """

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        n_actions: int,
        hidden: int | Sequence[int] = 256,
        activation: str = "relu",
        dueling: bool = False,
        rng: Rng | None = None,
    ):
        super().__init__()
        spec = NetworkSpec(obs_dim, hidden, activation, False, rng)
        self.dueling, self.body, self.trunk = dueling, spec.body, nn.Sequential()
        first = -2 if dueling else 0
        if dueling and len(spec.widths) > 2:
            shared = mlp(spec.widths[:-1], activation, orthogonal=False, rng=spec.rng)
            self.trunk = nn.Sequential(*shared, _NONLINEARITIES[activation]())
        self.head = spec.mlp(n_actions, first=first)
        self.value = spec.mlp(1, first=first) if dueling else None

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return values (B, n_actions), in units of discounted return."""
        features = obs if self.body is None else self.body(obs.float() / 255.0)
        if self.value is None:
            return self.head(features)
        features = self.trunk(features)
        advantages = self.head(features)
        return self.value(features) + advantages - advantages.mean(-1, keepdim=True)


class RecurrentQNetwork(nn.Module):
    """Values of all actions from the observations since the start of the episode, which a memory has read.

    Images go through `nature_cnn`, then everything through a perceptron with an activation after each layer, the memory
    and a last layer. Weights and biases start at U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    Parameters
    ----------
    obs_dim, n_actions, hidden, activation, rng
        As in `DiscreteQNetwork`.
    dueling : bool
        Q = V + A - mean(A), where V and A are linear in the outputs of the memory.
    memory : (str, int, int)
        ``lstm`` or ``gru``, its units and its layers.

    Attributes
    ----------
    state_dim : int
        S, the numbers of the memory's state.
    """

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        n_actions: int,
        hidden: int | Sequence[int],
        activation: str,
        dueling: bool,
        memory: MemoryShape,
        rng: Rng | None = None,
    ):
        super().__init__()
        spec = NetworkSpec(obs_dim, hidden, activation, False, rng, memory)
        self.dueling, self.body = dueling, spec.body
        self.net = spec.network(n_actions + dueling)  # of a dueling network, the first output is V
        self.state_dim: int = self.net.state_dim

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return values (B, n_actions) of rows each of which is the first step of an episode."""
        return self._values(self.net(self._features(obs)))

    def follow(self, obs: torch.Tensor, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the memory through n sequences of T steps each, with B rows in all.

        Returns
        -------
        values
            (B, n_actions), in units of discounted return; with `sequences.running` only of those rows.
        state
            (n, S), after the last step of each sequence.
        """
        outputs, state = self.net.follow(self._features(obs), sequences)
        return self._values(outputs), state

    def _features(self, obs: torch.Tensor) -> torch.Tensor:
        return obs if self.body is None else self.body(obs.float() / 255.0)

    def _values(self, outputs: torch.Tensor) -> torch.Tensor:
        if not self.dueling:
            return outputs
        advantages = outputs[:, 1:]
        return outputs[:, :1] + advantages - advantages.mean(-1, keepdim=True)


@torch.no_grad()
def polyak_update(source: nn.Module, target: nn.Module, tau: float = 0.005) -> None:
    """Move `target`'s parameters towards `source`'s by the fraction `tau`; 1 copies them. Buffers are copied.

    Raises
    ------
    ValueError
        If `tau` is outside (0, 1], or the modules differ in their parameters.
    """
    if not 0 < tau <= 1:
        raise ValueError(f"polyak_update: tau must be in (0, 1], got {tau}")
    ours, theirs = list(target.parameters()), list(source.parameters())
    if [p.shape for p in ours] != [p.shape for p in theirs]:
        raise ValueError("polyak_update: target must have the parameters of source, in number and shapes")
    if tau == 1:
        torch._foreach_copy_(ours, theirs)
    else:
        torch._foreach_lerp_(ours, theirs, tau)
    for buffer, from_source in zip(target.buffers(), source.buffers(), strict=True):
        buffer.copy_(from_source)
