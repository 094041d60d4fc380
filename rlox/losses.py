"""Losses: pure functions of tensors, each with its paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from rlox.policies import policy_outputs

if TYPE_CHECKING:
    from rlox.networks import TwinQNetwork
    from rlox.policies import DeterministicPolicy, SquashedGaussianPolicy


def ppo_clip(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, clip_eps: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate, negated so that it is minimised (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    Parameters
    ----------
    log_probs, old_log_probs, advantages : Tensor (B,)
        Log-probability of each action under the policy now and when it was sampled (nats), and its advantage.
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
    """The policy-gradient surrogate ``-mean(log_prob * advantage)`` (Mnih et al. 2016, arXiv:1602.01783, sec. 4).

    Both (B,); the advantages are constants.
    """
    return -(log_probs * advantages.detach()).mean()


def normalized(advantages: torch.Tensor) -> torch.Tensor:
    """`advantages` (B,) with zero mean and unit variance; a single one stays as it is, having no variance."""
    if len(advantages) < 2:
        return advantages
    std, mean = torch.std_mean(advantages)
    return (advantages - mean) / (std + 1e-8)


def value_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    old_values: torch.Tensor,
    clip_vf: float | None = None,
) -> torch.Tensor:
    """Mean squared error of the values, without the factor 1/2 that some write; all arguments (B,).

    With `clip_vf` the values move at most that far from `old_values` (PPO2 in OpenAI Baselines; see
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details, detail 9). It depends on the scale of
    returns.
    """
    if clip_vf is not None:
        values = old_values + (values - old_values).clamp(-clip_vf, clip_vf)
    return (values - returns).square().mean()


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
    """``policy_loss + vf_coef * value_loss - ent_coef * entropy`` of B transitions, and these three, detached."""
    log_probs, entropy, values = policy_outputs(policy, obs, actions)
    p_loss, v_loss = policy_gradient(log_probs, advantages), value_loss(values, returns, old_values)
    mean_entropy = entropy.mean()
    metrics = {"policy_loss": p_loss, "value_loss": v_loss, "entropy": mean_entropy}
    loss = p_loss + vf_coef * v_loss - ent_coef * mean_entropy
    return loss, {name: value.detach() for name, value in metrics.items()}


class PPOLoss:
    """PPO's whole loss: ``policy_loss + vf_coef * value_loss - ent_coef * entropy``.

    Parameters
    ----------
    clip_eps : float
        Clip range of the probability ratio.
    vf_coef, ent_coef : float
        Weights of the value loss (`value_loss`, no factor 1/2) and of the entropy bonus.
    clip_vf : float, optional
        Clip range of value changes; None: off.
    """

    def __init__(
        self,
        clip_eps: float = 0.2,
        vf_coef: float = 0.5,
        ent_coef: float = 0.01,
        clip_vf: float | None = None,
    ):
        self.clip_eps = clip_eps
        self.vf_coef = vf_coef
        self.ent_coef = ent_coef
        self.clip_vf = clip_vf

    def __call__(
        self,
        policy: nn.Module,
        obs: torch.Tensor,
        actions: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        returns: torch.Tensor,
        old_values: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of a minibatch of B transitions.

        Returns
        -------
        loss : Tensor ()
            To be differentiated.
        metrics : dict of Tensor ()
            ``policy_loss value_loss entropy approx_kl clip_fraction``, detached; a number only where one is asked for.
        """
        log_probs, entropy, values = policy_outputs(policy, obs, actions)
        policy_loss, metrics = ppo_clip(log_probs, old_log_probs, advantages, self.clip_eps)
        v_loss = value_loss(values, returns, old_values, self.clip_vf)
        mean_entropy = entropy.mean()
        loss = policy_loss + self.vf_coef * v_loss - self.ent_coef * mean_entropy
        return loss, {
            "policy_loss": policy_loss.detach(),
            "value_loss": v_loss.detach(),
            "entropy": mean_entropy.detach(),
            **metrics,
        }


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
    """Error of the values of the actions taken against ``r + discount * value ahead``.

    Mnih et al. 2015, doi:10.1038/nature14236. `network` and `target` return the values of all actions (B, n_actions),
    `actions` (B,) are int64, `weights` (B,) importance weights or None, `kind` is ``huber`` or ``mse``. `double` is
    double Q-learning (van Hasselt et al. 2016, arXiv:1509.06461): who chooses does not value.

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
    """Half the sum of both critics' mean squared errors against `targets` (B,), each transition by its weight.

    Metrics as of `q_loss`, each the mean of both critics.
    """
    values = critics(obs, actions)
    errors = values - targets
    squares = errors.square() if weights is None else weights * errors.square()
    loss = squares.mean()
    td_errors = errors.detach().abs().mean(0)
    return loss, {"q_loss": loss.detach(), "q_value": values.detach().mean(), "td_errors": td_errors}


def soft_policy_loss(
    policy: SquashedGaussianPolicy, critics: TwinQNetwork, obs: torch.Tensor, noise: torch.Tensor, alpha: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """``alpha * log pi - min(Q1, Q2)`` of actions sampled by `noise` (B, A) (Haarnoja et al. 2018, arXiv:1812.05905,
    eq. 9); ``policy_loss`` and the ``entropy`` in nats."""
    actions, log_probs = policy.unit_sample(obs, noise)
    loss = (alpha * log_probs - torch.minimum(*critics(obs, actions))).mean()
    return loss, {"policy_loss": loss.detach(), "entropy": -log_probs.detach().mean()}


def deterministic_policy_loss(
    policy: DeterministicPolicy, critics: TwinQNetwork, obs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """``-Q1`` of the policy's actions (Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1); ``policy_loss``."""
    loss = -critics.first(obs, policy.unit_mode(obs)).mean()
    return loss, {"policy_loss": loss.detach()}
