"""Losses of off-policy and offline algorithms: of values, of the policies that follow them, and of imitation.

All are pure functions of tensors, each with its paper.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from rlox.nn.policies import mask_outputs

if TYPE_CHECKING:
    from rlox.nn.actors import (
        CategoricalPolicy,
        DeterministicPolicy,
        SquashedGaussianPolicy,
        TanhMeanPolicy,
    )
    from rlox.nn.batch import TransitionBatch
    from rlox.nn.critics.ensemble import CriticEnsemble, TwinQNetwork
    from rlox.nn.memory import Sequences


def q_loss(
    network: nn.Module,
    target: nn.Module,
    obs: torch.Tensor,
    actions: torch.Tensor,
    rewards: torch.Tensor,
    next_obs: torch.Tensor,
    discounts: torch.Tensor,
    weights: torch.Tensor | None,
    double: bool,
    kind: str,
    next_masks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the error of the taken actions' values against ``r + discount * next value``.

    Mnih et al. 2015, doi:10.1038/nature14236. `network` and `target` return the values of all actions (B, n_actions),
    `actions` (B,) are int64, `weights` (B,) importance weights or None, `kind` is ``huber`` or ``mse``. `double` is
    double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461): `network` chooses the next action and `target`
    evaluates it. The next action is one of those that `next_masks` (B, n_actions) bool allow; None allows all.

    Returns
    -------
    loss : Tensor ()
    metrics : dict
        ``q_loss`` and ``q_value`` (), and ``td_errors`` (B,), absolute.
    """
    with torch.no_grad():
        next_values = target(next_obs)
        if double or next_masks is not None:
            chooser = network(next_obs) if double else next_values
            # Where no action is legal, at the end of a game, some value is taken, with discount 0.
            legal = chooser if next_masks is None else chooser.masked_fill(~next_masks, -torch.inf)
            ahead = next_values.gather(-1, legal.argmax(-1, keepdim=True)).squeeze(-1)
        else:
            ahead = next_values.amax(-1)
        targets = torch.addcmul(rewards, discounts, ahead)
    values = network(obs).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    error = F.smooth_l1_loss if kind == "huber" else F.mse_loss
    loss = error(values, targets) if weights is None else (weights * error(values, targets, reduction="none")).mean()
    seen = values.detach()
    return loss, {"q_loss": loss.detach(), "q_value": seen.mean(), "td_errors": (seen - targets).abs()}


def twin_q_loss(
    critics: TwinQNetwork,
    obs: torch.Tensor,
    actions: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return half the sum of both critics' mean squared errors against `targets` (B,), weighted by `weights` (B,).

    Metrics as in `q_loss`, each the mean over both critics.
    """
    values = critics(obs, actions)
    errors = values - targets
    squares = errors.square() if weights is None else weights * errors.square()
    loss = squares.mean()
    td_errors = errors.detach().abs().mean(0)
    return loss, {"q_loss": loss.detach(), "q_value": values.detach().mean(), "td_errors": td_errors}


@torch.no_grad()
def smoothed_actions(
    target_policy: DeterministicPolicy, obs: torch.Tensor, noise: torch.Tensor, target_noise: float, noise_clip: float
) -> torch.Tensor:
    """Return the target policy's actions (B, A) with clipped noise (Fujimoto et al. 2018, arXiv:1802.09477, eq. 14);
    `noise` (B, A) is standard normal."""
    noise = (noise * target_noise).clamp_(-noise_clip, noise_clip)
    return (target_policy.unit_mode(obs) + noise).clamp_(-1.0, 1.0)


@torch.no_grad()
def smoothed_targets(
    target_policy: DeterministicPolicy,
    target: TwinQNetwork,
    batch: TransitionBatch,
    noise: torch.Tensor,
    target_noise: float,
    noise_clip: float,
) -> torch.Tensor:
    """Return ``r + discount * min(Q1', Q2')`` (B,) at the actions of `smoothed_actions`."""
    actions = smoothed_actions(target_policy, batch.next_obs, noise, target_noise, noise_clip)
    return torch.addcmul(batch.rewards, batch.discounts, target(batch.next_obs, actions).amin(0))


def soft_policy_loss(
    policy: SquashedGaussianPolicy,
    critics: CriticEnsemble,
    obs: torch.Tensor,
    noise: torch.Tensor,
    alpha: torch.Tensor,
    mean: bool = False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return ``alpha * log pi - min Q`` of actions sampled with `noise` (B, A) (Haarnoja et al. 2018, arXiv:1812.05905,
    eq. 9), or the `mean` of all critics' values in place of the minimum; metrics ``policy_loss`` and ``entropy`` in
    nats."""
    actions, log_probs = policy.unit_sample(obs, noise)
    values = critics.values(obs, actions)
    value = values.mean(0) if mean else torch.minimum(*values) if len(values) == 2 else values.amin(0)
    loss = (alpha * log_probs - value).mean()
    return loss, {"policy_loss": loss.detach(), "entropy": -log_probs.detach().mean()}


def deterministic_policy_loss(
    policy: DeterministicPolicy, critics: CriticEnsemble, obs: torch.Tensor, mean: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return ``-Q1`` of the policy's actions (Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1), or minus the `mean`
    of all critics' values; metric ``policy_loss``."""
    actions = policy.unit_mode(obs)
    loss = -(critics.values(obs, actions) if mean else critics.first(obs, actions)).mean()
    return loss, {"policy_loss": loss.detach()}


def cloning_loss(
    policy: DeterministicPolicy, obs: torch.Tensor, unit_actions: torch.Tensor, sequences: Sequences | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean squared distance of the policy's and the data's actions in [-1, 1]; metric ``policy_loss``.

    Up to a constant and a factor, this is the negative log-likelihood of a Gaussian around the policy's action. The
    rows are `sequences` if the policy has a memory.
    """
    actions = policy.unit_mode(obs) if sequences is None else policy.follow(obs, sequences)[0].tanh()
    loss = F.mse_loss(actions, unit_actions)
    return loss, {"policy_loss": loss.detach()}


def label_loss(
    policy: CategoricalPolicy,
    obs: torch.Tensor,
    actions: torch.Tensor,
    masks: torch.Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the policy's cross-entropy with the data's actions (B,) int64, in nats; metrics ``policy_loss`` and
    ``accuracy``.

    Probabilities are over the actions that `masks` (B, n_actions) bool allow; None allows all. The rows are `sequences`
    if the policy has a memory.
    """
    logits = policy(obs) if sequences is None else policy.follow(obs, sequences)[0]
    if masks is not None:
        logits = mask_outputs(logits, masks)
    loss = F.cross_entropy(logits, actions)
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == actions).float().mean()
    return loss, {"policy_loss": loss.detach(), "accuracy": accuracy}


def regularised_policy_loss(
    policy: DeterministicPolicy, critics: TwinQNetwork, obs: torch.Tensor, unit_actions: torch.Tensor, alpha: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return ``-lambda Q1(s, pi(s)) + |pi(s) - a|^2`` with ``lambda = alpha / mean |Q1|``, means over batch and
    components (Fujimoto and Gu 2021, arXiv:2106.06860, eq. 3 and 5); metrics ``policy_loss``, and the second term as
    ``bc_loss``."""
    actions = policy.unit_mode(obs)
    values = critics.first(obs, actions)
    distance = F.mse_loss(actions, unit_actions)
    loss = distance - alpha * values.mean() / values.detach().abs().mean()
    return loss, {"policy_loss": loss.detach(), "bc_loss": distance.detach()}


def expectile_loss(errors: torch.Tensor, expectile: float) -> torch.Tensor:
    """Return the mean of ``|expectile - 1(u < 0)| u^2`` over errors u = target - estimate (Newey and Powell 1987; as in
    Kostrikov et al. 2021, arXiv:2110.06169, eq. 4 and 5); the constant estimate that minimises it is the expectile."""
    return (torch.where(errors < 0, 1.0 - expectile, expectile) * errors.square()).mean()


def weighted_cloning_loss(
    policy: TanhMeanPolicy,
    obs: torch.Tensor,
    unit_actions: torch.Tensor,
    advantages: torch.Tensor,
    temperature: float,
    max_weight: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return ``-exp(temperature * A) log pi(a|s)`` with clipped weights (Kostrikov et al. 2021, arXiv:2110.06169,
    eq. 7); metric ``policy_loss``. `advantages` (B,) are constants."""
    weights = (temperature * advantages).exp_().clamp_(max=max_weight)
    loss = -(weights * policy.log_prob(obs, unit_actions)).mean()
    return loss, {"policy_loss": loss.detach()}


def conservative_penalty(values: torch.Tensor, log_ratios: torch.Tensor, data_values: torch.Tensor) -> torch.Tensor:
    """Return a soft maximum of the values over all actions minus the value of the data's action, averaged over critics
    and states (Kumar et al. 2020, arXiv:2006.04779, eq. 4, estimated by importance sampling as in appendix F).

    The soft maximum is ``log E exp Q(s, a)`` over actions a that are uniform on [-1, 1]^A, so the penalty is 0 if Q is
    the same for all actions. (Compared with the integral over actions in the paper's eq. 4, the constant A log 2 is
    missing, which does not change the gradient.)

    Parameters
    ----------
    values : Tensor (C, K, B)
        Values of C critics, for K actions in each of B states.
    log_ratios : Tensor (K, B)
        Logarithm of each action's sampling density divided by the uniform density.
    data_values : Tensor (C, B)
        Values of the data's actions.
    """
    soft_maxima = (values - log_ratios).logsumexp(1) - math.log(len(log_ratios))
    return (soft_maxima - data_values).mean()


def conservative_q_loss(
    values: torch.Tensor, targets: torch.Tensor, log_ratios: torch.Tensor, cql_alpha: torch.Tensor | float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the squared TD error plus `cql_alpha` times `conservative_penalty`, both means over the two critics.

    `values` (2, 1 + K, B) are those of the data's action, followed by those of the penalty's actions; `log_ratios`
    (K, B) as in `conservative_penalty`; `targets` (B,). The relative weight of the two terms is that of the paper's
    reference implementation; the paper's eq. 4 halves the TD error. Metrics as in `twin_q_loss`, with ``cql_penalty``.
    """
    data_values = values[:, 0]
    errors = data_values - targets
    td_loss = errors.square().mean()
    penalty = conservative_penalty(values[:, 1:], log_ratios, data_values)
    return td_loss + cql_alpha * penalty, {
        "q_loss": td_loss.detach(),
        "q_value": data_values.detach().mean(),
        "td_error": errors.detach().abs().mean(),
        "cql_penalty": penalty.detach(),
    }
