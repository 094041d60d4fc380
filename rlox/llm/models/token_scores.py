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
    logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        row: torch.Tensor,
        column: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (len(targets), len(targets), len(targets) if entropy else 0)
        log_probs, totals, entropies = (torch.empty(n, device=logits.device) for n in sizes)
        for some in _chunks(logits, targets):
            part = _divided(logits[row[some], column[some]], temperature)
            torch.logsumexp(part, -1, out=totals[some])
            part -= totals[some, None]
            log_probs[some] = part.gather(-1, targets[some, None])[:, 0]
            if entropy:
                probs = part.exp()
                # A logit of minus infinity has probability 0, and their product would be NaN.
                entropies[some] = -(probs * part.clamp_(min=torch.finfo(part.dtype).min)).sum(-1)
        ctx.save_for_backward(logits, row, column, targets, totals)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, row, column, targets, totals = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        for some in _chunks(logits, targets):
            slope, place = slopes[some, None] / ctx.temperature, targets[some, None]
            part = _divided(logits[row[some], column[some]], ctx.temperature)
            part = part.sub_(totals[some, None]).exp_().mul_(-slope)
            part.scatter_(-1, place, part.gather(-1, place) + slope)
            gradient[row[some], column[some]] = part.to(gradient.dtype)
        return gradient, None, None, None, None, None


def _chunks(logits: torch.Tensor, targets: torch.Tensor) -> list[slice]:
    """Return slices of the tokens that have at most `_AT_ONCE` logits, or one token."""
    n = max(1, _AT_ONCE // logits.shape[-1])
    return [slice(first, first + n) for first in range(0, len(targets), n)]


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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities and entropies (N,) f32 of the tokens `targets` (N,).

    Their distributions are at (row, column) of `logits` (B, T, V); no place may occur twice. The entropies have no
    gradient; without `entropy` they are None.
    """
    if kernels_take(logits):
        places = row * logits.shape[1] + column
        log_probs, entropies = _TokenScores.apply(logits.view(-1, logits.shape[-1]), places, targets, temperature)
    else:
        log_probs, entropies = _ChunkedScores.apply(logits, row, column, targets, temperature, entropy)
    return log_probs, entropies if entropy else None
