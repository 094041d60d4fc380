"""Detection of changes to an existing native run: hooks, replaced functions, moved or converted modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rlox.compiled.obstacles import ModuleWatch
from rlox.compiled.optimizer import NativeAdam, NativeOptimizer
from rlox.compiled.policies import NativeActor


class Watch:
    """Detects when an algorithm no longer has the networks and optimisers that its kernel computes on.

    Parameters
    ----------
    owner : object
        The completely constructed algorithm.
    actor : NativeActor, optional
        The actor of the algorithm.
    """

    def __init__(self, owner: object, actor: NativeActor | None = None):
        kinds: tuple[type, ...] = (NativeOptimizer, NativeAdam)
        if "torch" in sys.modules:
            from torch import nn

            kinds = (*kinds, nn.Module, nn.Parameter)
        self._actor = actor
        self._owner = type(owner).__name__
        self._attributes = vars(owner)
        self._held: dict[str, Any] = {name: value for name, value in vars(owner).items() if isinstance(value, kinds)}
        self._modules = [
            ModuleWatch(name.lstrip("_").replace("_", " "), value)
            for name, value in self._held.items()
            if hasattr(value, "named_modules")
        ]
        self._addresses = {name: value.data_ptr() for name, value in self._held.items() if hasattr(value, "data_ptr")}

    def require(self, where: str, find_difference: Callable[[], str | None] | None = None) -> None:
        """Raise ValueError if something has changed, or functions differ by `find_difference`."""
        change = self._describe_alteration() or (None if self._actor is None else self._actor.altered())
        if change is None and find_difference is not None:
            change = find_difference()
        if change is not None:
            raise ValueError(
                f"{self._owner}.{where}: a native run must not be changed: {change}; make the change before "
                f"{self._owner} is created, or create it with backend='torch'"
            )

    def _describe_alteration(self) -> str | None:
        replaced = next((name for name, value in self._held.items() if self._attributes.get(name) is not value), None)
        if replaced is None:
            moved = (name for name, address in self._addresses.items() if self._held[name].data_ptr() != address)
            replaced = next(moved, None)
        if replaced is not None:
            return f"{replaced.lstrip('_')} of this {self._owner} was replaced"
        return next((found for module in self._modules if (found := module.altered()) is not None), None)
