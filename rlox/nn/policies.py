"""What acts: actor-critics for every action space, policies within bounds, and ε-greedy over Q-values.

The three methods that any on-policy policy must have, ours or a user's module:

- ``get_action_and_logprob(obs) -> (actions, log_probs)``
- ``get_value(obs) -> values``
- ``get_logprob_and_entropy(obs, actions) -> (log_probs, entropy)``

and ``mode(obs) -> actions`` where the policy is to be evaluated deterministically. Letters: B rows, D observation size,
A action size, K components of a multi-discrete action. Observations are (B, D) f32 or (B, C, H, W) uint8 images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rlox.kernels.rng import Rng
from rlox.nn.networks import NetworkSpec, rng_from_torch

POLICY_METHODS = ("get_action_and_logprob", "get_value", "get_logprob_and_entropy")
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
LOG_STD_RANGE = (-20.0, 2.0)  # of the squashed Gaussian
_INSIDE = 1e-6  # how far from the bounds an action is taken to be, where its density is asked for


class Actor(nn.Module):
    """Base of what takes its noise from outside, so that rlox's generator decides the actions."""

    def noise_shape(self, n: int) -> tuple[int, ...]:
        """Shape of the noise that `act` takes for `n` observations."""
        raise NotImplementedError

    def fill_noise(self, rng: Rng, out) -> None:
        """Fill the f32 array `out` with the noise this policy samples by."""
        raise NotImplementedError

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Sampled actions, a function of observation and noise alone."""
        raise NotImplementedError

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        """The most likely action."""
        raise NotImplementedError

    def sample(self, obs: torch.Tensor) -> torch.Tensor:
        """Sampled actions, differentiable where `act` is; ``torch.manual_seed`` decides the noise."""
        noise = torch.empty(self.noise_shape(len(obs)), dtype=torch.float32)
        self.fill_noise(rng_from_torch(), noise.numpy())
        return self.act(obs, noise.to(obs.device))


class ActorCritic(Actor):
    """Base of the on-policy policies: values beside actions, and the probabilities of these.

    Vector observations go to an actor and a critic network that share nothing. Images go through one convolutional
    `body` (Mnih et al. 2015) whose features both heads read.

    Parameters
    ----------
    obs_dim : int or (C, H, W)
        Observation size D, or the shape of an image.
    n_outputs : int
        Outputs of the actor's head.
    hidden : int or sequence of int
        Width of both hidden layers, or the widths themselves; after the features of an image they may be ``()``.
    activation : str
        ``tanh`` or ``relu``.
    ortho_init : bool
        Orthogonal initial weights, 0.01 times smaller at the actor's head, else uniform 1/sqrt(fan_in).
    rng : Rng, optional
        Generator of the initial weights; by default seeded from PyTorch's.
    """

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        n_outputs: int,
        hidden: int | Sequence[int] = 64,
        activation: str = "tanh",
        ortho_init: bool = True,
        rng: Rng | None = None,
    ):
        super().__init__()
        spec = NetworkSpec(obs_dim, hidden, activation, ortho_init, rng)
        self.body, self.actor, self.critic = spec.body, spec.mlp(n_outputs, 0.01), spec.mlp(1)

    def features(self, obs: torch.Tensor) -> torch.Tensor:
        """What both heads read: the observation itself, or the body's features of an image."""
        return obs if self.body is None else self.body(obs.float() / 255.0)

    def distribution(self, outputs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of `actions` and entropy, both (B,) in nats, from the actor's outputs."""
        raise NotImplementedError

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """Values (B,), in units of discounted return."""
        return self.critic(self.features(obs)).squeeze(-1)

    def get_logprob_and_entropy(self, obs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of `actions` and entropy of the distribution, both (B,), in nats."""
        return self.distribution(self.actor(self.features(obs)), actions)

    @torch.no_grad()
    def sample(self, obs: torch.Tensor) -> torch.Tensor:
        """Sampled actions; ``torch.manual_seed`` decides the noise.

        They are constants to a gradient, which a policy-gradient loss takes of their log-probability alone: through the
        sample of a Gaussian as well, that of the mean would cancel.
        """
        return super().sample(obs)

    def get_action_and_logprob(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sampled actions, and their log-probabilities (B,) with a gradient; ``torch.manual_seed`` decides the noise.

        Collectors switch gradients off; a loop of your own does so by ``torch.no_grad()`` where it needs none.
        """
        actions = self.sample(obs)
        return actions, self.get_logprob_and_entropy(obs, actions)[0]


def policy_outputs(
    policy: nn.Module, obs: torch.Tensor, actions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, entropies and values, each (B,); a shared body is run once."""
    if isinstance(policy, ActorCritic):
        features = policy.features(obs)
        return *policy.distribution(policy.actor(features), actions), policy.critic(features).squeeze(-1)
    return *policy.get_logprob_and_entropy(obs, actions), policy.get_value(obs)


def _categorical(logits: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = F.log_softmax(logits, -1)
    log_prob = log_p.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)
    return log_prob, -(log_p.exp() * log_p).sum(-1)


class DiscretePolicy(ActorCritic):
    """Categorical policy over `n_actions` actions; further parameters as in `ActorCritic`."""

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        n_actions: int,
        hidden: int | Sequence[int] = 64,
        activation: str = "tanh",
        ortho_init: bool = True,
        rng: Rng | None = None,
    ):
        super().__init__(obs_dim, n_actions, hidden, activation, ortho_init, rng)
        self.n_actions = n_actions

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.n_actions)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.gumbel(out=out)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (B,) int64. argmax(logits + Gumbel noise) samples softmax(logits) without computing it."""
        return (self.actor(self.features(obs)) + noise).argmax(-1)

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.actor(self.features(obs)).argmax(-1)

    def distribution(self, outputs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _categorical(outputs, actions)


class MultiDiscretePolicy(ActorCritic):
    """K independent categorical choices, `n_choices[k]` each; further parameters as in `ActorCritic`."""

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        n_choices: Sequence[int],
        hidden: int | Sequence[int] = 64,
        activation: str = "tanh",
        ortho_init: bool = True,
        rng: Rng | None = None,
    ):
        super().__init__(obs_dim, sum(n_choices), hidden, activation, ortho_init, rng)
        self.n_choices = list(n_choices)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, sum(self.n_choices))

    def fill_noise(self, rng: Rng, out) -> None:
        rng.gumbel(out=out)

    def _argmax(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.argmax(-1) for part in scores.split(self.n_choices, -1)], -1)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (B, K) int64."""
        return self._argmax(self.actor(self.features(obs)) + noise)

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self._argmax(self.actor(self.features(obs)))

    def distribution(self, outputs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = zip(outputs.split(self.n_choices, -1), actions.unbind(-1), strict=True)
        log_probs, entropies = zip(*(_categorical(logits, action) for logits, action in parts), strict=True)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)


class ContinuousPolicy(ActorCritic):
    """Diagonal Gaussian policy whose standard deviation does not depend on the observation.

    Parameters
    ----------
    obs_dim, hidden, activation, ortho_init, rng
        As in `ActorCritic`.
    act_dim : int
        Action size A.
    log_std_init : float
        Initial log standard deviation of every action component.
    """

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        act_dim: int,
        hidden: int | Sequence[int] = 64,
        activation: str = "tanh",
        log_std_init: float = 0.0,
        ortho_init: bool = True,
        rng: Rng | None = None,
    ):
        super().__init__(obs_dim, act_dim, hidden, activation, ortho_init, rng)
        self.act_dim = act_dim
        self.log_std = nn.Parameter(torch.full((act_dim,), float(log_std_init)))

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.act_dim)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.normal(out=out)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (B, A) f32, not clipped: the environment clips, the log-probability is of what was sampled."""
        return torch.addcmul(self.actor(self.features(obs)), noise, self.log_std.exp())

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.actor(self.features(obs))

    def distribution(self, outputs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = (actions - outputs) * (-self.log_std).exp()
        log_prob = -0.5 * z.square().sum(-1) - (self.log_std.sum() + self.act_dim * _LOG_SQRT_2PI)
        entropy = self.log_std.sum() + self.act_dim * (0.5 + _LOG_SQRT_2PI)
        return log_prob, entropy.expand(len(log_prob))


class BoundedPolicy(Actor):
    """Base of the policies of continuous actions that a tanh keeps within bounds.

    A network and what values its actions see them in [-1, 1]; `act` and `mode` return the environment's units.

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
        A module of your own in place of the perceptron, ``(B, D) -> (B, n_outputs)``.
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
        """Act between `low` and `high` from now on."""
        low, high = (np.broadcast_to(np.asarray(bound, np.float32), self.act_dim) for bound in (low, high))
        # No part of what was learned, and so of no checkpoint: they are the environment's.
        self.register_buffer("scale", torch.from_numpy((high - low) / 2), persistent=False)
        self.register_buffer("centre", torch.from_numpy((high + low) / 2), persistent=False)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """What the network says, (B, n_outputs)."""
        return self.net(obs)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.act_dim)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.normal(out=out)

    def to_unit(self, actions: torch.Tensor) -> torch.Tensor:
        """The environment's actions as numbers in [-1, 1]."""
        return (actions - self.centre) / self.scale

    def to_env(self, unit: torch.Tensor) -> torch.Tensor:
        """Numbers in [-1, 1] as actions of the environment."""
        return torch.addcmul(self.centre, unit, self.scale)

    def unit_mode(self, obs: torch.Tensor) -> torch.Tensor:
        """The most likely action, (B, A) in [-1, 1]."""
        raise NotImplementedError

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.to_env(self.unit_mode(obs))


class SquashedGaussianPolicy(BoundedPolicy):
    """tanh of a diagonal Gaussian whose mean and deviation the observation decides (Haarnoja et al. 2018, app. C).

    The network's outputs are A means, then A log standard deviations, held to [-20, 2]; parameters as in
    `BoundedPolicy`.
    """

    outputs_per_action = 2

    def _gaussian(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the tanh is taken of, and the log standard deviations, both (B, A)."""
        mean, log_std = self.net(obs).chunk(2, -1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        return torch.addcmul(mean, log_std.exp(), noise), log_std

    def unit_sample(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions (B, A) in [-1, 1] and their log-probabilities (B,) there, in nats; differentiable.

        `noise` (B, A) is standard normal.
        """
        x, log_std = self._gaussian(obs, noise)
        # log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)): no difference of nearly equal numbers, finite for every x.
        terms = 2.0 * (x + F.softplus(-2.0 * x)) - log_std - 0.5 * noise.square()
        return x.tanh(), terms.sum(-1) - self.act_dim * (_LOG_SQRT_2PI + 2.0 * math.log(2.0))

    def log_prob(self, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Log-density (B,) of actions (B, A) in [-1, 1], nats; at the bounds, where there is none, just inside."""
        mean, log_std = self.net(obs).chunk(2, -1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        x = unit.clamp(-1.0 + _INSIDE, 1.0 - _INSIDE).atanh()
        z = (x - mean) * (-log_std).exp()
        terms = 2.0 * (x + F.softplus(-2.0 * x)) - log_std - 0.5 * z.square()
        return terms.sum(-1) - self.act_dim * (_LOG_SQRT_2PI + 2.0 * math.log(2.0))

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (B, A) f32."""
        return self.to_env(self._gaussian(obs, noise)[0].tanh())

    def unit_mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs)[:, : self.act_dim].tanh()

    def sample(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sampled actions (B, A) and their log-probabilities (B,) as `unit_sample` has them, both differentiable.

        ``torch.manual_seed`` decides the noise.
        """
        noise = torch.empty(self.noise_shape(len(obs)))
        self.fill_noise(rng_from_torch(), noise.numpy())
        unit, log_probs = self.unit_sample(obs, noise.to(obs.device))
        return self.to_env(unit), log_probs


class DeterministicPolicy(BoundedPolicy):
    """tanh of the network's A outputs; parameters as in `BoundedPolicy`.

    Attributes
    ----------
    noise_std : float
        Standard deviation of the Gaussian noise that `act` adds to actions in [-1, 1], which are then clipped; the
        training sets it, and no checkpoint holds it.
    """

    outputs_per_action = 1
    noise_std = 0.0

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (B, A) f32."""
        return self.to_env(torch.add(self.unit_mode(obs), noise, alpha=self.noise_std).clamp_(-1.0, 1.0))

    def unit_mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs).tanh()


class TanhMeanPolicy(BoundedPolicy):
    """Gaussian around the tanh of the network's A outputs; its deviation does not depend on the observation.

    What IQL's reference implementation learns (Kostrikov et al. 2021, arXiv:2110.06169, appendix B). Unlike that of
    `SquashedGaussianPolicy`, its density is defined at the bounds too, where a dataset has many actions. Parameters as
    in `BoundedPolicy`.
    """

    outputs_per_action = 1
    LOG_STD_RANGE = (-5.0, 2.0)

    def __init__(self, obs_dim: int, act_dim: int, *args, **kwargs):
        super().__init__(obs_dim, act_dim, *args, **kwargs)
        self.log_std = nn.Parameter(torch.zeros(act_dim))

    def log_prob(self, obs: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Log-density (B,) of actions (B, A) in [-1, 1], nats."""
        log_std = self.log_std.clamp(*self.LOG_STD_RANGE)
        z = (unit - self.unit_mode(obs)) * (-log_std).exp()
        return -0.5 * z.square().sum(-1) - (log_std.sum() + self.act_dim * _LOG_SQRT_2PI)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (B, A) f32, clipped to the bounds."""
        std = self.log_std.clamp(*self.LOG_STD_RANGE).exp()
        return self.to_env(torch.addcmul(self.unit_mode(obs), std, noise).clamp_(-1.0, 1.0))

    def unit_mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs).tanh()


class CategoricalPolicy(Actor):
    """Softmax of the outputs of a perceptron, one for each action; parameters as in `BoundedPolicy`."""

    def __init__(
        self,
        obs_dim: int,
        n_actions: int,
        hidden: int | Sequence[int] = 256,
        activation: str = "relu",
        rng: Rng | None = None,
    ):
        super().__init__()
        self.n_actions = n_actions
        self.net = NetworkSpec(obs_dim, hidden, activation, False, rng).mlp(n_actions)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Logits (B, n_actions)."""
        return self.net(obs)

    def log_prob(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Log-probability (B,) of actions (B,) int64, nats."""
        return _categorical(self.net(obs), actions)[0]

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.n_actions)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.gumbel(out=out)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (B,) int64."""
        return (self.net(obs) + noise).argmax(-1)

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs).argmax(-1)


class QPolicy(Actor):
    """ε-greedy over the values of a module ``(B, D) -> (B, n_actions)``.

    Attributes
    ----------
    epsilon : float
        Probability that `act` takes an action at random; the training sets it, and no checkpoint holds it.
    """

    def __init__(self, q: nn.Module, n_actions: int, epsilon: float = 0.0):
        super().__init__()
        self.q = q
        self.n_actions = n_actions
        self.epsilon = epsilon

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Values (B, n_actions)."""
        return self.q(obs)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, 2)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.uniform(out=out)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (B,) int64: the first number of each row decides whether to explore, the second which action."""
        chance, which = noise.numpy(force=True).T  # a handful of numbers, for which NumPy is quicker
        explore = chance < self.epsilon
        if not explore.any():
            return self.mode(obs)
        # The largest f32 below 1 times n rounds to a number below n.
        random = torch.from_numpy((which * self.n_actions).astype(np.int64)).to(noise.device)
        return (
            random if explore.all() else torch.where(torch.from_numpy(explore).to(obs.device), random, self.mode(obs))
        )

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.q(obs).argmax(-1)


def make_policy(spec, config, rng: Rng) -> ActorCritic:
    """The default policy for an `rlox.envs.EnvSpec` and an `rlox.config.OnPolicyConfig`."""
    obs = spec.obs_shape[0] if len(spec.obs_shape) == 1 else spec.obs_shape
    common = {
        "hidden": config.hidden_sizes,
        "activation": config.activation,
        "ortho_init": config.ortho_init,
        "rng": rng,
    }
    if spec.discrete:
        return DiscretePolicy(obs, spec.n_actions, **common)
    if spec.n_choices is not None:
        return MultiDiscretePolicy(obs, spec.n_choices, **common)
    return ContinuousPolicy(obs, spec.act_dim, log_std_init=config.log_std_init, **common)


def check_policy(policy: nn.Module, where: str) -> None:
    """Raise a TypeError unless `policy` is a module with the three methods that collection and updates call."""
    if not isinstance(policy, nn.Module):
        raise TypeError(f"{where}: policy must be a torch.nn.Module, got {type(policy).__name__}")
    missing = [name for name in POLICY_METHODS if not callable(getattr(policy, name, None))]
    if missing:
        raise TypeError(
            f"{where}: policy must define {', '.join(POLICY_METHODS)}; "
            f"{type(policy).__name__} lacks {', '.join(missing)}"
        )
