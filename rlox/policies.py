"""Actor-critics with separate actor and critic networks.

The three methods that any policy must have, ours or a user's module:

- ``get_action_and_logprob(obs) -> (actions, log_probs)``
- ``get_value(obs) -> values``
- ``get_logprob_and_entropy(obs, actions) -> (log_probs, entropy)``

and ``mode(obs) -> actions`` where the policy is to be evaluated deterministically. Letters: B rows, D observation size,
A action size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rlox.kernels.rng import Rng
from rlox.networks import mlp, rng_from_torch

POLICY_METHODS = ("get_action_and_logprob", "get_value", "get_logprob_and_entropy")
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class ActorCritic(nn.Module):
    """Base of the policies that take their noise from outside, so that rlox's generator decides the actions."""

    actor: nn.Module
    critic: nn.Module

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

    def get_logprob_and_entropy(self, obs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of `actions` and entropy of the distribution, both (B,), in nats."""
        raise NotImplementedError

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """Values (B,) of observations (B, D), in units of discounted return."""
        return self.critic(obs).squeeze(-1)

    @torch.no_grad()
    def get_action_and_logprob(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sampled actions and their log-probabilities (B,); ``torch.manual_seed`` decides the noise."""
        noise = torch.empty(self.noise_shape(len(obs)), dtype=torch.float32)
        self.fill_noise(rng_from_torch(), noise.numpy())
        actions = self.act(obs, noise.to(obs.device))
        return actions, self.get_logprob_and_entropy(obs, actions)[0]


class DiscretePolicy(ActorCritic):
    """Categorical policy over `n_actions` actions.

    Parameters
    ----------
    obs_dim, n_actions : int
        Observation size D and number of actions.
    hidden : int or sequence of int
        Width of both hidden layers, or the widths themselves; actor and critic share the widths, not the weights.
    activation : str
        ``tanh`` or ``relu``.
    ortho_init : bool
        Orthogonal initial weights, 0.01 times smaller at the actor's head, else uniform 1/sqrt(fan_in).
    rng : Rng, optional
        Generator of the initial weights; by default seeded from PyTorch's.
    """

    def __init__(
        self,
        obs_dim: int,
        n_actions: int,
        hidden: int | Sequence[int] = 64,
        activation: str = "tanh",
        ortho_init: bool = True,
        rng: Rng | None = None,
    ):
        super().__init__()
        widths = [hidden, hidden] if isinstance(hidden, int) else list(hidden)
        rng = rng or rng_from_torch()
        self.n_actions = n_actions
        self.actor = mlp([obs_dim, *widths, n_actions], activation, 0.01, ortho_init, rng)
        self.critic = mlp([obs_dim, *widths, 1], activation, 1.0, ortho_init, rng)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.n_actions)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.gumbel(out=out)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (B,) int64. argmax(logits + Gumbel noise) samples softmax(logits) without computing it."""
        return (self.actor(obs) + noise).argmax(-1)

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.actor(obs).argmax(-1)

    def get_logprob_and_entropy(self, obs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = F.log_softmax(self.actor(obs), -1)
        log_prob = log_p.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)
        return log_prob, -(log_p.exp() * log_p).sum(-1)


class ContinuousPolicy(ActorCritic):
    """Diagonal Gaussian policy whose standard deviation does not depend on the observation.

    Parameters
    ----------
    obs_dim, act_dim : int
        Observation size D and action size A.
    hidden, activation, ortho_init, rng
        As in `DiscretePolicy`.
    log_std_init : float
        Initial log standard deviation of every action component.
    """

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        hidden: int | Sequence[int] = 64,
        activation: str = "tanh",
        log_std_init: float = 0.0,
        ortho_init: bool = True,
        rng: Rng | None = None,
    ):
        super().__init__()
        widths = [hidden, hidden] if isinstance(hidden, int) else list(hidden)
        rng = rng or rng_from_torch()
        self.act_dim = act_dim
        self.actor = mlp([obs_dim, *widths, act_dim], activation, 0.01, ortho_init, rng)
        self.critic = mlp([obs_dim, *widths, 1], activation, 1.0, ortho_init, rng)
        self.log_std = nn.Parameter(torch.full((act_dim,), float(log_std_init)))

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.act_dim)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.normal(out=out)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (B, A) f32, not clipped: the environment clips, the log-probability is of what was sampled."""
        return torch.addcmul(self.actor(obs), noise, self.log_std.exp())

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.actor(obs)

    def get_logprob_and_entropy(self, obs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = (actions - self.actor(obs)) * (-self.log_std).exp()
        log_prob = -0.5 * z.square().sum(-1) - (self.log_std.sum() + self.act_dim * _LOG_SQRT_2PI)
        entropy = self.log_std.sum() + self.act_dim * (0.5 + _LOG_SQRT_2PI)
        return log_prob, entropy.expand(len(log_prob))


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
