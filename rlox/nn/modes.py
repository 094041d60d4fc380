"""Contexts to compute in: training and evaluation mode of modules, which matters for dropout, batch normalisation and
custom layers; PyTorch's threads, inference mode, and checks of distributions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# PyTorch's layers that compute the same in both modes, of which rlox's own networks are made.
_SAME_IN_BOTH = frozenset(
    {
        "Conv2d",
        "Flatten",
        "Identity",
        "LayerNorm",
        "Linear",
        "ModuleList",
        "ParameterList",
        "ReLU",
        "Sequential",
        "Tanh",
    }
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


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """Run with `n` PyTorch CPU threads (0: unchanged) and restore the user's number afterwards.

    The default for training is one: small networks gain nothing from a second thread, and become several times slower
    when the other core is busy.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or n in (0, before := torch.get_num_threads()):
        yield
        return
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Create tensors that can be learned from, also if the caller is inside ``torch.inference_mode``."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.is_inference_mode_enabled():
        yield
        return
    # Leaving the mode also switches gradients on, which the caller's environments do not expect.
    with torch.inference_mode(False), torch.no_grad():
        yield


# The settings of the argument checks to restore, one for each thread that skips them: the user's first, then False.
_check_settings: list[bool | None] = []
_checks_lock = threading.Lock()


@contextmanager
def skip_distribution_checks() -> Iterator[None]:
    """Run without the argument checks of `torch.distributions`, and restore the user's setting afterwards, when the
    last of overlapping trainings ends.

    A custom policy creates a distribution at every step, and the checks take a third of its time. NaN, which they would
    find, is found by the training loop in the losses.
    """
    kind: Any = getattr(sys.modules.get("torch.distributions"), "Distribution", None)
    if kind is None:
        yield
        return
    with _checks_lock:
        _check_settings.append(kind._validate_args)
        kind.set_default_validate_args(False)
    try:
        yield
    finally:
        with _checks_lock:
            kind.set_default_validate_args(_check_settings.pop())
