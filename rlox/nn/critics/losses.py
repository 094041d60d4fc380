"""The loss of an ensemble of critics, whatever they predict of the return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rlox.nn.critics.ensemble import CriticEnsemble
    from rlox.nn.critics.heads import Loss


def critic_loss(
    critics: CriticEnsemble,
    target: CriticEnsemble,
    obs: torch.Tensor,
    actions: torch.Tensor,
    rewards: torch.Tensor,
    next_obs: torch.Tensor,
    next_actions: torch.Tensor,
    discounts: torch.Tensor,
    weights: torch.Tensor | None,
    penalties: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    renormalize: bool = False,
) -> Loss:
    """Return the loss of `critics`, whose targets are computed by `target`, which may be `critics` itself.

    Critics with batch statistics see the actions taken and the next actions in one batch, because these are not
    distributed alike (Bhatt et al. 2024, arXiv:1902.05605, section 3.2); a target network then does so, too.

    Parameters
    ----------
    critics, target : CriticEnsemble
        N critics each.
    obs, rewards, next_obs, discounts, weights
        Columns of a batch of B transitions; the last may be None.
    actions, next_actions : Tensor (B, A)
        In [-1, 1].
    penalties : Tensor (B,) or None
        See `Head.targets`.
    chosen : Tensor (M,) int64, optional
        The critics that the targets are computed with (Chen et al. 2021, arXiv:2101.05982); None: all.
    renormalize : bool
        Whether batch normalisation is renormalised.
    """
    if critics.uses_batch:
        pairs = (obs, actions, next_obs, next_actions)
        outputs, ahead = critics.joint(*pairs, renormalize)
        with torch.no_grad():
            ahead = ahead if target is critics else target.joint(*pairs, renormalize, learn=False)[1]
            ahead = ahead if chosen is None else ahead[chosen]
            targets = critics.head.targets(ahead, rewards, discounts, penalties)
    else:
        with torch.no_grad():
            targets = critics.head.targets(target(next_obs, next_actions, chosen), rewards, discounts, penalties)
        outputs = critics(obs, actions)
    return critics.head.loss(outputs, targets, weights)
