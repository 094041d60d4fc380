"""Running normalisation of observations and rewards on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlox.collectors.vec_normalize import MOMENTS, VecNormalize


class TensorNormalize(VecNormalize):
    """A `VecNormalize` whose statistics are float64 tensors, updated in place, so that a CUDA graph can update them.

    `normalize` and `state` are those of the host, and copy the statistics there; `normalize_step_` is for tensors.

    Parameters
    ----------
    device : str
        Where the statistics are.
    *arguments
        Those of `VecNormalize`.
    """

    def __init__(self, device: str, *arguments: Any):
        super().__init__(*arguments)
        self._tensors = {name: torch.from_numpy(array).to(device) for name, array in super().state().items()}

    def start(self, obs: torch.Tensor) -> None:
        """Add the first observations (N, *obs_shape) to the statistics."""
        if self.obs:
            self._merge_("obs", obs)

    def normalize_tensor(self, obs: torch.Tensor) -> torch.Tensor:
        """Normalise observations (B, *obs_shape) to f32, without updating the statistics. Infinite ones stay so."""
        if not self.obs:
            return obs
        mean, var = self._tensors["obs_mean"], self._tensors["obs_var"]
        scaled = (obs - mean) / (var + self.EPSILON).sqrt()
        return torch.where(obs.isfinite(), scaled.clamp_(-self.clip_obs, self.clip_obs), obs).float()

    def normalize_step_(self, row: dict[str, torch.Tensor]) -> None:
        """Update the statistics with a step of `rlox.envs.tensor.vec_env.TensorVecEnv`, and normalise it in place."""
        self.start(row["obs"])
        if self.rewards:
            rewards, returns = row["rewards"], self._tensors["returns"]
            returns.mul_(self.gamma).add_(rewards)
            self._merge_("return", returns)
            returns.masked_fill_(row["terminated"] | row["truncated"], 0.0)
            scaled = rewards / (self._tensors["return_var"] + self.EPSILON).sqrt()
            scaled.clamp_(-self.clip_rewards, self.clip_rewards)
            rewards.copy_(torch.where(rewards.isfinite(), scaled, rewards))
        if self.obs:
            for name in ("obs", "final_obs"):
                row[name].copy_(self.normalize_tensor(row[name]))

    def _merge_(self, name: str, batch: torch.Tensor) -> None:
        """Add a batch (N, …) to the moments as `RunningMoments.merge` does, unless its numbers are not finite."""
        mean, var, count = (self._tensors[f"{name}_{part}"] for part in MOMENTS)
        batch_var, batch_mean = torch.var_mean(batch.double(), 0, correction=0)
        n, total, delta = len(batch), count + len(batch), batch_mean - mean
        squares = var * count + batch_var * n + delta.square() * (count * n / total)
        finite = squares.isfinite().all()
        mean.copy_(torch.where(finite, mean + delta * (n / total), mean))
        var.copy_(torch.where(finite, squares / total, var))
        count.copy_(torch.where(finite, total, count))

    def normalize(self, obs: np.ndarray) -> np.ndarray:
        if self.obs:
            super().set_state(self.state())
        return super().normalize(obs)

    def state(self) -> dict[str, np.ndarray]:
        return {name: x.cpu().numpy().copy() for name, x in self._tensors.items()}

    def set_state(self, state: dict[str, np.ndarray], returns: bool = True) -> None:
        super().set_state(state, returns)
        for name, array in super().state().items():
            if name != "returns" or returns:
                self._tensors[name].copy_(torch.from_numpy(array))
