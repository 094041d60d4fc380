"""Losses: pure functions of tensors, each with its paper."""

from __future__ import annotations

import torch
from torch import nn

from rlox.policies import policy_outputs


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
