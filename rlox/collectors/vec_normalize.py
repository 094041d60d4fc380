"""Running normalisation of observations and rewards of N environments.

The rules are those of Stable-Baselines3's VecNormalize: every observation updates the statistics, rewards are divided
by the standard deviation of their discounted sum (without centring, so that their sign is kept), and both are clipped.
In evaluation the statistics are frozen. Returns are always reported in the environment's units.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np

from rlox.config import integer

MOMENTS = ("mean", "var", "count")  # attributes of `RunningMoments`
_PRIOR = (0.0, 1.0, 1e-4)  # mean, variance and weight of a prior, so that the first division is defined
# After this many samples, observations of at least this size must vary by this many of float32's steps.
_CHECKED_AFTER, _LARGE, _LEAST_STEPS = 1000, 2.0**24, 8


class RunningMoments:
    """Mean and variance of a stream of vectors, updated in batches (Chan et al. 1979); float64.

    Parameters
    ----------
    shape : tuple of int
        Shape of one sample.
    """

    def __init__(self, shape: tuple[int, ...]):
        mean, var, self.count = _PRIOR
        self.mean = np.full(shape, mean)
        self.var = np.full(shape, var)

    def update(self, batch: np.ndarray) -> None:
        """Add a batch (B, *shape)."""
        self.merge(batch.mean(0, dtype=np.float64), batch.var(0, dtype=np.float64), len(batch))

    def merge(self, mean: np.ndarray, var: np.ndarray, n: float) -> None:
        """Add `n` samples with this mean and (biased) variance."""
        total = self.count + n
        delta = mean - self.mean
        self.mean = self.mean + delta * (n / total)
        squares = self.var * self.count + var * n + delta**2 * (self.count * n / total)
        self.var = squares / total
        self.count = total

    def since(self, mean: np.ndarray, var: np.ndarray, count: float) -> tuple[np.ndarray, np.ndarray, float]:
        """Return mean, variance and number of the samples added since the moments had these values."""
        n = self.count - count
        if n <= 0:
            return np.zeros_like(self.mean), np.zeros_like(self.var), 0.0
        later = mean + (self.mean - mean) * (self.count / n)
        squares = self.var * self.count - var * count - (later - mean) ** 2 * (count * n / self.count)
        return later, np.maximum(squares / n, 0.0), n


class VecNormalize:
    """Normaliser of the observations and rewards of N environments, with its statistics and discounted sums.

    Parameters
    ----------
    n_envs : int
        Number of environments N.
    obs_shape : tuple of int
        Shape of one observation.
    gamma : float
        Discount of the reward sum.
    obs, rewards : bool
        Whether to normalise observations and rewards.
    clip_obs, clip_rewards : float
        Bounds of the result, in standard deviations.
    part : callable, optional
        For observations that were rounded to float32: returns the name of their number with an index. A RuntimeWarning
        then names a number whose changes are lost by rounding, once.
    most_return : float
        Rewards are divided by more than the deviation where their discounted sums would else have exceeded this size.

    Raises
    ------
    TypeError, ValueError
        If `n_envs` is no integer >= 1, `gamma` is not in [0, 1], or a bound is not above 0.
    """

    EPSILON = 1e-8

    def __init__(
        self,
        n_envs: int,
        obs_shape: tuple[int, ...],
        gamma: float = 0.99,
        obs: bool = True,
        rewards: bool = True,
        clip_obs: float = 10.0,
        clip_rewards: float = 10.0,
        part: Callable[[int], str] | None = None,
        most_return: float = math.inf,
    ):
        n_envs = integer("VecNormalize", "n_envs", n_envs, 1)
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"VecNormalize: gamma must be in [0, 1], got {gamma}")
        for name, bound in (("clip_obs", clip_obs), ("clip_rewards", clip_rewards), ("most_return", most_return)):
            if not bound > 0.0:
                raise ValueError(f"VecNormalize: {name} must be > 0, got {bound}")
        self.gamma = gamma
        self.obs = obs
        self.rewards = rewards
        self.clip_obs = clip_obs
        self.clip_rewards = clip_rewards
        self.most_return = most_return
        self._part = part
        self.obs_moments = RunningMoments(obs_shape)
        self.return_moments = RunningMoments(())
        self.returns = np.zeros(n_envs)  # discounted sum of the rewards of each running episode
        self.largest = np.zeros(())  # largest size of these sums so far, if `most_return` needs it

    def update(self, obs: np.ndarray) -> None:
        """Add the observations ``(N, *obs_shape)`` of one step to the statistics."""
        if self.obs:
            self.obs_moments.update(obs)
            if self._part is not None and self.obs_moments.count > _CHECKED_AFTER:
                self._warn_if_lost(self._part)
                self._part = None

    def _warn_if_lost(self, part: Callable[[int], str]) -> None:
        """Warn about the first number of observations that varies by only a few of float32's steps."""
        mean, var, _ = (np.ravel(x) for x in self.obs_moments.since(*map(np.float64, _PRIOR)))
        steps, deviation = np.spacing(np.abs(mean).astype(np.float32)), np.sqrt(var)
        lost = np.flatnonzero((np.abs(mean) >= _LARGE) & (deviation < _LEAST_STEPS * steps))
        if len(lost):
            i = lost[0]
            warnings.warn(
                f"normalize_obs: observations are rounded to float32, whose steps are {steps[i]:g} near {mean[i]:.3g}, "
                f"the mean of {part(i)}: smaller changes of it are lost, its standard deviation is {deviation[i]:.3g}. "
                "Subtract a constant from it in the environment, or in gymnasium.wrappers.TransformObservation",
                RuntimeWarning,
                stacklevel=2,
            )

    def normalize(self, obs: np.ndarray) -> np.ndarray:
        """Normalise observations ``(B, *obs_shape)`` to f32 with the current statistics, without updating them."""
        if not self.obs:
            return obs
        scaled = (obs - self.obs_moments.mean) / np.sqrt(self.obs_moments.var + self.EPSILON)
        return np.clip(scaled, -self.clip_obs, self.clip_obs).astype(np.float32)

    def normalize_rewards(self, rewards: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Scale rewards (N,) of one step. Discounted sums restart in environments whose episode `ended` (N,)."""
        if not self.rewards:
            return rewards
        self.returns = self.returns * self.gamma + rewards
        self.return_moments.update(self.returns)
        if self.most_return < math.inf:
            self.largest = np.maximum(self.largest, np.abs(self.returns).max())
        self.returns[ended] = 0.0
        scaled = rewards / self._divisor()
        return np.clip(scaled, -self.clip_rewards, self.clip_rewards)

    def scale_rewards(self, rewards: np.ndarray) -> np.ndarray:
        """Divide rewards (B,) of any steps, in the environment's units, as f32, without updating the statistics."""
        if not self.rewards:
            return rewards
        return (rewards / self._divisor()).astype(np.float32)

    def _divisor(self) -> np.ndarray:
        """Return what rewards are divided by, ()."""
        deviation = np.sqrt(self.return_moments.var + self.EPSILON)
        return deviation if self.most_return == math.inf else np.maximum(deviation, self.largest / self.most_return)

    def since(self, before: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the moments of the samples since `state` returned `before`, for `merge`."""
        found = {}
        for name, moments in self._moments():
            mean, var, count = (before[f"{name}_{part}"] for part in MOMENTS)
            parts = moments.since(mean, var, float(count))
            found.update({f"{name}_{part}": np.array(value) for part, value in zip(MOMENTS, parts, strict=True)})
        if self.most_return < math.inf:
            found["return_largest"] = self.largest
        return found

    def merge(self, moments: dict[str, np.ndarray]) -> None:
        """Add moments that `since` returned, of this normaliser or another."""
        for name, own in self._moments():
            mean, var, count = (moments[f"{name}_{part}"] for part in MOMENTS)
            if count > 0:
                own.merge(mean, var, float(count))
        self.largest = np.maximum(self.largest, moments.get("return_largest", 0.0))

    def _moments(self) -> tuple[tuple[str, RunningMoments], ...]:
        return ("obs", self.obs_moments), ("return", self.return_moments)

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of all statistics; f64."""
        found = {"returns": self.returns.copy()}
        for name, moments in self._moments():
            found[f"{name}_mean"] = np.array(moments.mean)
            found[f"{name}_var"] = np.array(moments.var)
            found[f"{name}_count"] = np.array(moments.count)
        if self.most_return < math.inf:
            found["return_largest"] = self.largest
        return found

    def set_state(self, state: dict[str, np.ndarray], returns: bool = True) -> None:
        """Restore statistics from `state`. With `returns` False, the discounted sums of running episodes are kept.

        Raises
        ------
        ValueError
            If the observations have another shape.
        """
        own = ("returns", "return_largest")  # of the running episodes, and of `fit` alone
        ours = {name: array.shape for name, array in self.state().items() if name not in own}
        for name, shape in ours.items():
            if name not in state or state[name].shape != shape:
                got = state[name].shape if name in state else "nothing"
                raise ValueError(
                    f"VecNormalize.set_state: {name} must have shape {shape}, got {got}; the environment differs"
                )
        for name, moments in self._moments():
            moments.mean = state[f"{name}_mean"].copy()
            moments.var = state[f"{name}_var"].copy()
            moments.count = float(state[f"{name}_count"])
        self.largest = state.get("return_largest", self.largest)
        if returns and state["returns"].shape == self.returns.shape:
            self.returns = state["returns"].copy()
