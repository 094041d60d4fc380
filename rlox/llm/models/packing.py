"""Check that a model reads each of several sequences in a row as if it were alone.

transformers infers the boundaries from positions that start again, but not in every model, and with FlashAttention only
in a batch of a single row. Models that keep a state, compute positions themselves or build their own masks read over
the boundaries without an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from rlox.llm.models.language import LanguageModel
from rlox.llm.tokens import Layout, Sequences

_LENGTHS, _ROW = (7, 6, 5, 4), 11  # packed, they are two rows of two sequences
# Differences of log-probabilities that rounding explains, relative to the largest of them: in float32 on a CPU, in
# float32 on a GPU, which may use TF32, and in bfloat16.
_FLOAT32, _TF32, _BFLOAT16 = 2e-5, 2e-3, 1.5e-2


def require_packing(model: LanguageModel, cast: Callable[[], AbstractContextManager]) -> None:
    """Score short sequences packed and alone, and raise a ValueError if a sequence depends on its neighbours.

    `cast` returns the context of the precision of a training. It is used only if the model needs it, since smaller
    differences are visible in float32.
    """
    sequences = _short_sequences(model)
    packed = model.layout(sequences, _ROW)
    forward = inspect.signature(model.base.forward).parameters.values()
    if not any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in forward):
        raise ValueError(
            f"{model.where}: packing must be false for {model.kind}, whose forward takes no positions, got true"
        )
    stored = all(p.dtype == torch.float32 for p in model.module.parameters())
    in_float32 = stored and not model.one_pass and not model.needs_one_row
    with nullcontext() if in_float32 else cast():
        with torch.no_grad():
            together = model.score(packed).log_probs
            rows = (sequences.take(np.array([i]))[0] for i in range(len(sequences)))
            alone = torch.cat([model.score(model.layout(row)).log_probs for row in rows])
        # The ranks of a sharded model expect that a pass with a gradient also changes its weights.
        leaks = not model.one_pass and _leaks(model, packed)
    rounding = _BFLOAT16 if not in_float32 else _FLOAT32 if model.device.type == "cpu" else _TF32
    # A model that is not finite is reported when it is trained.
    difference, largest = (float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) for x in (together - alone, alone))
    if leaks or difference > rounding * max(1.0, largest):
        raise ValueError(
            f"{model.where}: packing must be false for {model.kind} with attention {model.attention}, which does not "
            f"read sequences of one row as if each were alone: log-probabilities differ by up to {difference:.2g}, got "
            "true; set packing=false"
        )


def _short_sequences(model: LanguageModel) -> Sequences:
    """Return four sequences of different tokens. They are fixed, so that no random numbers are drawn."""
    lengths = [n if model.context is None else min(n, model.context) for n in _LENGTHS]
    ids = np.split((np.arange(sum(lengths)) * 7919 + 11) % (model.vocabulary or 1), np.cumsum(lengths)[:-1])
    return Sequences([x[:1] for x in ids], [x[1:] for x in ids])


def _leaks(model: LanguageModel, packed: Layout) -> bool:
    """Return whether tokens of the first sequence of a row have an effect on the sequences after it.

    The derivative by their embeddings is exactly 0 if not. Rounding hides small effects on values, as of a convolution.
    """
    assert packed.positions is not None
    inputs: list[torch.Tensor] = []

    def cut(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        inputs.append(output.detach().requires_grad_())
        return inputs[-1].clone()  # the model may change it in place

    base: Any = model.base
    handle = base.get_input_embeddings().register_forward_hook(cut)
    try:
        with torch.enable_grad():
            log_probs = model.score(packed).log_probs
    finally:
        handle.remove()
    number = (packed.positions == 0).cumsum(1)  # of each token's sequence in its row, from 1
    later = log_probs[number[packed.row, packed.column] > 1]
    (slopes,) = torch.autograd.grad(later.sum(), inputs[:1])
    return bool((slopes[number == 1].nan_to_num() != 0.0).any())
