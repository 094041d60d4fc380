"""Losses over tokens and over pairs of completions, as pure functions, each with its paper.

Flat arrays (N,) contain one number for each scored token, sequence after sequence; `owner` (N,) contains the index of
each token's sequence among the B sequences.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F


def sequence_sums(values: torch.Tensor, owner: torch.Tensor, n: int) -> torch.Tensor:
    """Sum `values` (N,) over each sequence, (n,); the sum is 0 for a sequence without tokens."""
    return torch.zeros(n, dtype=values.dtype, device=values.device).index_add(0, owner, values)


# Added to the standard deviation that advantages are divided by, as in TRL.
_DEVIATION = 1e-4


def equal_rewards(groups: np.ndarray) -> np.ndarray:
    """Return which groups of rewards (G, K) are equal up to the rounding of float32, (G,) bool.

    These are the groups for which `rlox.compute_batch_group_advantages` returns zeros: their population standard
    deviation is below 1e-8, or at most 2^-21 of their mean's magnitude.
    """
    deviations = groups.std(1)
    return (deviations < 1e-8) | (deviations <= 2.0**-21 * np.abs(groups.mean(1)))


def group_advantages(rewards: np.ndarray, group_size: int, scale: str, baseline: str) -> np.ndarray:
    """Compute advantages f64 from rewards (G * K,), where the K completions of each prompt are adjacent.

    Advantages of a group are 0 if its rewards are equal up to the rounding of float32 (`equal_rewards`).

    Parameters
    ----------
    scale : str
        ``group``: divide by the population standard deviation of the group plus 1e-4 (GRPO, Shao et al. 2024,
        arXiv:2402.03300, section 4.1.2; the addend, which TRL has too, keeps the advantages of rewards small that
        differ by less, such as those of a saturated reward model). ``batch``: divide by the standard deviation of the
        whole batch plus 1e-4. ``none``: do not scale (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
    baseline : str
        What is subtracted: ``mean``, the mean of the group, or ``leave_one_out``, the mean of the group's other
        rewards (RLOO, Ahmadian et al. 2024, arXiv:2402.14740).
    """
    groups = np.asarray(rewards, np.float64).reshape(-1, group_size)
    # Relative to the group's first reward, so that equal rewards differ by exactly 0.
    apart = groups - groups[:, :1]
    advantages = np.where(equal_rewards(groups)[:, None], 0.0, apart - apart.mean(1, keepdims=True))
    if scale != "none":
        deviations = groups.std(1, keepdims=True) if scale == "group" else groups.std()
        advantages /= deviations + _DEVIATION
    advantages = advantages.reshape(-1)
    return advantages if baseline == "mean" else advantages * (group_size / (group_size - 1))


def token_weights(loss_type: str, owner: torch.Tensor, n_sequences: int, max_new_tokens: int) -> torch.Tensor:
    """Return the weight of each token's loss in the batch's loss, f32 (N,): every kind of mean is a weighted sum.

    ``grpo``: the mean over sequences of the mean over a sequence's tokens (arXiv:2402.03300, eq. 3). ``dapo`` and
    ``bnpo``: the mean over all tokens (Yu et al. 2025, arXiv:2503.14476, eq. 8; for ``bnpo`` over the tokens of each
    part that is differentiated at once). ``dr_grpo``: the sum over tokens, divided by the number of sequences times
    `max_new_tokens` (arXiv:2503.20783, section 3.1).
    """
    if loss_type == "grpo":
        lengths = torch.bincount(owner, minlength=n_sequences)
        return 1.0 / (lengths[owner] * n_sequences).float()
    count = n_sequences * max_new_tokens if loss_type == "dr_grpo" else max(len(owner), 1)
    return torch.full((len(owner),), 1.0 / count, dtype=torch.float32, device=owner.device)


def policy_ratios(log_probs: torch.Tensor, old: torch.Tensor, owner: torch.Tensor, level: str, n: int) -> torch.Tensor:
    """Return the probability ratios (N,) between the policy now and at the time of sampling.

    `level` ``token``: the ratio of each token. ``sequence``: the geometric mean of the ratios of its whole sequence
    (GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7).
    """
    difference = log_probs - old
    if level == "sequence":
        lengths = torch.bincount(owner, minlength=n).clamp(min=1)
        difference = (sequence_sums(difference, owner, n) / lengths)[owner]
    return difference.exp()


def clipped_loss(
    ratios: torch.Tensor, advantages: torch.Tensor, low: float, high: float, delta: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's clipped loss of each token (N,), and whether it is clipped (N,) bool.

    `low` and `high` are the largest deviations of ratios from 1, downwards and upwards (they differ in Clip-Higher,
    arXiv:2503.14476, section 3.1). `delta` is an upper bound of the ratios that also applies if the advantage is
    negative (Team PrimeIntellect 2025, INTELLECT-2, arXiv:2505.07291, section 3.4).
    """
    bounded = ratios if delta is None else ratios.clamp(max=delta)
    clipped = ratios.clamp(1.0 - low, 1.0 + high)
    is_clipped = ((ratios < 1.0 - low) & (advantages < 0)) | ((ratios > 1.0 + high) & (advantages > 0))
    return -torch.minimum(bounded * advantages, clipped * advantages), is_clipped


def sampler_weights(
    old: torch.Tensor, sampler: torch.Tensor, owner: torch.Tensor, n: int, correction: str, cap: float
) -> torch.Tensor:
    """Return importance weights (N,) for completions that were drawn by another program, such as a server.

    `correction` ``token_…``: the ratio of each token. ``sequence_…``: the ratio of the whole sequence. ``…_truncate``:
    at most `cap`. ``…_mask``: 0 above `cap`. (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training".)
    """
    difference = old - sampler
    if correction.startswith("sequence"):
        difference = sequence_sums(difference, owner, n)[owner]
    ratios = difference.exp()
    return ratios.clamp(max=cap) if correction.endswith("truncate") else ratios.masked_fill(ratios > cap, 0.0)


def k3(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) at each token (N,) from the sampled token; the estimate is never negative.

    ``exp(d) - d - 1`` with d = log reference - log policy (Schulman 2020, "Approximating KL divergence", k3).
    """
    difference = reference - log_probs
    return torch.expm1(difference) - difference


def preference_loss(
    margins: torch.Tensor, mean_margins: torch.Tensor, beta: float, loss_type: str, label_smoothing: float
) -> torch.Tensor:
    """Return the loss of each pair (B,).

    Parameters
    ----------
    margins : tensor (B,)
        How much more the policy prefers the chosen completion than the reference does: the difference of
        ``log policy - log reference``, summed over each completion's tokens.
    mean_margins : tensor (B,)
        The same differences of the means over each completion's tokens, which ``ipo`` uses.
    loss_type : str
        ``sigmoid``: DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7), or cDPO with `label_smoothing`, the assumed
        share of wrong labels. ``robust``: unbiased under that share of wrong labels (Chowdhury et al. 2024,
        arXiv:2403.00409). ``hinge``: the loss of SLiC (Zhao et al. 2023, arXiv:2305.10425). ``ipo``: the squared
        distance to ``1 / (2 beta)`` (Azar et al. 2023, arXiv:2310.12036, eq. 17).
    """
    if loss_type == "hinge":
        return torch.relu(1.0 - beta * margins)
    if loss_type == "ipo":
        return (mean_margins - 1.0 / (2.0 * beta)).square()
    right, wrong = -F.logsigmoid(beta * margins), -F.logsigmoid(-beta * margins)
    if loss_type == "robust":
        return ((1.0 - label_smoothing) * right - label_smoothing * wrong) / (1.0 - 2.0 * label_smoothing)
    return (1.0 - label_smoothing) * right + label_smoothing * wrong


def bradley_terry_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | None = None, center: float = 0.0
) -> torch.Tensor:
    """Return the loss of each pair (B,): minus the log-probability that the chosen one wins (Bradley and Terry 1952).

    `chosen` and `rejected` are rewards (B,); `margin` (B,) is the required difference between them (Llama 2,
    arXiv:2307.09288, eq. 2); `center` is the weight of the square of their sum, which keeps rewards near 0 (Eisenstein
    et al. 2023, arXiv:2312.09244, section 2).
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(difference) + center * (chosen + rejected).square()
