"""Policies of several agents on the memory of compiled learners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlox.config import MAPPOConfig
from rlox.envs import EnvSpec
from rlox.kernels.nn.mappo import NativePlayer
from rlox.kernels.rng import Rng
from rlox.native.blocks import _fill, _size
from rlox.native.obstacles import Perceptron, _shapes
from rlox.native.policies import NativeActor

if TYPE_CHECKING:
    from torch import nn

    from rlox.nn.policies import ActorCritic


class NativePart(NativeActor):
    """How one player acts, judges and learns by a kernel; `rlox.nn.players.ModulePart` does it by a module.

    Parameters
    ----------
    spec : EnvSpec
        What the actor sees and does.
    state_dim : int, optional
        Numbers that a central critic reads; None: the critic reads what the actor does.
    config : MAPPOConfig
        Widths, activation, optimiser.
    block : array, optional
        The parameters (P,) f32, kept and not copied; zeros by default.
    """

    net: NativePlayer

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
        net = NativePlayer(
            block, spec.obs_dim, n_outputs, list(c.hidden_sizes), c.activation, gaussian, c.optimizer, state_dim
        )
        super().__init__(net, shapes)

    def __reduce__(self) -> Any:
        return NativePart, (*self._made_of, np.array(self.net.parameters))

    @classmethod
    def make(cls, spec: EnvSpec, state_dim: int | None, config: MAPPOConfig, rng: Rng) -> NativePart:
        """With the weights that `rlox.nn.players.make_player_policy` would start from."""
        part = cls(spec, state_dim, config)
        for net, gain in zip(part._nets, (0.01, 1.0), strict=True):
            part._set_initial(net, gain, config.ortho_init, rng)
        if spec.continuous:
            part.parameters["log_std"][:] = config.log_std_init
        return part

    def _make_module(self) -> ActorCritic:
        from rlox.nn.players import make_player_policy

        return make_player_policy(*self._made_of, Rng(0))

    def place(self, column: np.ndarray | None) -> np.ndarray | None:
        """A column of a batch where the learner wants it."""
        return None if column is None else np.ascontiguousarray(column)

    def flat(self) -> np.ndarray:
        """All parameters, (P,) f32; a copy."""
        return np.array(self.net.parameters)

    def set_flat(self, weights: np.ndarray) -> None:
        """Put in what `flat` returned."""
        self.net.parameters[:] = weights

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.net.n_outputs)

    def fill_noise(self, rng: Rng, out: np.ndarray) -> None:
        (rng.normal if self.net.gaussian else rng.gumbel)(out=out)

    def act(self, obs: np.ndarray, noise: np.ndarray, masks: np.ndarray | None = None) -> np.ndarray:
        """Sampled actions (B, …)."""
        return self.net.act(obs, noise, masks)

    def mode(self, obs: np.ndarray, masks: np.ndarray | None = None) -> np.ndarray:
        """The most likely actions (B, …)."""
        return self.net.mode(obs, masks)

    def sample(  # type: ignore[override]  # masks beside the observations
        self, obs: np.ndarray, masks: np.ndarray | None = None, rng: Rng | None = None
    ) -> np.ndarray:
        """As `act`, with noise drawn from `rng`; without it PyTorch's generator decides."""
        if rng is None:
            from rlox.nn.networks import rng_from_torch

            rng = rng_from_torch()
        noise = np.empty(self.noise_shape(len(obs)), np.float32)
        self.fill_noise(rng, noise)
        return self.act(obs, noise, masks)

    def judge(
        self,
        obs: np.ndarray,
        states: np.ndarray | None,
        masks: np.ndarray | None,
        actions: np.ndarray,
        after: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-probabilities (B,) of the actions taken, values (B,), and values of what came `after` (K, …), all f32."""
        values = self.net.values(obs if states is None else states)
        return self.net.log_probs(obs, actions, masks), values, self.net.values(after)


class NativePlayers:
    """The parts of all players, as an algorithm holds what acts natively.

    Parameters
    ----------
    parts : sequence of NativePart
        In the order of the players.
    """

    def __init__(self, parts: Sequence[NativePart]):
        self.parts = list(parts)
        self._module: nn.Module | None = None

    def module(self) -> nn.Module:
        """The PyTorch module that computes the same; its parameters are views of the kernels'."""
        if self._module is None:
            from rlox.nn.players import PlayerPolicies

            self._module = PlayerPolicies([part.module() for part in self.parts])
        return self._module

    def altered(self) -> str | None:
        """Why a kernel may not compute for the modules that were given out; None: it may."""
        return next((found for part in self.parts if (found := part.altered()) is not None), None)

    def weights(self) -> dict[str, np.ndarray]:
        """All parameters by their ``state_dict`` names, copies."""
        return {name: array.copy() for name, array in self._parameters().items()}

    def load(self, arrays: dict[str, np.ndarray], what: str) -> None:
        """Put in what `weights` returned; a ValueError that names `what` where it does not fit."""
        _fill(self._parameters(), arrays, what)

    def _parameters(self) -> dict[str, np.ndarray]:
        return {
            f"players.{i}.{name}": array for i, part in enumerate(self.parts) for name, array in part.parameters.items()
        }
