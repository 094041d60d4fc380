"""Critics of all actions at once, and the losses of SAC with discrete actions: expectations over actions are sums.

Christodoulou 2019, arXiv:1910.07207. Letters: N critics, B rows, A actions, D the size of observations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rlox.kernels.rng import Rng
from rlox.nn.actors import CategoricalPolicy
from rlox.nn.critics.ensemble import CriticEnsemble, Dropout
from rlox.nn.critics.heads import Loss, MeanHead
from rlox.nn.critics.norms import Chosen, batch_statistics
from rlox.nn.policies import mask_outputs, nature_cnn, rng_from_torch


class ActionValues(MeanHead):
    """The expected return of each of `n_actions` actions."""

    def __init__(self, n_actions: int):
        super().__init__()
        self.n_outputs = n_actions


class ActionCritics(CriticEnsemble):
    """N independent critics of all actions, ``(B, D) -> (N, B, A)``; images go through a `nature_cnn` of each critic.

    Parameters
    ----------
    obs_dim : int or (C, H, W)
        Observation size D, or the shape of an image.
    n_actions : int
        Actions A.
    hidden, activation, rng, n_critics, norm, norm_after, dropout, n_blocks
        As in `CriticEnsemble`; `hidden` are the layers after the features of an image.
    """

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        n_actions: int,
        hidden: int | Sequence[int] = 256,
        activation: str = "relu",
        rng: Rng | None = None,
        n_critics: int = 2,
        norm: str = "none",
        norm_after: bool = False,
        dropout: Dropout | None = None,
        n_blocks: int = 0,
    ):
        rng, bodies = rng or rng_from_torch(), []
        if isinstance(obs_dim, int):
            n_inputs = obs_dim
        else:
            made = [nature_cnn(tuple(obs_dim), False, rng) for _ in range(n_critics)]
            bodies, n_inputs = [body for body, _ in made], made[0][1]
        options = (rng, n_critics, ActionValues(n_actions), norm, norm_after, dropout, n_blocks)
        super().__init__(n_inputs, 0, hidden, activation, *options)  # there is no action among the inputs
        self.bodies = nn.ModuleList(bodies)

    def action_values(self, obs: torch.Tensor, chosen: Chosen = None) -> torch.Tensor:
        """Return the values (N, B, A) of all actions, or those of the `chosen` critics, (M, B, A)."""
        if len(self.bodies):
            pixels = obs.float() / 255.0
            n = len(self.bodies)
            picked = range(n) if chosen is None else torch.arange(n, device=pixels.device)[chosen].tolist()
            obs = torch.stack([self.bodies[i](pixels) for i in picked])
        # The last reshape is for a single action, whose axis `forward` leaves out.
        values = self(obs, obs[..., :0], chosen)
        return values.reshape(*values.shape[:2], self.head.n_outputs)

    def joint_action_values(
        self, obs: torch.Tensor, next_obs: torch.Tensor, renormalize: bool = False, learn: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values (N, B, A) of two halves of one batch, by its statistics, as `CriticEnsemble.joint`."""
        with batch_statistics(self, renormalize, learn):
            both = self.action_values(torch.cat([obs, next_obs])).split(len(obs), 1)
        return both[0], both[1]


def log_probabilities(policy: CategoricalPolicy, obs: torch.Tensor, masks: torch.Tensor | None = None) -> torch.Tensor:
    """Return the log-probabilities (B, A) of all actions, nats; `masks` (B, A) bool are the legal ones, None: all.

    An illegal action has the probability 0 and a finite logarithm. Where no action is legal, at the end of a game, all
    are equally likely.
    """
    logits = policy(obs)
    return (logits if masks is None else mask_outputs(logits, masks)).log_softmax(-1)


def action_critic_loss(
    critics: ActionCritics,
    target: ActionCritics,
    obs: torch.Tensor,
    actions: torch.Tensor,
    rewards: torch.Tensor,
    next_obs: torch.Tensor,
    discounts: torch.Tensor,
    weights: torch.Tensor | None,
    next_log_probs: torch.Tensor,
    alpha: torch.Tensor,
    chosen: torch.Tensor | None = None,
    renormalize: bool = False,
) -> Loss:
    """Return the squared error of the taken actions' values against ``r + discount * V(s')``, the mean over critics.

    ``V(s) = sum_a pi(a|s) (min Q(s, a) - alpha log pi(a|s))``, with the minimum over critics for each action
    (Christodoulou 2019, eq. 10 with the second critic of section 3).

    Parameters
    ----------
    critics, target : ActionCritics
        N critics each; they may be the same.
    obs, actions, rewards, next_obs, discounts, weights
        Columns of a batch of B transitions; `actions` (B,) int64, the last may be None.
    next_log_probs : Tensor (B, A)
        Log-probabilities of all actions at `next_obs`.
    alpha : Tensor ()
        The temperature.
    chosen, renormalize
        As in `rlox.nn.critics.losses.critic_loss`.
    """
    if critics.uses_batch:
        values, ahead = critics.joint_action_values(obs, next_obs, renormalize)
        with torch.no_grad():
            if target is not critics:
                ahead = target.joint_action_values(obs, next_obs, renormalize, learn=False)[1]
            ahead = ahead if chosen is None else ahead[chosen]
    else:
        with torch.no_grad():
            ahead = target.action_values(next_obs, chosen)
        values = critics.action_values(obs)
    with torch.no_grad():
        soft = (next_log_probs.exp() * (ahead.amin(0) - alpha * next_log_probs)).sum(-1)
        targets = torch.addcmul(rewards, discounts, soft)
    taken = values.gather(-1, actions.view(1, -1, 1).expand(len(values), -1, 1)).squeeze(-1)
    return critics.head.loss(taken, targets, weights)


def expected_policy_loss(
    policy: CategoricalPolicy,
    critics: ActionCritics,
    obs: torch.Tensor,
    masks: torch.Tensor | None,
    alpha: torch.Tensor,
    mean: bool = False,
) -> Loss:
    """Return ``sum_a pi(a|s) (alpha log pi(a|s) - min Q(s, a))`` (Christodoulou 2019, eq. 12), or with the `mean` of
    all critics' values in place of the minimum; metrics ``policy_loss`` and ``entropy`` in nats."""
    log_probs = log_probabilities(policy, obs, masks)
    probs = log_probs.exp()
    with torch.no_grad():
        values = critics.action_values(obs)
        value = values.mean(0) if mean else values.amin(0)
    loss = (probs * (alpha * log_probs - value)).sum(-1).mean()
    entropy = -(probs * log_probs).detach().sum(-1).mean()
    return loss, {"policy_loss": loss.detach(), "entropy": entropy}
