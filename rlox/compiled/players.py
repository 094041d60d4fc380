"""The policies of several agents, as one compiled actor of an algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlox.compiled.policies import NativePolicy, _fill

if TYPE_CHECKING:
    from torch import nn


class NativePlayers:
    """The policies of all players, with names of weights as in `rlox.nn.policies.PlayerPolicies`.

    Parameters
    ----------
    policies : sequence of NativePolicy
        The policies, in the order of the players.
    """

    def __init__(self, policies: Sequence[NativePolicy]):
        self.policies = list(policies)
        self._module: nn.Module | None = None

    def module(self) -> nn.Module:
        """Return the PyTorch module that computes the same; its parameters are views of the kernels'."""
        if self._module is None:
            from rlox.nn.policies import PlayerPolicies

            self._module = PlayerPolicies([policy.module() for policy in self.policies])
        return self._module

    def altered(self) -> str | None:
        """Return why kernels can no longer replace the returned modules; None if they can."""
        return next((found for policy in self.policies if (found := policy.altered()) is not None), None)

    def weights(self) -> dict[str, np.ndarray]:
        """Return copies of all parameters by their ``state_dict`` names."""
        return {name: array.copy() for name, array in self._parameters().items()}

    def load(self, arrays: dict[str, np.ndarray], what: str) -> None:
        """Load the result of `weights`. Raises ValueError, which names `what`, if it does not fit."""
        _fill(self._parameters(), arrays, what)

    def _parameters(self) -> dict[str, np.ndarray]:
        return {
            f"players.{i}.{name}": array
            for i, policy in enumerate(self.policies)
            for name, array in policy.parameters.items()
        }
