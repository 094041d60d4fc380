"""Losses of Q-networks that learn the distribution of returns, or explore by noise in their weights.

Letters: B transitions, A actions, N atoms per action, K random numbers of noisy layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rlox.envs.tensor.sums import expectations
from rlox.kernels.nn import quantiles as kernel
from rlox.nn.value_networks import ValueNetwork


def distributional_q_loss(
    network: ValueNetwork,
    target: ValueNetwork,
    obs: torch.Tensor,
    actions: torch.Tensor,
    rewards: torch.Tensor,
    next_obs: torch.Tensor,
    discounts: torch.Tensor,
    weights: torch.Tensor | None,
    noise: torch.Tensor | None,
    double: bool,
    kind: str,
    kappa: float,
    next_masks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of the taken actions' returns against ``r + discount * return of the next action``.

    Arguments as in `rlox.nn.value_losses.q_loss`, where the next action is the one with the best mean. The loss of a
    row is that of the networks' head: `quantile_losses` with `kappa`, the cross-entropy with `project_atoms`, or the
    error of `kind` of a value.

    Parameters
    ----------
    noise : Tensor (2 or 3, K), optional
        Standard normal numbers of noisy layers, each for the whole batch: of `network` in `obs`, of `target` and, with
        `double`, of `network` where it chooses (Fortunato et al. 2018, arXiv:1706.10295, equation 16).

    Returns
    -------
    loss : Tensor ()
    metrics : dict
        ``q_loss`` and ``q_value`` (); ``td_errors`` (B,), between the means, absolute; and ``priorities`` (B,): without
        a distribution the TD errors, with quantiles the losses, and for categories their relative entropies, in nats
        (Hessel et al. 2018, arXiv:1710.02298).
    """
    online, frozen, *choosing = (None, None, None) if noise is None else noise.unbind(0)
    head, atoms = network.head, network.atoms
    with torch.no_grad():
        next_outputs = target.outputs(next_obs, frozen)
        scores = network(next_obs, *choosing) if double else target.means(next_outputs)
        # Where no action is legal, at the end of a game, some action is taken, with discount 0.
        legal = scores if next_masks is None else scores.masked_fill(~next_masks, -torch.inf)
        ahead = _take(next_outputs, legal.argmax(-1))
        if head.kind == "categorical":
            targets = project_atoms(ahead.softmax(-1), rewards, discounts, atoms)
            goals = expectations(targets, atoms)
        else:
            targets = torch.addcmul(rewards.unsqueeze(-1), discounts.unsqueeze(-1), ahead)
            goals = targets.mean(-1)
    outputs = _take(network.outputs(obs, online), actions)
    seen = network.means(outputs.detach())
    td_errors = (seen - goals).abs()
    if head.kind == "categorical":
        losses = -(targets * outputs.log_softmax(-1)).sum(-1)
        priorities = (losses.detach() + torch.xlogy(targets, targets).sum(-1)).clamp(min=0.0)
    elif head.kind == "quantile":
        losses = quantile_losses(outputs, targets, kappa)
        priorities = losses.detach()
    else:
        error = F.smooth_l1_loss if kind == "huber" else F.mse_loss
        losses, priorities = error(outputs, targets, reduction="none").squeeze(-1), td_errors
    loss = (losses if weights is None else weights * losses).mean()
    return loss, {"q_loss": loss.detach(), "q_value": seen.mean(), "td_errors": td_errors, "priorities": priorities}


def _take(outputs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return the atoms (B, N) of `actions` (B,) among those of all actions (B, A, N)."""
    return outputs.gather(1, actions.view(-1, 1, 1).expand(-1, 1, outputs.shape[-1])).squeeze(1)


def quantile_losses(quantiles: torch.Tensor, targets: torch.Tensor, kappa: float) -> torch.Tensor:
    """Return the same as `pairwise_quantile_losses`, on the CPU in float32 by a kernel.

    CPU milliseconds of the loss and its gradient for B x N x N, on one thread of an Intel Xeon with AVX-512: 0.3 and 11
    in PyTorch for 32 x 200 x 200, 1.0 and 35 for 128 x 170 x 170.
    """
    on_cpu = all(one.device.type == "cpu" and one.dtype == torch.float32 for one in (quantiles, targets))
    if torch.compiler.is_compiling() or not on_cpu:
        return pairwise_quantile_losses(quantiles, targets, kappa)
    return _QuantileLosses.apply(quantiles, targets, kappa)


class _QuantileLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, quantiles, targets, kappa):
        arrays = quantiles.detach().contiguous().numpy(), targets.detach().contiguous().numpy()
        losses, gradients = kernel.quantile_losses(*arrays, kappa)
        ctx.save_for_backward(torch.from_numpy(gradients))
        return torch.from_numpy(losses)

    @staticmethod
    def backward(ctx, d_losses):
        (gradients,) = ctx.saved_tensors
        return d_losses.unsqueeze(-1) * gradients, None, None


def pairwise_quantile_losses(quantiles: torch.Tensor, targets: torch.Tensor, kappa: float) -> torch.Tensor:
    """Return the Huber quantile losses (B,) of quantiles (B, N) against samples (B, M) of a distribution.

    Of quantile i at the fraction ``tau_i = (i + 1/2) / N`` and a sample, with u = sample - quantile, it is
    ``|tau_i - 1(u < 0)| L(u) / kappa``, where L is quadratic up to `kappa` and then linear: the mean over samples, and
    the sum over quantiles (Dabney et al. 2018, arXiv:1710.10044, equation 10 and algorithm 1; divided by kappa as in
    arXiv:1806.06923).
    """
    n = quantiles.shape[-1]
    precise = torch.promote_types(quantiles.dtype, torch.float32)  # bfloat16 would round most fractions
    fractions = (torch.arange(n, dtype=precise, device=quantiles.device) + 0.5) / n
    errors = targets.unsqueeze(-2) - quantiles.unsqueeze(-1)  # (B, N, M)
    huber = F.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=kappa) / kappa
    below = (errors.detach() < 0).to(errors.dtype)
    return ((fractions.unsqueeze(-1) - below).abs() * huber).mean(-1).sum(-1)


def project_atoms(
    probabilities: torch.Tensor, rewards: torch.Tensor, discounts: torch.Tensor, atoms: torch.Tensor
) -> torch.Tensor:
    """Return the distributions (B, N) on `atoms` (N,) of ``r + discount * Z``, where Z has `probabilities` (B, N).

    A value between two atoms is divided between them in proportion to its distances, and one beyond the ends counts as
    the nearest end (Bellemare et al. 2017, arXiv:1707.06887, equation 7).
    """
    low, high, n = atoms[0], atoms[-1], len(atoms)
    values = torch.addcmul(rewards.unsqueeze(-1), discounts.unsqueeze(-1), atoms).clamp(low, high)
    places = ((values - low) * ((n - 1) / (high - low))).clamp(max=n - 1)  # beyond it, probabilities are negative
    return (share_by_scatter if places.device.type == "cpu" else share_by_pairs)(places, probabilities)


def share_by_scatter(places: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Return the sums (B, N) of `probabilities` (B, N) divided between the two atoms next to their `places` (B, N)."""
    lower = places.floor().clamp(max=places.shape[-1] - 2)
    upper_parts, index = probabilities * (places - lower), lower.long().clamp(min=0)  # NaN has no index
    out = torch.zeros_like(probabilities).scatter_add_(1, index, probabilities - upper_parts)
    return out.scatter_add_(1, index + 1, upper_parts)


def share_by_pairs(places: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Return the same as `share_by_scatter` by a sum over all pairs: a GPU adds up in any order what it scatters."""
    grid = torch.arange(places.shape[-1], dtype=places.dtype, device=places.device)
    shares = (1.0 - (places.unsqueeze(1) - grid.unsqueeze(-1)).abs()).clamp(min=0.0)  # (B, to, from)
    return expectations(shares, probabilities)
