"""The loss of a recurrent Q-network on replayed sequences (R2D2, Kapturowski et al. 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rlox.nn.memory import Sequences

if TYPE_CHECKING:
    from rlox.nn.actors import QPolicy
    from rlox.nn.batch import SequenceBatch


def sequence_q_loss(
    network: QPolicy,
    target: QPolicy,
    batch: SequenceBatch,
    gamma: float,
    n_step: int,
    burn_in: int,
    double: bool,
    kind: str,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the error of the taken actions' values against n-step returns, a mean over the steps of B sequences.

    Both networks read the T rows of a sequence from its stored state on. The first `burn_in` rows only bring that
    state, which older weights computed, up to date, without a gradient. Every later row with an action is learned from
    if the sequence also contains the row after it, whose observation is the one that the action led to, in the same
    episode. A return has fewer than `n_step` rewards where the episode or the sequence ends before; without a
    termination it bootstraps from the last observation there, also at a time limit.

    `double` and `kind` are those of `rlox.nn.value_losses.q_loss`, and so are the metrics. If the batch has masks, the
    next action is a legal one.
    """
    # Time-major from here on, (T, B, …), because a memory runs through all sequences step by step.
    obs, is_first, rewards = batch.obs.transpose(0, 1), batch.is_first.T, batch.rewards.T
    masks = None if batch.masks is None else batch.masks.transpose(0, 1)
    before = after = batch.state
    with torch.no_grad():
        if burn_in:
            warm = obs[:burn_in].flatten(0, 1), is_first[:burn_in].flatten()
            before = network.follow(warm[0], Sequences(batch.state, warm[1]))[1]
            after = target.follow(warm[0], Sequences(batch.state, warm[1]))[1]
        learned = obs[burn_in:].flatten(0, 1), is_first[burn_in:].flatten()
        steps = (-1, len(batch))
        next_values = target.follow(learned[0], Sequences(after, learned[1]))[0].unflatten(0, steps)
    values = network.follow(learned[0], Sequences(before, learned[1]))[0].unflatten(0, steps)
    with torch.no_grad():
        chosen_by = values if double else next_values
        if masks is not None:
            chosen_by = chosen_by.masked_fill(~masks[burn_in:], -torch.inf)
        bootstraps = next_values.gather(-1, chosen_by.argmax(-1, keepdim=True)).squeeze(-1)
        # The rows after those that are learned from have their rewards, and say whether they end the episode.
        follows = ~is_first[burn_in + 1 :]
        live = gamma * (~batch.terminated.T[burn_in + 1 :]).to(rewards.dtype)
        ahead = bootstraps
        for _ in range(n_step):
            # From the second time on, an inner row continues its own return, one reward shorter.
            returns = torch.addcmul(rewards[burn_in + 1 :], live, ahead[1:])
            ahead = torch.cat([torch.where(follows, returns, bootstraps[:-1]), bootstraps[-1:]])
    actions = batch.actions.transpose(0, 1)[burn_in:-1].argmax(-1, keepdim=True)
    taken = values[:-1].gather(-1, actions).squeeze(-1)
    error = F.smooth_l1_loss if kind == "huber" else F.mse_loss
    weights = follows.to(taken.dtype) / follows.sum().clamp(min=1)
    loss = (weights * error(taken, returns, reduction="none")).sum()
    seen = taken.detach()
    return loss, {
        "q_loss": loss.detach(),
        "q_value": (weights * seen).sum(),
        "td_error": (weights * (seen - returns).abs()).sum(),
    }
