"""Losses: pure functions of tensors, each with its paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from rlox.nn.policies import policy_outputs

if TYPE_CHECKING:
    from rlox.nn.batch import TransitionBatch
    from rlox.nn.networks import TwinQNetwork
    from rlox.nn.policies import CategoricalPolicy, DeterministicPolicy, SquashedGaussianPolicy, TanhMeanPolicy


def ppo_clip(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, clip_eps: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the clipped surrogate, negated for minimisation (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    Parameters
    ----------
    log_probs, old_log_probs, advantages : Tensor (B,)
        Log-probability of each action under the current policy and when it was sampled (nats), and its advantage.
    clip_eps : float
        The ratio is clipped to [1 - clip_eps, 1 + clip_eps].

    Returns
    -------
    loss : Tensor ()
    metrics : dict
        ``approx_kl``, the k3 estimate of KL(old || new) (http://joschu.net/blog/kl-approx.html), and ``clip_fraction``.
    """
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_eps, 1.0 + clip_eps)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    with torch.no_grad():
        approx_kl = (ratio - 1.0 - log_ratio).mean()
        clip_fraction = (ratio != clipped).float().mean()
    return loss, {"approx_kl": approx_kl, "clip_fraction": clip_fraction}


def policy_gradient(log_probs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return the surrogate ``-mean(log_prob * advantage)`` (Mnih et al. 2016, arXiv:1602.01783, sec. 4).

    Both arguments are (B,); the advantages are constants.
    """
    return -(log_probs * advantages.detach()).mean()


def normalized(advantages: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
    """Return `advantages` (B,) with zero mean and unit variance; a single one is unchanged, as it has no variance.

    `total` sums over the ranks of a data-parallel training: mean and variance are then taken over all ranks together.
    """
    if total is not None:
        wide = advantages.double()
        count, summed = total(torch.stack([torch.full_like(wide[:1], len(wide)).sum(), wide.sum()]))
        apart = wide - summed / count
        variance = total(apart.square().sum()) / (count - 1).clamp(min=1)
        return (apart / (variance.sqrt() + 1e-8)).to(advantages.dtype)
    if len(advantages) < 2:
        return advantages
    std, mean = torch.std_mean(advantages)
    return (advantages - mean) / (std + 1e-8)


def value_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    old_values: torch.Tensor,
    clip_vf: float | None = None,
    maximum: bool = False,
    huber_delta: float | None = None,
) -> torch.Tensor:
    """Return the mean squared error of the values, without the factor 1/2 of some other codes; all tensors are (B,).

    With `clip_vf` the values move at most that far from `old_values`, and only the clipped values enter the loss, as in
    Stable-Baselines3: a value that has moved further has no gradient, in either direction. With `maximum`, the larger
    of this loss and the unclipped one counts in each row, as in OpenAI Baselines' PPO2 (detail 9 of
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details) and in the code of Yu et al. 2022
    (arXiv:2103.01955). A suitable `clip_vf` depends on the scale of returns.

    With `huber_delta` errors have the Huber loss, which is e^2 / 2 up to that error, instead of e^2.
    """

    def errors(estimates: torch.Tensor) -> torch.Tensor:
        if huber_delta is None:
            return (estimates - returns).square()
        return F.huber_loss(estimates, returns, reduction="none", delta=huber_delta)

    if clip_vf is None:
        return errors(values).mean()
    clipped = errors(old_values + (values - old_values).clamp(-clip_vf, clip_vf))
    return (torch.maximum(errors(values), clipped) if maximum else clipped).mean()


def actor_critic_loss(
    p_loss: torch.Tensor, v_loss: torch.Tensor, entropy: torch.Tensor, vf_coef: float, ent_coef: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return ``p_loss + vf_coef * v_loss - ent_coef * mean(entropy)`` of two losses () and entropies (B,) in nats.

    Also returns its terms ``policy_loss value_loss entropy``, detached.
    """
    mean_entropy = entropy.mean()
    terms = {"policy_loss": p_loss, "value_loss": v_loss, "entropy": mean_entropy}
    loss = p_loss + vf_coef * v_loss - ent_coef * mean_entropy
    return loss, {name: term.detach() for name, term in terms.items()}


def a2c_loss(
    policy: nn.Module,
    obs: torch.Tensor,
    actions: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    old_values: torch.Tensor,
    vf_coef: float,
    ent_coef: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return ``policy_loss + vf_coef * value_loss - ent_coef * entropy`` of B transitions, and its terms, detached."""
    log_probs, entropy, values = policy_outputs(policy, obs, actions)
    p_loss, v_loss = policy_gradient(log_probs, advantages), value_loss(values, returns, old_values)
    return actor_critic_loss(p_loss, v_loss, entropy, vf_coef, ent_coef)


class PPOLoss:
    """PPO's whole loss: ``policy_loss + vf_coef * value_loss - ent_coef * entropy``.

    Parameters
    ----------
    clip_eps : float
        Clip range of the probability ratio.
    vf_coef, ent_coef : float
        Weights of the value loss (`value_loss`, no factor 1/2) and of the entropy bonus.
    clip_vf : float, optional
        Clip range of value changes, as in Stable-Baselines3 (see `value_loss`); None: off.
    maximum, huber_delta
        As in `value_loss`.
    """

    def __init__(
        self,
        clip_eps: float = 0.2,
        vf_coef: float = 0.5,
        ent_coef: float = 0.01,
        clip_vf: float | None = None,
        maximum: bool = False,
        huber_delta: float | None = None,
    ):
        self.clip_eps = clip_eps
        self.vf_coef = vf_coef
        self.ent_coef = ent_coef
        self.clip_vf = clip_vf
        self.maximum = maximum
        self.huber_delta = huber_delta

    def __call__(
        self,
        policy: nn.Module,
        obs: torch.Tensor,
        actions: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        returns: torch.Tensor,
        old_values: torch.Tensor,
        states: torch.Tensor | None = None,
        masks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a minibatch of B transitions; `returns` and `old_values` are in the critic's units.

        `states` (B, S) are the inputs of a critic that does not read `obs`, and `masks` (B, n_actions) bool the legal
        actions, as when the actions were sampled; None: all are legal.

        Returns
        -------
        loss : Tensor ()
            Differentiable.
        metrics : dict of Tensor ()
            ``policy_loss value_loss entropy approx_kl clip_fraction``, detached; they are not converted to numbers.
        """
        log_probs, entropy, values = policy_outputs(policy, obs, actions, states, masks)
        policy_loss, metrics = ppo_clip(log_probs, old_log_probs, advantages, self.clip_eps)
        v_loss = value_loss(values, returns, old_values, self.clip_vf, self.maximum, self.huber_delta)
        loss, terms = actor_critic_loss(policy_loss, v_loss, entropy, self.vf_coef, self.ent_coef)
        return loss, {**terms, **metrics}


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
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the error of the taken actions' values against ``r + discount * next value``.

    Mnih et al. 2015, doi:10.1038/nature14236. `network` and `target` return the values of all actions (B, n_actions),
    `actions` (B,) are int64, `weights` (B,) importance weights or None, `kind` is ``huber`` or ``mse``. `double` is
    double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461): `network` chooses the next action and `target`
    evaluates it.

    Returns
    -------
    loss : Tensor ()
    metrics : dict
        ``q_loss`` and ``q_value`` (), and ``td_errors`` (B,), absolute.
    """
    with torch.no_grad():
        next_values = target(next_obs)
        if double:
            best = network(next_obs).argmax(-1, keepdim=True)
            ahead = next_values.gather(-1, best).squeeze(-1)
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
def smoothed_targets(
    target_policy: DeterministicPolicy,
    target: TwinQNetwork,
    batch: TransitionBatch,
    noise: torch.Tensor,
    target_noise: float,
    noise_clip: float,
) -> torch.Tensor:
    """Return ``r + discount * min(Q1', Q2')`` (B,) at the target policy's smoothed action (Fujimoto et al. 2018,
    arXiv:1802.09477, eq. 14); `noise` (B, A) is standard normal."""
    noise = (noise * target_noise).clamp_(-noise_clip, noise_clip)
    actions = (target_policy.unit_mode(batch.next_obs) + noise).clamp_(-1.0, 1.0)
    return torch.addcmul(batch.rewards, batch.discounts, target(batch.next_obs, actions).amin(0))


def soft_policy_loss(
    policy: SquashedGaussianPolicy, critics: TwinQNetwork, obs: torch.Tensor, noise: torch.Tensor, alpha: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return ``alpha * log pi - min(Q1, Q2)`` of actions sampled with `noise` (B, A) (Haarnoja et al. 2018,
    arXiv:1812.05905, eq. 9); metrics ``policy_loss`` and ``entropy`` in nats."""
    actions, log_probs = policy.unit_sample(obs, noise)
    loss = (alpha * log_probs - torch.minimum(*critics(obs, actions))).mean()
    return loss, {"policy_loss": loss.detach(), "entropy": -log_probs.detach().mean()}


def deterministic_policy_loss(
    policy: DeterministicPolicy, critics: TwinQNetwork, obs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return ``-Q1`` of the policy's actions (Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1); metric
    ``policy_loss``."""
    loss = -critics.first(obs, policy.unit_mode(obs)).mean()
    return loss, {"policy_loss": loss.detach()}


def cloning_loss(
    policy: DeterministicPolicy, obs: torch.Tensor, unit_actions: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean squared distance of the policy's and the data's actions in [-1, 1]; metric ``policy_loss``.

    Up to a constant and a factor, this is the negative log-likelihood of a Gaussian around the policy's action.
    """
    loss = F.mse_loss(policy.unit_mode(obs), unit_actions)
    return loss, {"policy_loss": loss.detach()}


def label_loss(
    policy: CategoricalPolicy, obs: torch.Tensor, actions: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the policy's cross-entropy with the data's actions (B,) int64, in nats; metrics ``policy_loss`` and
    ``accuracy``."""
    logits = policy(obs)
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
