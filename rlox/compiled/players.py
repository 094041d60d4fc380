"""Policies of several agents that share memory with compiled learners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.compiled.blocks import _fill, _size
from rlox.compiled.obstacles import Perceptron, _shapes
from rlox.compiled.policies import NativeActor
from rlox.config import MAPPOConfig
from rlox.envs import EnvSpec
from rlox.kernels.nn.policy_gradient import NativeActorCritic
from rlox.kernels.rng import Rng

if TYPE_CHECKING:
    from torch import nn

    from rlox.nn.policies import ActorCritic


class NativePart(NativeActor):
    """Actions, log-probabilities, values and updates of one player, computed by a kernel; counterpart of
    `rlox.nn.players.ModulePart`, which uses a module.

    Parameters
    ----------
    spec : EnvSpec
        The actor's observations and actions.
    state_dim : int, optional
        Numbers that a central critic reads; None: the critic reads the actor's observations.
    config : MAPPOConfig
        Widths, activation, optimiser.
    block : array, optional
        The parameters (P,) f32, which are used without a copy; zeros by default.
    """

    net: NativeActorCritic

    def __init__(self, spec: EnvSpec, state_dim: int | None, config: MAPPOConfig, block: np.ndarray | None = None):
        self._made_of = (spec, state_dim, config)
        c, gaussian = config, spec.continuous
        n_outputs = spec.act_dim if gaussian else spec.n_actions
        self._nets = [
            Perceptron("actor", [spec.obs_dim, *c.hidden_sizes, n_outputs]),
            Perceptron("critic", [spec.obs_dim if state_dim is None else state_dim, *c.hidden_sizes, 1]),
        ]
        shapes = [*([("log_std", (n_outputs,))] if gaussian else []), *_shapes(self._nets)]
        block = np.zeros(_size(shapes), np.float32) if block is None else block
        net = NativeActorCritic(
            block, spec.obs_dim, n_outputs, list(c.hidden_sizes), c.activation, gaussian, c.optimizer, state_dim
        )
        super().__init__(net, shapes)

    def __reduce__(self) -> Any:
        return NativePart, (*self._made_of, np.array(self.net.parameters))

    @classmethod
    def make(cls, spec: EnvSpec, state_dim: int | None, config: MAPPOConfig, rng: Rng) -> NativePart:
        """Create a part with the same initial weights as `rlox.nn.policies.make_policy`."""
        part = cls(spec, state_dim, config)
        for net, gain in zip(part._nets, (0.01, 1.0), strict=True):
            part._set_initial(net, gain, config.ortho_init, rng)
        if spec.continuous:
            part.parameters["log_std"][:] = config.log_std_init
        return part

    def _make_module(self) -> ActorCritic:
        from rlox.nn.policies import make_policy

        spec, state_dim, config = self._made_of
        return make_policy(spec, config, Rng(0), state_dim)

    def place(self, column: np.ndarray | None) -> np.ndarray | None:
        """Return a column of a batch as a contiguous array."""
        return None if column is None else np.ascontiguousarray(column)

    def flat(self) -> np.ndarray:
        """Return a copy of all parameters, (P,) f32."""
        return np.array(self.net.parameters)

    def set_flat(self, weights: np.ndarray) -> None:
        """Load the result of `flat`."""
        self.net.parameters[:] = weights

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.net.n_outputs)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        (rng.normal if self.net.gaussian else rng.gumbel)(out=out)

    def act(  # type: ignore[override]
        self, obs: np.ndarray, noise: np.ndarray, masks: np.ndarray | None = None
    ) -> np.ndarray:
        """Return sampled actions (B, …)."""
        return self.net.act(obs, noise, masks)

    def mode(self, obs: np.ndarray, masks: np.ndarray | None = None) -> np.ndarray:  # type: ignore[override]
        """Return the most likely actions (B, …)."""
        return self.net.mode(obs, masks)

    def sample(self, obs: np.ndarray, masks: np.ndarray | None = None, rng: Rng | None = None) -> np.ndarray:
        """Return actions like `act`, with noise drawn from `rng`, or else from PyTorch's generator."""
        if rng is None:
            from rlox.nn.networks import rng_from_torch

            rng = rng_from_torch()
        noise = np.empty(self.noise_shape(len(obs)), np.float32)
        self.fill_noise(rng, noise)
        return self.act(obs, noise, masks)

    def evaluate_actions(
        self,
        obs: np.ndarray,
        states: np.ndarray | None,
        masks: np.ndarray | None,
        actions: np.ndarray,
        after: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return log-probabilities (B,) of the taken actions, values (B,), and values of the states `after` (K, …), all
        f32."""
        return self.net.log_probs(obs, actions, after, states, masks)


class NativePlayers:
    """The parts of all players, as the native actor of an algorithm.

    Parameters
    ----------
    parts : sequence of NativePart
        The parts, in the order of the players.
    """

    def __init__(self, parts: Sequence[NativePart]):
        self.parts = list(parts)
        self._module: nn.Module | None = None

    def module(self) -> nn.Module:
        """Return the PyTorch module that computes the same; its parameters are views of the kernels'."""
        if self._module is None:
            from rlox.nn.players import PlayerPolicies

            self._module = PlayerPolicies([part.module() for part in self.parts])
        return self._module

    def altered(self) -> str | None:
        """Return why kernels can no longer replace the returned modules; None if they can."""
        return next((found for part in self.parts if (found := part.altered()) is not None), None)

    def weights(self) -> dict[str, np.ndarray]:
        """Return copies of all parameters by their ``state_dict`` names."""
        return {name: array.copy() for name, array in self._parameters().items()}

    def load(self, arrays: dict[str, np.ndarray], what: str) -> None:
        """Load the result of `weights`. Raises ValueError, which names `what`, if it does not fit."""
        _fill(self._parameters(), arrays, what)

    def _parameters(self) -> dict[str, np.ndarray]:
        return {
            f"players.{i}.{name}": array for i, part in enumerate(self.parts) for name, array in part.parameters.items()
        }
