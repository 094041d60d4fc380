"""Training and evaluation mode of modules, which matters for dropout, batch normalisation and custom layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

# PyTorch's layers that compute the same in both modes, of which rlox's own networks are made.
_SAME_IN_BOTH = frozenset(
    {"Conv2d", "Flatten", "Identity", "Linear", "ModuleList", "ParameterList", "ReLU", "Sequential", "Tanh"}
)


def _depends(part: nn.Module) -> bool:
    """Return whether a part of a module, without its own parts, may compute differently in training mode."""
    kind = type(part)
    module = kind.__module__
    same = module.startswith("rlox.") or (module.startswith("torch.nn.modules.") and kind.__name__ in _SAME_IN_BOTH)
    return not same or bool(part._forward_pre_hooks or part._forward_hooks)


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    """Restore the modes of a module and all of its parts, each of which comes before its own parts."""
    for part, training in modes:
        if part.training is not training:
            part.train(training)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` in evaluation mode; afterwards restore the mode of each part, since some may be frozen.

    A module that computes the same in both modes, such as rlox's own networks, is not touched.
    """
    if not any(part.training and _depends(part) for part in module.modules()):
        yield
        return
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        _restore(modes)


@contextmanager
def acting(module: nn.Module) -> Iterator[None]:
    """Put `module` in evaluation mode, and compute without gradients."""
    import torch

    with torch.inference_mode(), evaluating(module):
        yield


@contextmanager
def learning(module: nn.Module) -> Iterator[None]:
    """Put `module` in training mode if all of it is in evaluation mode, and restore that afterwards.

    If only some parts are in evaluation mode, such as a frozen encoder, they stay there.
    """
    parts = [part for part in module.modules() if _depends(part)]
    if not parts or any(part.training for part in parts):
        yield
        return
    modes = [(part, part.training) for part in module.modules()]
    module.train()
    try:
        yield
    finally:
        _restore(modes)
