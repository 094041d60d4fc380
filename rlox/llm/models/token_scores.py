"""Log-probabilities and entropies of scored tokens, with one forward and one backward pass over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rlox.kernels.llm.vocabulary import score_gradient, score_tokens


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


def token_scores(
    logits: torch.Tensor, row: torch.Tensor, column: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies (N,) f32 of the tokens `targets` (N,).

    Their distributions are at (row, column) of `logits` (B, T, V); no place may occur twice. The entropies have no
    gradient.
    """
    places = row * logits.shape[1] + column
    return _TokenScores.apply(logits.view(-1, logits.shape[-1]), places, targets, temperature)
