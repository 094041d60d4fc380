"""Losses of on-policy algorithms: pure functions of tensors, each with its paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from rlox.nn.memory import Sequences
from rlox.nn.policies import policy_outputs


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
    masks: torch.Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return ``policy_loss + vf_coef * value_loss - ent_coef * entropy`` of B transitions, and its terms, detached.

    `masks` and `sequences` as in `rlox.nn.policies.policy_outputs`.
    """
    log_probs, entropy, values = policy_outputs(policy, obs, actions, None, masks, sequences)
    p_loss, v_loss = policy_gradient(log_probs, advantages), value_loss(values, returns, old_values)
    return actor_critic_loss(p_loss, v_loss, entropy, vf_coef, ent_coef)


@dataclass(eq=False)
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

    clip_eps: float = 0.2
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    clip_vf: float | None = None
    maximum: bool = False
    huber_delta: float | None = None

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
        sequences: Sequences | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a minibatch of B transitions; `returns` and `old_values` are in the critic's units.

        `states` (B, S) are the inputs of a critic that does not read `obs`, and `masks` (B, n_actions) bool the legal
        actions, as when the actions were sampled; None: all are legal. `sequences` are those of a policy with a memory.

        Returns
        -------
        loss : Tensor ()
            Differentiable.
        metrics : dict of Tensor ()
            ``policy_loss value_loss entropy approx_kl clip_fraction``, detached; they are not converted to numbers.
        """
        log_probs, entropy, values = policy_outputs(policy, obs, actions, states, masks, sequences)
        policy_loss, metrics = ppo_clip(log_probs, old_log_probs, advantages, self.clip_eps)
        v_loss = value_loss(values, returns, old_values, self.clip_vf, self.maximum, self.huber_delta)
        loss, terms = actor_critic_loss(policy_loss, v_loss, entropy, self.vf_coef, self.ent_coef)
        return loss, {**terms, **metrics}
