"""Running normalisation of observations and rewards of N environments.

The rules are Stable-Baselines3's VecNormalize's: statistics grow with every observation that is seen, rewards are
divided
by the deviation of their discounted sum (not centred, so that their sign stays), and both are clipped. In evaluation
the statistics are frozen, and returns are always reported in the environment's own units.
"""

from __future__ import annotations

import numpy as np

MOMENTS = ("mean", "var", "count")  # of moments


class RunningMoments:
    """Mean and variance of a stream of vectors, merged batch by batch (Chan et al. 1979); float64.

    Parameters
    ----------
    shape : tuple of int
        Shape of one sample.
    """

    def __init__(self, shape: tuple[int, ...]):
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = 1e-4  # of a prior N(0, 1), so that the first division is defined

    def update(self, batch: np.ndarray) -> None:
        """Take in a batch (B, *shape)."""
        self.merge(batch.mean(0, dtype=np.float64), batch.var(0, dtype=np.float64), len(batch))

    def merge(self, mean: np.ndarray, var: np.ndarray, n: float) -> None:
        """Take in `n` samples of this mean and (biased) variance."""
        total = self.count + n
        delta = mean - self.mean
        self.mean = self.mean + delta * (n / total)
        squares = self.var * self.count + var * n + delta**2 * (self.count * n / total)
        self.var = squares / total
        self.count = total

    def since(self, mean: np.ndarray, var: np.ndarray, count: float) -> tuple[np.ndarray, np.ndarray, float]:
        """Mean, variance and number of the samples that came after its moments were these."""
        n = self.count - count
        if n <= 0:
            return np.zeros_like(self.mean), np.zeros_like(self.var), 0.0
        later = mean + (self.mean - mean) * (self.count / n)
        squares = self.var * self.count - var * count - (later - mean) ** 2 * (count * n / self.count)
        return later, np.maximum(squares / n, 0.0), n


class VecNormalize:
    """Normalises what N environments return; holds all statistics, and the discounted sums they come from.

    Parameters
    ----------
    n_envs : int
        Number of environments N.
    obs_shape : tuple of int
        Shape of one observation.
    gamma : float
        Discount of the reward sum.
    obs, rewards : bool
        What to normalise.
    clip_obs, clip_rewards : float
        Bounds of the result, in standard deviations.
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
    ):
        self.gamma = gamma
        self.obs = obs
        self.rewards = rewards
        self.clip_obs = clip_obs
        self.clip_rewards = clip_rewards
        self.obs_moments = RunningMoments(obs_shape)
        self.return_moments = RunningMoments(())
        self.returns = np.zeros(n_envs)  # discounted sum of rewards of each running episode

    def update(self, obs: np.ndarray) -> None:
        """Take in the observations ``(N, *obs_shape)`` of one step."""
        if self.obs:
            self.obs_moments.update(obs)

    def normalize(self, obs: np.ndarray) -> np.ndarray:
        """Observations ``(B, *obs_shape)`` as f32 with the statistics as they stand; they do not change."""
        if not self.obs:
            return obs
        scaled = (obs - self.obs_moments.mean) / np.sqrt(self.obs_moments.var + self.EPSILON)
        return np.clip(scaled, -self.clip_obs, self.clip_obs).astype(np.float32)

    def normalize_rewards(self, rewards: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Rewards (N,) of one step, scaled; `ended` (N,) starts the discounted sums of those environments anew."""
        if not self.rewards:
            return rewards
        self.returns = self.returns * self.gamma + rewards
        self.return_moments.update(self.returns)
        self.returns[ended] = 0.0
        scaled = rewards / np.sqrt(self.return_moments.var + self.EPSILON)
        return np.clip(scaled, -self.clip_rewards, self.clip_rewards)

    def since(self, before: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The moments of what came after `state` returned `before`; `merge` adds them to another's."""
        found = {}
        for name, moments in self._moments():
            mean, var, count = (before[f"{name}_{part}"] for part in MOMENTS)
            parts = moments.since(mean, var, float(count))
            found.update({f"{name}_{part}": np.array(value) for part, value in zip(MOMENTS, parts, strict=True)})
        return found

    def merge(self, moments: dict[str, np.ndarray]) -> None:
        """Add what `since` returned, there or elsewhere."""
        for name, own in self._moments():
            mean, var, count = (moments[f"{name}_{part}"] for part in MOMENTS)
            if count > 0:
                own.merge(mean, var, float(count))

    def _moments(self) -> tuple[tuple[str, RunningMoments], ...]:
        return ("obs", self.obs_moments), ("return", self.return_moments)

    def state(self) -> dict[str, np.ndarray]:
        """All statistics, copies; f64."""
        found = {"returns": self.returns.copy()}
        for name, moments in self._moments():
            found[f"{name}_mean"] = np.array(moments.mean)
            found[f"{name}_var"] = np.array(moments.var)
            found[f"{name}_count"] = np.array(moments.count)
        return found

    def set_state(self, state: dict[str, np.ndarray], returns: bool = True) -> None:
        """Restore what `state` returned; `returns` False leaves the running sums, which belong to other episodes.

        Raises
        ------
        ValueError
            If the observations have another shape.
        """
        ours = {name: array.shape for name, array in self.state().items() if name != "returns"}
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
        if returns and state["returns"].shape == self.returns.shape:
            self.returns = state["returns"].copy()
