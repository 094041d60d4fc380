"""Noise added to the actions of a policy."""

from __future__ import annotations

import math

import numpy as np

from rlox.envs import EnvSpec
from rlox.kernels.rng import Rng


class ActionNoise:
    """Gaussian noise that is correlated over time, like Ornstein-Uhlenbeck noise in discrete time.

    In each environment, and for each component of an action, z_t = c z_{t-1} + sqrt(1 - c²) n_t with standard normal
    n_t. The first z of an episode is standard normal too, so that the noise has the same size in all steps. Noise of
    different episodes is independent.

    Parameters
    ----------
    spec : EnvSpec
        Spec of continuous actions with finite bounds.
    n_envs : int
        Environments N.
    std : float
        Standard deviation of the noise, for actions scaled to [-1, 1].
    correlation : float
        Correlation of the noise from one step to the next, c in [0, 1).
    """

    verb = "adds"

    def __init__(self, spec: EnvSpec, n_envs: int, std: float, correlation: float):
        self._scale = (std * (spec.act_high - spec.act_low) / 2).astype(np.float32)
        self._correlation = correlation
        self._fresh_share = math.sqrt(1.0 - correlation**2)
        self._z = np.zeros((n_envs, spec.act_dim), np.float32)
        self._starts = np.ones(n_envs, np.bool_)  # environments whose next noise is the first of an episode

    def hold(self, fresh: np.ndarray, rng: Rng) -> np.ndarray:
        """Return the noise `fresh` that the policy acts with as it is."""
        return fresh

    def add(self, actions: np.ndarray, rng: Rng) -> np.ndarray:
        """Return `actions` (N, A) f32 of the environment with the noise of this step."""
        n = rng.normal(self._z.shape)
        self._z = np.where(self._starts[:, None], n, self._correlation * self._z + self._fresh_share * n)
        self._starts[:] = False
        return actions + self._scale * self._z

    def end(self, ended: np.ndarray) -> None:
        """Reset the noise of environments whose episodes `ended`, (N,) bool."""
        self._starts |= ended

    def state(self) -> dict[str, np.ndarray]:
        """Return z (N, A), and which environments start a new episode (N,)."""
        return {"z": self._z, "starts": self._starts}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from a state that `state` returned.

        Raises
        ------
        ValueError
            If it has the wrong shape or type, or is not finite.
        """
        _require_state(self, state)
        self._z, self._starts = state["z"].copy(), state["starts"].copy()


class HeldNoise:
    """Noise of a policy that stays the same for several steps, as in FlashSAC (arXiv:2604.04539).

    In each environment, noise is held for n steps with a probability in proportion to 1 / n², for n up to a limit. It
    is also held when an episode ends.

    Parameters
    ----------
    n_envs, size : int
        Environments N, and numbers A of a policy's noise for each.
    most : int
        Most steps for which noise is held.
    """

    verb = "holds"

    def __init__(self, n_envs: int, size: int, most: int):
        shares = np.cumsum(np.arange(1, most + 1, dtype=np.float64) ** -2.0)
        self._below = shares[:-1] / shares[-1]  # probabilities that noise is held for at most 1, 2, … steps
        self._noise = np.zeros((n_envs, size), np.float32)
        self._left = np.zeros(n_envs, np.int64)  # steps for which the noise is still held

    def hold(self, fresh: np.ndarray, rng: Rng) -> np.ndarray:
        """Return the noise (N, A) f32 of the next step: that of the last step, or `fresh` noise where this ended."""
        steps = 1 + np.searchsorted(self._below, rng.uniform(self._left.shape, dtype=np.float64), side="right")
        ends = self._left == 0
        self._noise = np.where(ends[:, None], fresh, self._noise)
        self._left = np.where(ends, steps, self._left) - 1
        return self._noise

    def add(self, actions: np.ndarray, rng: Rng) -> np.ndarray:
        """Return `actions` as they are."""
        return actions

    def end(self, ended: np.ndarray) -> None:
        """Do nothing: noise is held over the end of an episode."""

    def state(self) -> dict[str, np.ndarray]:
        """Return the noise (N, A), and the steps for which it is still held (N,)."""
        return {"noise": self._noise, "left": self._left}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from a state that `state` returned. Raises the errors of `ActionNoise.set_state`."""
        _require_state(self, state)
        self._noise, self._left = state["noise"].copy(), state["left"].copy()


def restore_noise(noise: ActionNoise | HeldNoise | None, saved: dict[str, np.ndarray] | None, continues: bool) -> None:
    """Give `noise` a `saved` state, unless it is that of the other kind.

    If the episodes do not continue, only `HeldNoise` does.
    """
    if noise is None or saved is None or saved.keys().isdisjoint(noise.state()):
        return
    if continues or isinstance(noise, HeldNoise):
        noise.set_state(saved)


def _require_state(noise: ActionNoise | HeldNoise, state: dict[str, np.ndarray]) -> None:
    """Raise ValueError unless `state` has the finite arrays of ``noise.state()``."""
    for name, own in noise.state().items():
        saved = state.get(name)
        if saved is None or (saved.shape, saved.dtype) != (own.shape, own.dtype) or not np.isfinite(saved).all():
            got = "none" if saved is None else f"{saved.shape} of {saved.dtype}"
            raise ValueError(
                f"{type(noise).__name__}.set_state: {name} must be a finite array {own.shape} of {own.dtype}, got {got}"
            )
