"""Changes to a native run that exists: hooks, replaced functions, moved or converted modules."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rlox.native.obstacles import ModuleWatch
from rlox.native.optimizer import NativeAdam, NativeOptimizer
from rlox.native.policies import NativeActor


class Watch:
    """Notices where an algorithm no longer holds what its kernel computes on: networks and optimisers.

    Parameters
    ----------
    owner : object
        The algorithm, complete.
    actor : NativeActor, optional
        What acts for it.
    """

    def __init__(self, owner: object, actor: NativeActor | None = None):
        kinds: tuple[type, ...] = (NativeOptimizer, NativeAdam)
        if "torch" in sys.modules:
            from torch import nn

            kinds = (*kinds, nn.Module, nn.Parameter)
        self._actor = actor
        self._next_look = self._next_difference = 0.0
        self._owner = type(owner).__name__
        self._attributes = vars(owner)
        self._held: dict[str, Any] = {name: value for name, value in vars(owner).items() if isinstance(value, kinds)}
        self._modules = [
            ModuleWatch(name.lstrip("_").replace("_", " "), value)
            for name, value in self._held.items()
            if hasattr(value, "named_modules")
        ]
        self._addresses = {name: value.data_ptr() for name, value in self._held.items() if hasattr(value, "data_ptr")}

    def due(self) -> bool:
        """Whether the last look is 5 ms ago: a round of training may take less time than a look."""
        return time.monotonic() >= self._next_look

    def require(self, where: str, functions: bool, difference: Callable[[], str | None]) -> None:
        """A ValueError where something has changed, or where there is a `difference` between functions.

        Looks for a difference where `functions` says so, and every second.
        """
        now = time.monotonic()
        self._next_look = now + 0.005
        found = self._altered() or (None if self._actor is None else self._actor.altered())
        if found is None and (functions or now > self._next_difference):
            found = difference()
            self._next_difference = now + 1.0
        if found is not None:
            raise ValueError(
                f"{self._owner}.{where}: a native run must stay as it was made: {found}; change it before "
                f"{self._owner} is made, or make it with backend='torch'"
            )

    def _altered(self) -> str | None:
        replaced = next((name for name, value in self._held.items() if self._attributes.get(name) is not value), None)
        if replaced is None:
            moved = (name for name, address in self._addresses.items() if self._held[name].data_ptr() != address)
            replaced = next(moved, None)
        if replaced is not None:
            return f"{replaced.lstrip('_')} of this {self._owner} was replaced"
        return next((found for module in self._modules if (found := module.altered()) is not None), None)
