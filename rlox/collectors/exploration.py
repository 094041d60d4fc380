"""Noise that is added to the actions a policy chooses."""

from __future__ import annotations

import math

import numpy as np

from rlox.envs import EnvSpec
from rlox.kernels.rng import Rng


class ActionNoise:
    """Gaussian noise whose every step remembers the one before, as Ornstein-Uhlenbeck noise does in discrete time.

    In each environment, and for each component of an action, z_t = c z_{t-1} + sqrt(1 - c²) n_t with standard normal
    n_t. An episode's first z is standard normal too, so that noise is as large at its first step as at any other; no
    episode remembers another.

    Parameters
    ----------
    spec : EnvSpec
        Of continuous actions with finite bounds.
    n_envs : int
        Environments N.
    std : float
        Standard deviation of the noise, for actions scaled to [-1, 1].
    correlation : float
        Of the noise from one step to the next, c in [0, 1).
    """

    def __init__(self, spec: EnvSpec, n_envs: int, std: float, correlation: float):
        self._scale = (std * (spec.act_high - spec.act_low) / 2).astype(np.float32)
        self._correlation = correlation
        self._fresh_share = math.sqrt(1.0 - correlation**2)
        self._z = np.zeros((n_envs, spec.act_dim), np.float32)
        self._starts = np.ones(n_envs, np.bool_)  # environments whose next noise is an episode's first

    def draw(self, rng: Rng) -> np.ndarray:
        """The next step's noise (N, A) f32, in the environment's units."""
        n = rng.normal(self._z.shape)
        self._z = np.where(self._starts[:, None], n, self._correlation * self._z + self._fresh_share * n)
        self._starts[:] = False
        return self._scale * self._z

    def end(self, ended: np.ndarray) -> None:
        """Forget the noise of environments whose episodes have `ended`, (N,) bool."""
        self._starts |= ended

    def state(self) -> dict[str, np.ndarray]:
        """z (N, A), and which environments start afresh (N,)."""
        return {"z": self._z, "starts": self._starts}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from what `state` returned.

        Raises
        ------
        ValueError
            If it is of another shape or type, or not finite.
        """
        for name, own in self.state().items():
            saved = state.get(name)
            if saved is None or (saved.shape, saved.dtype) != (own.shape, own.dtype) or not np.isfinite(saved).all():
                got = "none" if saved is None else f"{saved.shape} of {saved.dtype}"
                raise ValueError(
                    f"{type(self).__name__}.set_state: {name} must be a finite array {own.shape} of {own.dtype}, "
                    f"got {got}"
                )
        self._z, self._starts = state["z"].copy(), state["starts"].copy()
