"""What critics predict of the return, and their errors: a mean, probabilities of bins, or quantiles.

Letters: N critics, B rows, K outputs of a critic.
"""

from __future__ import annotations

import torch
from torch import nn

from rlox.envs.tensor.sums import expectations
from rlox.nn.value_distributions import project_atoms, quantile_losses

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


class Head(nn.Module):
    """What the outputs of critics are; it has no parameters.

    Attributes
    ----------
    n_outputs : int
        Outputs K of a critic.
    """

    n_outputs: int

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the expected returns (N, B)."""
        raise NotImplementedError

    def targets(
        self,
        outputs: torch.Tensor,
        rewards: torch.Tensor,
        discounts: torch.Tensor,
        penalties: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what critics are to predict, from the outputs at the next state and action.

        The return is ``reward + discount * (return from there - penalty)``, all (B,); a penalty is the temperature
        times the log-density of the next action, None without one.
        """
        raise NotImplementedError

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Loss:
        """Return the mean error over critics and rows, weighted by `weights` (B,).

        Returns
        -------
        loss : Tensor ()
        metrics : dict
            ``q_loss`` and ``q_value`` (), and ``td_errors`` (B,), absolute, of expected returns: means over critics.
        """
        raise NotImplementedError


class MeanHead(Head):
    """The expected return, and the minimum over critics as its target (Fujimoto et al. 2018, arXiv:1802.09477)."""

    n_outputs = 1

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    def targets(self, outputs, rewards, discounts, penalties):
        ahead = outputs.amin(0)
        return torch.addcmul(rewards, discounts, ahead if penalties is None else ahead - penalties)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Loss:
        errors = outputs - targets
        loss = (errors.square() if weights is None else weights * errors.square()).mean()
        td_errors = errors.detach().abs().mean(0)
        return loss, {"q_loss": loss.detach(), "q_value": outputs.detach().mean(), "td_errors": td_errors}


class CategoricalHead(Head):
    """Probabilities of evenly spaced returns (Bellemare et al. 2017, arXiv:1707.06887), the logits of which are learned
    by cross-entropy.

    The target is the distribution of the critic with the smallest expected return, shifted and projected onto the bins.

    Parameters
    ----------
    n_bins : int
        Bins K.
    low, high : float
        Returns of the first and the last bin; returns outside count as these.
    """

    bins: torch.Tensor

    def __init__(self, n_bins: int, low: float, high: float):
        super().__init__()
        self.n_outputs, self.low, self.high = n_bins, low, high
        self.register_buffer("bins", torch.linspace(low, high, n_bins, device="cpu"), persistent=False)

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        return expectations(outputs.softmax(-1), self.bins)

    def targets(self, outputs, rewards, discounts, penalties):
        probs = outputs.softmax(-1)
        least = expectations(probs, self.bins).argmin(0)  # (B,)
        probs = probs.gather(0, least.view(1, -1, 1).expand(1, -1, self.n_outputs)).squeeze(0)
        if penalties is not None:
            rewards = rewards - discounts * penalties
        return project_atoms(probs, rewards, discounts, self.bins)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Loss:
        logs = outputs.log_softmax(-1)
        errors = -(logs * targets).sum(-1)
        loss = (errors if weights is None else weights * errors).mean()
        with torch.no_grad():
            values = expectations(logs.exp(), self.bins)
            td_errors = (values - expectations(targets, self.bins)).abs().mean(0)
        return loss, {"q_loss": loss.detach(), "q_value": values.mean(), "td_errors": td_errors}


class QuantileHead(Head):
    """Quantiles of the return at the levels (i + 1/2) / K, learned by quantile regression with a Huber loss (Dabney et
    al. 2018, arXiv:1710.10044, eq. 10), from targets without the largest quantiles (Kuznetsov et al. 2020,
    arXiv:2005.04269).

    Parameters
    ----------
    n_quantiles : int
        Quantiles K.
    n_dropped : int
        So many of the largest quantiles are dropped from the targets for each critic, of those of all critics together.
    """

    def __init__(self, n_quantiles: int, n_dropped: int):
        super().__init__()
        self.n_outputs, self.n_dropped = n_quantiles, n_dropped

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.mean(-1)

    def targets(self, outputs, rewards, discounts, penalties):
        pool = outputs.transpose(0, 1).flatten(1).sort(-1).values
        ahead = pool[:, : pool.shape[1] - self.n_dropped * len(outputs)]
        if penalties is not None:
            ahead = ahead - penalties.unsqueeze(-1)
        return torch.addcmul(rewards.unsqueeze(-1), discounts.unsqueeze(-1), ahead)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Loss:
        n, k = len(outputs), self.n_outputs
        samples = targets.expand(n, -1, -1).reshape(-1, targets.shape[-1])
        rows = quantile_losses(outputs.reshape(-1, k), samples, 1.0).view(n, -1) / k
        loss = (rows if weights is None else weights * rows).mean()
        values = outputs.detach().mean(-1)
        td_errors = (values - targets.mean(-1)).abs().mean(0)
        return loss, {"q_loss": loss.detach(), "q_value": values.mean(), "td_errors": td_errors}
