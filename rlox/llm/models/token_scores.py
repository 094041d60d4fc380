"""Log-probabilities and entropies of scored tokens, with one forward and one backward pass over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlox.kernels.llm.vocabulary import score_gradient, score_tokens

_AT_ONCE = 2**25  # logits that PyTorch's operations work on at once, 128 MiB in float32


def kernels_take(*tensors: torch.Tensor) -> bool:
    """Return whether all tensors are contiguous float32 on the CPU, as the kernels require."""
    return all(x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() for x in tensors)


class _TokenScores(torch.autograd.Function):
    """The kernel and its derivative, which is written once in the shape of the logits, without gathering rows."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, places: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = score_tokens(logits.numpy(), places.numpy(), targets.numpy(), temperature)
        log_probs, totals, entropies = map(torch.from_numpy, scores)
        ctx.save_for_backward(logits, places, targets, totals)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, places, targets, totals = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        arrays = (x.numpy() for x in (logits, places, targets, totals, slopes.contiguous(), gradient))
        score_gradient(*arrays, ctx.temperature)
        return gradient, None, None, None


class _ChunkedScores(torch.autograd.Function):
    """The same by operations of PyTorch, on some tokens at a time, so that nothing but the gradient is as large as the
    logits. Here entropies may have a gradient, too."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        row: torch.Tensor,
        column: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (len(targets), len(targets), len(targets) if entropy else 0)
        log_probs, totals, entropies = (torch.empty(n, dtype=torch.float32, device=logits.device) for n in sizes)
        for some in _chunks(logits, targets):
            part = _divided(logits[row[some], column[some]], temperature)
            torch.logsumexp(part, -1, out=totals[some])
            part -= totals[some, None]
            log_probs[some] = part.gather(-1, targets[some, None])[:, 0]
            if entropy:
                entropies[some] = -part.exp().mul_(_finite(part)).sum(-1)
        ctx.save_for_backward(logits, row, column, targets, totals, entropies)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, slopes: torch.Tensor, entropy_slopes: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None, None, None]:
        logits, row, column, targets, totals, entropies = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        for some in _chunks(logits, targets):
            slope, place = slopes[some, None] / ctx.temperature, targets[some, None]
            part = _divided(logits[row[some], column[some]], ctx.temperature).sub_(totals[some, None])
            if ctx.entropy_gradient:
                # By a logit, the log-probability has the derivative [it is the token's] - p; entropy -p (log p + H).
                surplus = _finite(part).add_(entropies[some, None])
                part = part.exp_()
                surplus.mul_(part).mul_(entropy_slopes[some, None] / ctx.temperature)
                part = part.mul_(-slope).sub_(surplus)
            else:
                part = part.exp_().mul_(-slope)
            part.scatter_(-1, place, part.gather(-1, place) + slope)
            gradient[row[some], column[some]] = part.to(gradient.dtype)
        return gradient, None, None, None, None, None, None


def _chunks(logits: torch.Tensor, targets: torch.Tensor) -> list[slice]:
    """Return slices of the tokens that have at most `_AT_ONCE` logits, or one token."""
    n = max(1, _AT_ONCE // logits.shape[-1])
    return [slice(first, first + n) for first in range(0, len(targets), n)]


def _finite(log_probs: torch.Tensor) -> torch.Tensor:
    """Return a copy without minus infinity, whose product with the probability 0 would be NaN."""
    return log_probs.clamp(min=torch.finfo(log_probs.dtype).min)


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return `logits`, which may be written to, as float32 and divided by `temperature`."""
    logits = logits.float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def token_scores(
    logits: torch.Tensor,
    row: torch.Tensor,
    column: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities and entropies (N,) f32 of the tokens `targets` (N,).

    Their distributions are at (row, column) of `logits` (B, T, V); no place may occur twice. The entropies have a
    gradient if `entropy_gradient` is set; without `entropy` they are None.
    """
    entropy_gradient = entropy and entropy_gradient
    if kernels_take(logits) and not entropy_gradient:
        places = row * logits.shape[1] + column
        log_probs, entropies = _TokenScores.apply(logits.view(-1, logits.shape[-1]), places, targets, temperature)
    else:
        asked = (temperature, entropy, entropy_gradient)
        log_probs, entropies = _ChunkedScores.apply(logits, row, column, targets, *asked)
    return log_probs, entropies if entropy else None
